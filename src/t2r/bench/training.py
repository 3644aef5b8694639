"""Measures the time of an optimizer step: finetuning of the softmax model, and each stage of its conversion.

A step is forward, backward and optimizer step on random tokens, with the settings of a session: on a GPU in bfloat16,
compiled, and captured as a CUDA graph. Data loading is not included. For an encoder-decoder, a block is a pair: a
source and a target of `block_size` tokens each.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from t2r.bench.models import with_positions
from t2r.data.parallel.corpus import Pair
from t2r.errors import T2RError
from t2r.hub import synchronize
from t2r.model.swap import swap
from t2r.tasks import LanguageModeling, Task
from t2r.tasks.base import max_positions
from t2r.tasks.translation import Translation, shift_of
from t2r.training.planning.plan import over
from t2r.training.planning.timing import stage_step
from t2r.training.recipes.recipe import Stage, default_recipe, load_recipe
from t2r.training.steps.arithmetic import fast_sums, halve
from t2r.training.steps.capture import WARM_UP
from t2r.training.steps.job import Job, Settings
from t2r.training.steps.optimizers import make_optimizer
from t2r.words import counted

if TYPE_CHECKING:
    from rich.table import Table

logger = logging.getLogger(__name__)

BLOCK, PAIR = 512, 64
"""Default tokens per block: of text, and of each side of a pair."""


@dataclass(frozen=True)
class TrainingSettings:
    recipe: str
    batch_tokens: int
    block_size: int
    dtype: str
    device: str
    compiled: bool
    repeats: int
    threads: int
    """CPU threads of torch."""


@dataclass(frozen=True)
class Row:
    """One kind of step."""

    step: str
    milliseconds: float
    """The median over `repeats` steps."""
    tokens_per_second: float
    peak_bytes: int | None
    """Allocated on the GPU, including weights. None on a CPU."""


@dataclass(frozen=True)
class Report:
    settings: TrainingSettings
    rows: list[Row]


class RandomText(LanguageModeling):
    """A task with random tokens."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(None, [])  # type: ignore[arg-type]
        self.words = vocabulary

    def example(self, rows: int, length: int) -> dict[str, Tensor]:
        ids = torch.randint(self.words, (rows, length), generator=torch.Generator().manual_seed(0))
        return {"input_ids": ids, "labels": ids}


class RandomPairs(Translation):
    """A task with random pairs. Every second source is shorter by one token, so that there is padding."""

    def __init__(self, model: Any) -> None:
        super().__init__(None, [], [])  # type: ignore[arg-type]
        sides = model.get_input_embeddings(), model.get_output_embeddings()
        self.words = [len(side.weight) for side in sides]
        self.pad, self.shift = model.config.pad_token_id or 0, shift_of(model)

    def example(self, rows: int, length: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        sides = [torch.randint(size, (rows, length), generator=generator).numpy() for size in self.words]
        return self.collate([[Pair(s[: length - i % 2], t) for i, (s, t) in enumerate(zip(*sides, strict=True))]])


def run(
    model: PreTrainedModel,
    *,
    recipe: str | None = None,
    batch_tokens: int = 16384,
    block_size: int | None = None,
    bf16: bool | None = None,
    compiled: bool | None = None,
    repeats: int = 10,
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Time the steps of converting a model. The model is not modified.

    Args:
        recipe: the recipe whose stages are timed, with its swap options. Defaults to `distill-lm`, or `distill-mt` for
            an encoder-decoder.
        options: swap options that override the recipe's.
        batch_tokens: tokens per step, in blocks of `block_size`.
        block_size: defaults to 512 tokens, or for an encoder-decoder to pairs of 64.
        bf16: defaults to true on a GPU.
        compiled: defaults to true on a GPU.
    """
    translates = bool(model.config.is_encoder_decoder)
    block_size = block_size or (PAIR if translates else BLOCK)
    if batch_tokens < block_size or batch_tokens % block_size:
        raise T2RError(f"batch_tokens={batch_tokens} must be a multiple of block_size={block_size}")
    if translates:
        most = max_positions(model)
        if most is not None and block_size > most:
            raise T2RError(f"block_size={block_size} is beyond the {most} positions of the model: give a smaller one")
    elif (longer := with_positions(model, block_size)) is not model:
        logger.warning(
            "the model has fewer than %s positions. They are repeated: only time and memory count", block_size
        )
        model = longer
    how = Settings.on(model.device, bf16=bf16, compiled=compiled, progress=False)
    plan = load_recipe(default_recipe(translates) if recipe is None else recipe)
    task: Task = RandomPairs(model) if translates else RandomText(model.config.get_text_config().vocab_size)
    base = copy.deepcopy(model).float().requires_grad_(True)
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    if how.bf16:
        halve(teacher)
    finetune = Stage("finetune", "task", "all", steps=1)
    rows = [("softmax model, finetuned", finetune, base)]
    student = swap(copy.deepcopy(base), **over(plan.swap, dict(options or {})))
    rows += [(f"converted, {stage.name}", stage, student) for stage in plan.stages]
    if not any(stage.objective == "task" for stage in plan.stages):
        rows += [("converted, finetuned", finetune, student)]
    job, measured = Job(task, teacher, how), []
    with fast_sums(model.device):
        for name, stage, trained in rows:
            sized = replace(stage, batch_tokens=batch_tokens, block_size=block_size)
            measured.append(time_steps(name, job, trained, sized, repeats))
    dtype = "bfloat16" if how.bf16 else "float32"
    settings = TrainingSettings(
        plan.name,
        batch_tokens,
        block_size,
        dtype,
        str(model.device),
        how.compiled,
        repeats,
        torch.get_num_threads(),
    )
    return Report(settings, measured)


def time_steps(name: str, job: Job, model: PreTrainedModel, stage: Stage, repeats: int) -> Row:
    """Return the median time of `repeats` steps after a warm-up. The learning rate is 0, so weights do not change."""
    device = model.device
    on_gpu = device.type == "cuda"
    with stage_step(job, model, stage) as step:
        optimizer = make_optimizer(model, stage)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        example = job.task.example(stage.batch_tokens // stage.block_size, stage.block_size)
        batch = {key: x.to(device) for key, x in example.items()}
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        times = []
        for _ in range(WARM_UP + 1 + repeats):
            synchronize(device)
            started = time.perf_counter()
            step(batch)
            optimizer.step()
            optimizer.zero_grad()
            synchronize(device)
            times.append(1e3 * (time.perf_counter() - started))
    milliseconds = median(times[WARM_UP + 1 :])
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else None
    return Row(name, milliseconds, 1e3 * stage.batch_tokens / milliseconds, peak)


# --- Formatting ---------------------------------------------------------------------------------------------


def tables(report: Report) -> Sequence[Table | str]:
    from rich.table import Table

    s = report.settings
    how = f"{s.dtype} on {s.device}" + ("" if s.device != "cpu" else f" ({counted(s.threads, 'thread')})")
    table = Table(title=f"A step of {s.batch_tokens:,} tokens in blocks of {s.block_size}, {how}")
    table.add_column("step")
    for heading in ("ms", "tokens/s", "against softmax", "peak memory"):
        table.add_column(heading, justify="right")
    first = report.rows[0].milliseconds
    for row in report.rows:
        peak = "" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.1f} GiB"
        table.add_row(
            row.step,
            f"{row.milliseconds:.1f}",
            f"{row.tokens_per_second:,.0f}",
            f"{row.milliseconds / first:.2f}",
            peak,
        )
    return [table]
