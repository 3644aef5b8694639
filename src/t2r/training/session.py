"""One training session, for every task: the run folder, the data, the stages, what is measured, and the result."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
import yaml
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from t2r.errors import T2RError
from t2r.storage import whole_folder
from t2r.tasks import TASKS, Task
from t2r.tasks.language_modeling import LanguageModeling
from t2r.training import processes
from t2r.training.arithmetic import fast_sums
from t2r.training.recipe import Recipe, Stage
from t2r.training.run import Run, run_folder
from t2r.training.sensitivity import most_sensitive
from t2r.training.stages import check_checkpointing, run_stage
from t2r.training.trainer import Settings

logger = logging.getLogger(__name__)


class Session:
    """A plan on its way to a folder.

    As a context manager it holds the run folder's lock. Everything that is refused should be refused before `prepare`
    returns: from then on the run has begun, and the same call goes on with it.

    Args:
        out: the folder to make. `out.run` beside it holds the unfinished run.
        plan: the stages.
        task: the data, the scores and the metric.
        settings: how it is trained.
        place: the device.
        facts: what else makes this run this run: a resumed one must have the same.
    """

    def __init__(
        self,
        out: str,
        plan: Recipe,
        task: Task,
        settings: Settings,
        place: torch.device,
        facts: dict[str, Any],
    ) -> None:
        self.out, self.plan, self.task, self.settings, self.place = out, plan, task, settings, place
        known = {"recipe": plan.to_dict(), "seed": settings.seed, "bf16": settings.bf16}
        self.run = Run(run_folder(out), facts | task.describe() | known)

    def __enter__(self) -> Self:
        self.run.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run.__exit__(kind, error, trace)

    def prepare(self, model: PreTrainedModel, teacher: PreTrainedModel | None = None) -> None:
        """Make the data. After this nothing is refused, and the run begins."""
        if self.settings.gradient_checkpointing:
            check_checkpointing(model)
        sizes = {stage.block_size for stage in self.plan.stages}
        names = self.task.prepare(teacher, max(sizes))
        for size in sizes:
            self.task.dataset(size)
        self.run.remember("corpus", lambda: names)
        self.run.check("corpus", names)

    def measure(self, name: str, model: PreTrainedModel, teacher: PreTrainedModel | None = None) -> Any:
        """The task's metrics now, once: on resuming they are what they were."""
        measured = self.run.remember(f"measured.{name}", lambda: self.task.measure(model, teacher))
        if measured is not None:
            logger.info("%s: %s", name, self.task.told(measured))
        return measured

    def train(self, model: PreTrainedModel, stage: Stage, teacher: PreTrainedModel | None = None) -> PreTrainedModel:
        """Run a stage, or take its result if it is finished."""
        with fast_sums(self.place):
            return run_stage(self.run, model, stage, self.task, teacher, self.settings)

    def most_sensitive(self, model: PreTrainedModel, block_size: int) -> list[list[Any]]:
        """Layers and what making each alone recurrent costs, the most costly first. Each is measured once."""
        scan = most_sensitive(
            model,
            self.task,
            block_size,
            remember=lambda name, measure: self.run.remember(f"sensitivity.{name}", measure),
            progress=self.settings.progress and processes.is_main(),
        )
        return [list(cost) for cost in scan]

    def logs(self) -> dict[str, Any]:
        """The losses of each stage."""
        return {stage.name: self.run.facts[f"{stage.name}.log"] for stage in self.plan.stages}

    def save(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        results: dict[str, Any],
        *,
        compared: bool,
        overwrite: bool,
        files: dict[str, str] | None = None,
    ) -> None:
        """All of it in one folder, whole or not at all; the run folder goes.

        A table of the results is added to the model card; `files` are more texts by name, written before the model is
        saved."""
        if processes.is_main():
            with whole_folder(self.out, overwrite=overwrite) as folder:
                for name, text in (files or {}).items():
                    (folder / name).write_text(text, encoding="utf-8")
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
                (folder / "recipe.yaml").write_text(as_yaml(self.plan.to_dict()), encoding="utf-8")
                (folder / "results.json").write_text(json.dumps(results, indent=1, allow_nan=False), encoding="utf-8")
                with (folder / "README.md").open("a", encoding="utf-8") as card:
                    card.write(results_section(self.plan, *table_of(results, compared=compared)))
        self.run.remove()
        processes.wait()


# --- Telling ------------------------------------------------------------------------------------------------


def table_of(results: dict[str, Any], *, compared: bool) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows: what was measured, in the order in which it came about, in the words of its task."""
    task = TASKS.get(results.get("task", ""), LanguageModeling)
    before = [("teacher", "teacher"), ("swapped, not trained", "swapped")] if compared else [("untrained",) * 2]
    measured = [(words, results[key]) for words, key in before]
    measured += [(f"after {name}", values) for name, values in results["stages"].items()]
    return task.table(measured, compared=compared)


def as_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    return table


def results_section(plan: Recipe, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """For the model card: how it was trained, and what came of it."""
    lines = [
        "",
        "## Results",
        "",
        f"Trained with the recipe `{plan.name}` (recipe.yaml; all numbers: results.json).",
        "",
    ]
    if rows:
        lines += [f"| {' | '.join(cells)} |" for cells in (header, ("---",) * len(header), *rows)] + [""]
    return "\n".join(lines)


def finite(value: Any) -> Any:
    """The same without infinities and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_yaml(value: dict[str, Any]) -> str:
    return yaml.safe_dump(value, sort_keys=False)


@contextmanager
def caching() -> Iterator[None]:
    """Text becomes tokens, once: the main process goes first, and the others find what it has cached."""
    with processes.main_first():
        try:
            yield
        except OSError as error:
            raise T2RError(f"the tokens of the text cannot be cached: {error}") from error
