"""Measures the largest batch that fits into memory at a context length, and the tokens per second there.

On a GPU, batches are tried: a step of `t2r.Engine` is allocated and run, the batch grows until memory is exhausted, and
the limit is found by bisection. On a CPU, where memory does not end sharply, the batch is computed from
counted bytes and a given limit. The context is not read: a step takes the same time for any values in the cache.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from t2r.bench.models import check_alike, check_shape, with_positions
from t2r.bench.summary import mebibytes, median_and_spread, titled_table, with_short_names
from t2r.errors import T2RError
from t2r.evaluation.inputs import refuse_seq2seq
from t2r.evaluation.logits import evaluating
from t2r.generation.engine.softmax import on_the_engine
from t2r.generation.engine.step import DecodeStep
from t2r.hub import synchronize
from t2r.model.modeling import T2RModel
from t2r.model.windows import with_windows
from t2r.words import counted

if TYPE_CHECKING:
    from rich.table import Table

CONTEXT = 8192
PRECISION = 32
"""The bisection ends when the batch is known to one part in this number."""
LOGITS = 3
"""Copies of the logits in float32 that a step needs at the same time, in the count of bytes."""


def paper_models(shape: str = "paper-lm") -> list[str]:
    """Return a language model of the paper's size with random weights, and the same with 32 features.

    Raises T2RError if the shape is that of an encoder-decoder."""
    check_shape(shape, translates=False)
    return [f"softmax=random:{shape}", f"T2R 32=random:{shape},feature_map=t2r,feature_size=32,merged"]


@dataclass(frozen=True)
class MemorySettings:
    context: int
    steps: int
    repeats: int
    dtype: str
    device: str
    memory: int
    """Bytes of the GPU, or the given limit."""
    threads: int


@dataclass(frozen=True)
class Row:
    """One model."""

    model: str
    batch: int
    """The largest batch that fits; `most` if a larger one was not tried. 0: not even one sequence fits."""
    limited: bool
    """Whether `most` ended the search, not memory."""
    sequence_bytes: int
    """The cache of one sequence."""
    milliseconds: float | None
    """Time of a step of that batch. None if no sequence fits."""
    tokens_per_second: float | None
    spread: float | None
    peak_bytes: int | None
    """Allocated on the GPU with that batch. None on a CPU."""


@dataclass(frozen=True)
class Report:
    settings: MemorySettings
    rows: list[Row]


def run(
    models: Mapping[str, PreTrainedModel],
    *,
    context: int = CONTEXT,
    memory: float | None = None,
    most: int | None = None,
    steps: int = 8,
    repeats: int = 3,
    state_dtype: torch.dtype | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Find the largest batch of language models, given by name. The first model is the reference.

    A row for the first model with a window, whose keys and values take as many bytes as the smallest state of the
    others, is always included.

    Args:
        context: tokens of each sequence.
        memory: the limit in GiB. Required on a CPU. On a GPU, it limits what torch may allocate.
        most: the largest batch to try.
        steps, repeats: a time is the median over `repeats` rounds of `steps` tokens.
        state_dtype: the dtype in which states are stored, if not float32.
    """
    if not models:
        raise T2RError("give at least one model")
    for name, number in (("context", context), ("steps", steps), ("repeats", repeats), ("most", most or 1)):
        if number < 1:
            raise T2RError(f"{name} must be at least 1; got {number}")
    if memory is not None and memory <= 0:
        raise T2RError(f"memory must be more than 0 GiB; got {memory:g}")
    for name, model in models.items():
        refuse_seq2seq(model.config, name)
    check_alike(models)
    first = next(iter(models.values()))
    device, tell = first.device, progress or (lambda line: None)
    if device.type != "cuda" and memory is None:
        raise T2RError(f"on {device.type}, the memory must be given: --memory GIB")
    limit = int(memory * 2**30) if memory is not None else torch.cuda.mem_get_info(device)[1]
    contestants = prepared(models, context + steps + 1, state_dtype)
    rows = []
    with evaluating(*(model for _, model in contestants)):
        for name, model in contestants:
            tell(f"{name}: looking for the largest batch")
            each = step_of(model, 1, 0, 1, state_dtype).row_bytes(context)
            room = Search(model, context, context + steps + 1, limit, memory is not None, state_dtype)
            release(device)  # loading may have taken more than a step
            batch, limited = room.counted(most)
            if device.type == "cuda":
                batch, limited = room.measured(most, batch * 3 // 4)
            found: tuple[Any, ...] = (None, None, None, None)
            if batch:
                tell(f"{name}: decoding a batch of {batch:,}")
                found = room.time(batch, steps, repeats)
            rows.append(Row(name, batch, limited, each, *found))
    dtype = str(first.dtype).removeprefix("torch.")
    settings = MemorySettings(context, steps, repeats, dtype, str(device), limit, torch.get_num_threads())
    return Report(settings, rows)


def prepared(
    models: Mapping[str, PreTrainedModel], length: int, state_dtype: torch.dtype | None
) -> list[tuple[str, Any]]:
    """Return names and models for the engine. The first model with windows is added."""
    ready = {name: on_the_engine(with_positions(model, length)) for name, model in models.items()}
    found: list[tuple[str, Any]] = list(ready.items())
    swapped = [model for name, model in ready.items() if isinstance(models[name], T2RModel)]
    # The memory of models with softmax layers depends on the length.
    pure = [model for model in swapped if not model.grows()] or swapped
    states = [step_of(model, 1, 0, 1, state_dtype).row_bytes(0) for model in pure]
    teacher, own = next(iter(ready.items()))
    if states and not isinstance(models[teacher], T2RModel):
        window = max(1, min(states) // step_of(own, 1, 0, 1).row_bytes(1))
        found.append((f"{teacher}, window of {window:,}", with_windows(models[teacher], window)))
    return found


def step_of(model: Any, rows: int, read: int, size: int, state_dtype: torch.dtype | None = None) -> DecodeStep:
    """Return a step whose rows have read `read` tokens, with room for `size` keys and values in softmax layers."""
    decode = DecodeStep(model, rows, size if model.grows() else None, state_dtype=state_dtype)
    decode.active.fill_(1)
    decode.greedy.fill_(True)
    decode.own.lengths.fill_(read)
    return decode


class Search:
    """The search for the largest batch of one model, whose rows have read `read` tokens and have room for `size`."""

    def __init__(
        self,
        model: Any,
        read: int,
        size: int,
        limit: int,
        limits_torch: bool,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.read, self.size, self.limit = model, read, size, limit
        self.limits_torch, self.state_dtype = limits_torch, state_dtype

    def step(self, rows: int) -> DecodeStep:
        return step_of(self.model, rows, self.read, self.size, self.state_dtype)

    def counted(self, most: int | None) -> tuple[int, bool]:
        """Return the batch whose weights, caches and logits take as many bytes as there are."""
        weights = sum(x.nbytes for x in {id(x): x for x in self.model.parameters()}.values())
        words = self.model.config.get_text_config().vocab_size
        decode = self.step(1)
        each = decode.row_bytes(self.size) + LOGITS * 4 * words
        batch = max(0, (self.limit - weights) // each)
        return (batch, False) if most is None or batch <= most else (most, True)

    def measured(self, most: int | None, first: int = 1) -> tuple[int, bool]:
        """Return the largest batch for which a step can be allocated and run.

        Each trial takes seconds, so the search begins at `first`, which should be near the result."""
        low, high = 0, max(1, first)
        while self.fits(high):
            if most is not None and high >= most:
                return most, True
            low, high = high, high + max(1, high // 4)
            high = high if most is None else min(high, most)
        while high - low > max(1, low // PRECISION):
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return low, False

    def fits(self, rows: int) -> bool:
        device, fits = self.model.device, True
        try:
            self.step(rows).run()
            torch.cuda.synchronize(device)
        except torch.OutOfMemoryError:
            fits = False
        if self.limits_torch:
            fits = fits and torch.cuda.max_memory_allocated(device) <= self.limit
        release(device)  # after the exception, which holds its tensors
        return fits

    def time(self, rows: int, steps: int, repeats: int) -> tuple[float, float, float, int | None]:
        """Return milliseconds, tokens per second and spread of a batch, and the peak of memory on a GPU."""
        decode, device = self.step(rows), self.model.device
        times = []
        for _ in range(1 + repeats):
            decode.own.lengths.fill_(self.read)
            synchronize(device)
            started = time.perf_counter()
            for _ in range(steps):
                decode.run()
            synchronize(device)
            times.append(1e3 * (time.perf_counter() - started) / steps)
        each, spread = median_and_spread(times[1:])
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        decode = None  # type: ignore[assignment]
        release(device)
        return each, 1e3 * rows / each, spread, peak


def release(device: torch.device) -> None:
    """Return freed memory to the device, and start a new peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


# --- Formatting ---------------------------------------------------------------------------------------------

HEADER = ("model", "largest batch", "cache of a sequence", "ms per step", "tokens/s", "spread")


def title(report: Report) -> str:
    s = report.settings
    how = "counted" if s.device == "cpu" else "measured"
    return (
        f"Largest batch in {s.memory / 2**30:,.1f} GiB at {s.context:,} tokens, {how}; {s.dtype} on {s.device}, "
        f"median of {counted(s.repeats, 'round')} of {counted(s.steps, 'step')}"
    )


def cells(report: Report) -> list[tuple[str, ...]]:
    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return [
        (
            row.model,
            f"{row.batch:,}" + (" (limit)" if row.limited else ""),
            mebibytes(row.sequence_bytes),
            number(row.milliseconds, ".2f"),
            number(row.tokens_per_second, ",.0f"),
            number(row.spread, ".0%"),
        )
        for row in report.rows
    ]


def tables(report: Report) -> list[Table | str]:
    report = with_short_names(report)
    return [titled_table(title(report), HEADER, cells(report), sections=False), *notes(report)]


def notes(report: Report) -> list[str]:
    first, *others = report.rows
    lines = []
    for row in others:
        if first.batch and row.tokens_per_second is not None and first.tokens_per_second is not None:
            lines.append(
                f"{row.model}: {row.batch / first.batch:.1f} times the batch of {first.model}, and "
                f"{row.tokens_per_second / first.tokens_per_second:.1f} times its tokens/s."
            )
    return lines
