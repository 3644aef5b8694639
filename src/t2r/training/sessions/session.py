"""A training session, for every task: the run folder, the data, the stages, evaluation, and the result."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
import yaml
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from t2r.data.teacher_logits import TeacherLogits
from t2r.errors import TOLD_BY_ANY, T2RError
from t2r.options import options_of
from t2r.storage import whole_folder
from t2r.tasks import TASKS, Task
from t2r.tasks.language_modeling import LanguageModeling
from t2r.training.loop import processes
from t2r.training.loop.preparation import check_checkpointing
from t2r.training.loop.threads import can_choose
from t2r.training.planning.budget import Timetable, Work, decide, steps_of, with_batch
from t2r.training.planning.plan_log import plan_lines
from t2r.training.planning.timing import (
    Speeds,
    choose_threads,
    scanned_layers,
    time_again,
    time_all,
    times_one_size,
)
from t2r.training.recipes.recipe import Recipe, Stage
from t2r.training.sessions.card import completed, training_section
from t2r.training.sessions.run import Run, run_folder, saved_stages
from t2r.training.sessions.run_stage import Limits, run_stage
from t2r.training.sessions.sensitivity import BLOCKS, most_sensitive
from t2r.training.steps.arithmetic import fast_sums
from t2r.training.steps.job import Job, Settings
from t2r.words import duration, in_minutes

logger = logging.getLogger(__name__)

WORTH_TIMING = 50
"""If all stages have fewer steps, they are not timed before training: timing would take as long."""


class Session:
    """Executes a plan and saves the result in a folder.

    As a context manager it holds the lock of the run folder. Errors of the user should be found before `prepare`
    returns: from then on the run has started, and the same call resumes it.

    Args:
        out: the output folder. The unfinished run is kept in `out.run`.
        plan: the stages.
        task: the data, the loss and the metric.
        settings: the training settings.
        place: the device.
        facts: further facts that identify this run. A resumed run must have the same.
        minutes: total time budget. The stages of the plan then have minutes too, which are their shares of it.
        began: when the work began, by `time.monotonic`. None: now.
        restart: remove an unfinished run.
        logits: the teacher's distribution of the text, which distillations read.
    """

    def __init__(
        self,
        out: str,
        plan: Recipe,
        task: Task,
        settings: Settings,
        place: torch.device,
        facts: dict[str, Any],
        *,
        minutes: float | None = None,
        began: float | None = None,
        restart: bool = False,
        logits: TeacherLogits | None = None,
    ) -> None:
        self.out, self.plan, self.task, self.settings, self.place = out, plan, task, settings, place
        self.job = Job(task, settings=settings, logits=logits)
        """With the teacher, after `prepare`."""
        self.minutes = minutes
        by_the_clock = minutes is not None or any(stage.minutes is not None for stage in plan.stages)
        self.threads = torch.get_num_threads() if by_the_clock and can_choose(place) else None
        """The maximum number of threads. None: the number of threads is not tuned."""
        self.reading: float | None = None
        """Seconds of the last forward pass over the evaluation windows."""
        self.aside = 0.0
        """Seconds reserved for what is measured after the last stage beside the task's metrics."""
        self.timetable: Timetable | None = None
        self.speeds: Speeds | None = None
        known = {"recipe": plan.to_dict(), "seed": settings.seed, "bf16": settings.bf16}
        if minutes is not None:
            known["minutes"] = minutes
        self.run = Run(run_folder(out), facts | task.describe() | known, restart=restart, began=began)

    def __enter__(self) -> Self:
        self.run.__enter__()
        self.plan = as_begun(self.plan, self.run.facts["plan"])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopped = kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit)  # by Ctrl-C, by SIGTERM
        begun = self.run.begun
        if stopped and begun:
            if processes.is_main():
                self.run.write()  # records the working time
            if processes.first_to_tell():
                ended = ", as torchrun does if another process has ended" if processes.count() > 1 else ""
                logger.warning(
                    "interrupted%s: the same command resumes this run, with --restart it starts again",
                    ended,
                    extra={TOLD_BY_ANY: True},
                )
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        self.run.__exit__(kind, error, trace)
        if processes.lost_another(error):
            again = "the same command resumes this run from its last checkpoint" if begun else "start all of them again"
            raise T2RError(f"another process of this run has ended, so this one does too: {again}") from error

    def prepare(
        self,
        model: PreTrainedModel,
        teacher: PreTrainedModel | None = None,
        *,
        author: PreTrainedModel | None = None,
        scans: bool = False,
    ) -> None:
        """Time this machine, log the plan, and prepare the data. The run starts when this returns.

        Args:
            teacher: the teacher of all distillations.
            author: the model that generates training data. None: the teacher.
            scans: the sensitivity of the layers will be measured.
        """
        if self.settings.gradient_checkpointing:
            check_checkpointing(model)
        self.job = dataclasses.replace(self.job, teacher=teacher)
        sizes = {stage.block_size for stage in self.plan.stages}
        self.task.read()
        # What is there is checked before the teacher writes more.
        if self.task.tokens or not self.task.asked_of_teacher:
            for size in sizes:
                self.task.dataset(size)
        if self.job.logits is not None:
            for stage in self.plan.stages:
                self.job.dataset(stage)
        if self.run.begun:
            logger.info("resuming the unfinished run in %s", self.run.folder)
        work = self.work(model, scans)
        if "schedule" not in self.run.facts:
            threads = None
            if self.threads is not None:
                threads = choose_threads(self.job, model, self.plan.stages[0])
            made = self.arrange(work, model, teacher if author is None else author)
            self.run.remember("threads", lambda: threads)
            if made is not None:
                self.run.remember("speeds", made[0].to_dict)
            self.run.remember("schedule", lambda: None if made is None else made[1].to_dict())
        elif self.threads is not None:
            torch.set_num_threads(self.run.facts.get("threads") or self.threads)
        if (known := self.run.facts["schedule"]) is not None:
            self.timetable = Timetable.from_dict(known)
            self.speeds = Speeds.from_dict(self.run.facts["speeds"])
            self.restrict(work, self.timetable)
        for line in plan_lines(self.job, model, work, self.timetable, self.place, self.minutes):
            logger.info("%s", line)
        names = self.task.prepare(teacher if author is None else author, max(sizes, default=0))
        for size in sizes:
            self.task.dataset(size)
        self.run.remember("corpus", lambda: names)
        self.run.check("corpus", names)

    def work(self, model: PreTrainedModel, scans: bool) -> Work:
        """Return the requested work."""
        windows, window = self.task.windows(model)
        return Work(
            self.plan,
            teacher_tokens=self.task.asked_of_teacher,
            tokens=self.task.epoch_tokens,
            windows=windows,
            window=window,
            windows_of=lambda tokens: self.task.windows(model, tokens)[0],
            unit=self.task.measured_in,
            reads=self.reads(),
            passes=scanned_layers(model) if scans else 0,
            scanned=BLOCKS,
            fewest_blocks=self.task.fewest_blocks,
            told_writing=self.task.told_writing,
            smallest_block=self.task.smallest_block,
        )

    @property
    def compared(self) -> bool:
        """Whether there is a teacher, with which students are compared."""
        return self.job.teacher is not None

    def reads(self) -> int:
        """Return the number of passes over the evaluation windows: before training and after each stage, with a teacher
        also by the teacher."""
        count = len(self.plan.stages)
        return 3 + 2 * count if self.compared else 1 + count

    def arrange(
        self, work: Work, model: PreTrainedModel, author: PreTrainedModel | None
    ) -> tuple[Speeds, Timetable] | None:
        """Time the work and schedule it. `author` generates training data. None: the work is too short to be timed."""
        stages = self.plan.stages
        timed = self.minutes is not None or any(stage.minutes is not None for stage in stages)
        if not timed and all(steps_of(s, work.tokens + work.teacher_tokens) < WORTH_TIMING for s in stages):
            return None
        write = None
        if author is not None and work.teacher_tokens:
            write = partial(self.task.writing_speed, author, work.length)
        total = None if self.minutes is None else 60 * self.minutes
        with fast_sums(self.place):
            speeds = time_all(self.job, model, self.plan, write)
            timetable = decide(work, speeds, total, processes.agreed(self.run.seconds))
            smaller = [with_batch(s, timetable.stages[s.name].batch_tokens) for s in stages]
            if any(a != b for a, b in zip(smaller, stages, strict=True)) and times_one_size(self.job, self.place):
                speeds = time_again(self.job, model, stages, smaller, speeds)
                timetable = decide(work, speeds, total, processes.agreed(self.run.seconds))
        for words in timetable.shrunk:
            logger.warning("%s, to fit into %s", words, "its minutes" if total is None else in_minutes(total))
        return speeds, timetable

    def restrict(self, work: Work, timetable: Timetable) -> None:
        """Limit the task to the timetable."""
        self.task.restrict(
            teacher_tokens=timetable.teacher_tokens if timetable.teacher_tokens < work.teacher_tokens else None,
            windows=timetable.windows if timetable.windows < work.windows else None,
        )

    def seconds_for(self, stage: Stage) -> float | None:
        """Return the stage's share of the time left for training. None: the stage has its own budget."""
        if self.minutes is None or self.timetable is None:
            return None
        index = self.plan.stages.index(stage)
        later = self.plan.stages[index:]
        reading = self.timetable.measuring / self.reads() if self.reading is None else self.reading
        others = reading * len(later) * (2 if self.compared else 1) + self.timetable.saving + self.aside
        if index == 0:
            others += self.timetable.scanning
        left = max(0.0, 60 * self.minutes - self.run.seconds - others)
        return left * (stage.minutes or 0.0) / sum(each.minutes or 0.0 for each in later)

    def measure(self, after: str | Stage, model: PreTrainedModel, teacher: PreTrainedModel | None = None) -> Any:
        """Evaluate the task's metrics after a stage, or of a model that is not a stage's result, by its name. A resumed
        run returns the saved values."""
        # A stage may have the name of such a model, for example `teacher`.
        name, key = (after, f"measured.{after}") if isinstance(after, str) else (after.name, f"{after.name}.measured")
        began, known = time.monotonic(), key in self.run.facts
        measured = self.run.remember(key, lambda: self.task.measure(model, teacher))
        if measured is not None:
            if not known:
                self.reading = (time.monotonic() - began) / (1 if teacher is None else 2)
            logger.info("%s: %s", name, self.task.told(measured))
        return measured

    def recall(self, model: PreTrainedModel) -> list[dict[str, Any]]:
        """Measure the recall of the trained model. A resumed run returns the saved values."""
        rows: list[dict[str, Any]] = self.run.remember("recall", lambda: self.task.recall(model))
        return rows

    def train(self, model: PreTrainedModel, stage: Stage) -> PreTrainedModel:
        """Run a stage, or load its result if it is finished."""
        began = self.run.remember(f"{stage.name}.began", lambda: self.run.seconds)
        on_gpu = self.place.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.place)
        with fast_sums(self.place), self.job.without_teacher(stage):
            limits = Limits(self.speeds, self.seconds_for(stage), self.threads)
            trained = run_stage(self.run, self.job, model, stage, limits)
        self.run.remember(f"{stage.name}.took", lambda: self.run.seconds - began)
        if on_gpu:  # of a stage that was resumed, that of the rest
            self.run.remember(f"{stage.name}.peak", lambda: torch.cuda.max_memory_allocated(self.place))
        return trained

    def most_sensitive(self, model: PreTrainedModel, block_size: int) -> list[list[Any]]:
        """Return pairs of a layer and its increase in loss, the most sensitive first. A resumed run keeps them."""
        scan = most_sensitive(
            model,
            self.task,
            block_size,
            self.timetable.scanned or BLOCKS if self.timetable else BLOCKS,
            remember=lambda name, measure: self.run.remember(f"sensitivity.{name}", measure),
            progress=self.settings.progress and processes.is_main(),
        )
        return [list(cost) for cost in scan]

    def pace(self) -> dict[str, Any]:
        """Return the steps, tokens and seconds of each stage and, if the number of threads was tuned, the last
        number."""
        took = {stage.name: round(self.run.facts[f"{stage.name}.took"], 1) for stage in self.plan.stages}
        made = {"steps": self.steps(), "trained_tokens": self.read_tokens(), "seconds": took}
        peaks = {name: self.run.facts[f"{name}.peak"] for name in took if f"{name}.peak" in self.run.facts}
        made |= {"peak_bytes": peaks} if peaks else {}
        return made | ({} if self.threads is None else {"threads": torch.get_num_threads()})

    def logs(self) -> dict[str, Any]:
        """Return the logged losses of each stage."""
        return {stage.name: self.run.facts[f"{stage.name}.log"] for stage in self.plan.stages}

    def mixture(self) -> list[dict[str, Any]]:
        """Return the tokens read from each source, by stage."""
        facts = self.run.facts
        names = [stage.name for stage in self.plan.stages]
        return self.task.mixture({name: facts[f"{name}.read"] for name in names if f"{name}.read" in facts})

    def read_tokens(self) -> dict[str, int]:
        """Return the number of tokens that each stage read."""
        facts = self.run.facts
        return {
            stage.name: steps * facts.get(f"{stage.name}.batch_tokens", stage.batch_tokens)
            for stage, steps in zip(self.plan.stages, self.steps().values(), strict=True)
        }

    def steps(self) -> dict[str, int]:
        """Return the number of optimizer steps of each stage."""
        facts, names = self.run.facts, [stage.name for stage in self.plan.stages]
        return {name: facts.get(f"{name}.done", facts[f"{name}.steps"]) for name in names}

    def save(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        results: dict[str, Any],
        *,
        compared: bool,
        overwrite: bool,
        files: dict[str, str] | None = None,
        state: Sequence[str] = (),
    ) -> None:
        """Save everything in the output folder, atomically, and remove the run folder.

        The training text, the tokens read and a table of the results are added to the model card. `state` are lines
        about the model's state for the card. `files` are further text files by name, written before the model is saved.
        """
        if processes.is_main():
            with whole_folder(self.out, overwrite=overwrite) as folder:
                for name, text in (files or {}).items():
                    (folder / name).write_text(text, encoding="utf-8")
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
                (folder / "recipe.yaml").write_text(as_yaml(self.plan.to_dict()), encoding="utf-8")
                (folder / "results.json").write_text(json.dumps(results, indent=1, allow_nan=False), encoding="utf-8")
                card = folder / "README.md"
                text = completed(card.read_text(encoding="utf-8"), {"pipeline_tag": self.task.pipeline_tag})
                text += training_section(self.task.told_data(), results.get("mixture", ()), self.read_tokens(), state)
                text += results_section(self.plan, *table_of(results, compared=compared), results.get("advice"))
                card.write_text(text, encoding="utf-8")
        logger.info("done in %s", duration(self.run.seconds))
        self.run.remove()
        processes.wait()


def as_begun(plan: Recipe, saved: dict[str, Any]) -> Recipe:
    """Return the plan with the defaults of the stage options that did not exist when a run began, with a warning if a
    recipe now sets them: a new option does by default what was done before it existed."""
    stages, known = [], options_of(Stage)
    for stage in plan.stages:
        old = saved_stages(saved).get(stage.name, vars(stage))
        changes = {name: x.default for name, x in known.items() if name not in old and x.default != vars(stage)[name]}
        if changes:
            words = ", ".join(f"{name}: {str(value).lower()}" for name, value in changes.items())
            logger.warning("stage %s keeps %s, as when this run began with an older t2r", stage.name, words)
        stages.append(dataclasses.replace(stage, **changes))
    return dataclasses.replace(plan, stages=tuple(stages))


# --- Reporting ----------------------------------------------------------------------------------------------


def table_of(results: dict[str, Any], *, compared: bool) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header and rows of the results, in the order in which they were measured."""
    task = TASKS.get(results.get("task", ""), LanguageModeling)
    before = [("untrained",) * 2]
    if compared:  # a continued conversion has a score before its training
        before = [("teacher",) * 2, ("before",) * 2 if "before" in results else ("swapped, not trained", "swapped")]
    measured = [(words, results[key]) for words, key in before]
    measured += [(f"after {name}", values) for name, values in results["stages"].items()]
    return task.table(measured, compared=compared)


def as_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table()
    for i, heading in enumerate(header):
        table.add_column(heading, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    return table


def results_section(
    plan: Recipe, header: Sequence[str], rows: Sequence[Sequence[str]], advice: str | None = None
) -> str:
    """Return the section of the model card with the recipe, the results, and what is said about them."""
    lines = [
        "",
        "## Results",
        "",
        f"Trained with the recipe `{plan.name}` (recipe.yaml; all numbers: results.json).",
        "",
    ]
    if rows:
        lines += [f"| {' | '.join(cells)} |" for cells in (header, ("---",) * len(header), *rows)] + [""]
    if advice is not None:
        lines += [f"{advice[0].upper()}{advice[1:]}.", ""]
    return "\n".join(lines)


def as_yaml(value: dict[str, Any]) -> str:
    return yaml.safe_dump(value, sort_keys=False)


@contextmanager
def caching() -> Iterator[None]:
    """Tokenize in the main process first. The other processes then read its cache."""
    with processes.main_first():
        try:
            yield
        except OSError as error:
            raise T2RError(f"the tokenized text cannot be cached: {error}") from error
