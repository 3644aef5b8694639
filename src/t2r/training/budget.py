"""A budget of minutes is for all of it: loading, the teacher's writing, timing, training, the scan, measuring, saving.

What can be less is made less, so that training has most of the time: the teacher writes fewer tokens, fewer windows are
measured, and a step has fewer tokens. All of this is decided from what was timed, by arithmetic alone.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from t2r.errors import T2RError
from t2r.training import processes
from t2r.training.recipe import Recipe, Stage
from t2r.training.timing import Speeds

WRITING, MEASURING, SCANNING, SAVING = 0.25, 0.2, 0.15, 0.02
"""At most these shares of a budget are for the teacher's writing, for measuring, for the scan and for saving."""
WANTED_STEPS = 20
"""A batch is made smaller until a stage has so many steps."""
FEWEST_STEPS = 5
"""With fewer there is nothing to learn, and the budget is refused."""
LONGEST = 60.0 * 525_600
"""The largest budget, in seconds."""
FEWEST_BLOCKS, FEWEST_WINDOWS, FEWEST_SCANNED = 16, 4, 4
"""Blocks that the teacher writes, windows that are measured and blocks that are scanned, however short the time is."""


@dataclass(frozen=True)
class Work:
    """What is asked for, before any of it is made less."""

    plan: Recipe
    teacher_tokens: int = 0
    """What the teacher is to write."""
    tokens: int = 0
    """What there is to train on, without that."""
    windows: int = 0
    """Of one measurement."""
    window: int = 0
    """Tokens of a window."""
    unit: str = "windows"
    """What is measured, in words."""
    reads: int = 0
    """How often the windows are read, by students and by the teacher."""
    passes: int = 0
    """How often the scan reads its blocks; 0: there is none."""
    scanned: int = 16
    """Blocks of the scan."""

    @property
    def length(self) -> int:
        return max(stage.block_size for stage in self.plan.stages)

    @property
    def sum_of_shares(self) -> float:
        return sum(stage.minutes or 0.0 for stage in self.plan.stages)


@dataclass(frozen=True)
class StagePlan:
    """How long a stage is expected to be."""

    steps: int
    batch_tokens: int
    seconds: float


@dataclass(frozen=True)
class Schedule:
    """What will be done, and in how many seconds."""

    stages: dict[str, StagePlan]
    teacher_tokens: int = 0
    windows: int = 0
    scanned: int = 0
    before: float = 0.0
    """Seconds until now."""
    writing: float = 0.0
    measuring: float = 0.0
    scanning: float = 0.0
    saving: float = 0.0
    shrunk: list[str] = field(default_factory=list)
    """What was made less, in words."""

    @property
    def seconds(self) -> float:
        others = self.before + self.writing + self.measuring + self.scanning + self.saving
        return others + sum(stage.seconds for stage in self.stages.values())

    @property
    def enough(self) -> bool:
        return all(stage.steps >= FEWEST_STEPS for stage in self.stages.values())

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Schedule:
        return cls(**values | {"stages": {name: StagePlan(**stage) for name, stage in values["stages"].items()}})


def decide(work: Work, speeds: Speeds, total: float | None, spent: float) -> Schedule:
    """What fits into `total` seconds, of which `spent` are gone; None: all that is asked for.

    Raises T2RError where a stage would have too few steps, with the minutes that would be enough."""
    schedule = arrange(work, speeds, total, spent)
    if total is None or schedule.enough:
        return schedule
    needed, longer = max(total, 1.0), schedule
    while any(stage.steps < WANTED_STEPS for stage in longer.stages.values()) and needed < LONGEST:
        needed *= 1.1
        longer = arrange(work, speeds, needed, spent)
    name, stage = min(schedule.stages.items(), key=lambda item: item[1].steps)
    raise T2RError(
        f"{in_minutes(total)} are too few on this machine: stage {name} would have {stage.steps} steps of "
        f"{stage.batch_tokens} tokens; give about {in_minutes(needed)}, or use a smaller model"
    )


def arrange(work: Work, speeds: Speeds, total: float | None, spent: float) -> Schedule:
    """A schedule, however few steps it has."""
    shrunk: list[str] = []
    written = work.teacher_tokens
    windows, scanned = work.windows, work.scanned if work.passes else 0
    of_window, of_block = speeds.reading * work.window * work.reads, speeds.reading * work.length * work.passes
    if total is not None:
        if speeds.writing is not None:
            least = FEWEST_BLOCKS * work.length
            written = min(written, max(least, speeds.writing.tokens(WRITING * total, work.length)))
        windows = fewer(windows, FEWEST_WINDOWS, MEASURING * total, of_window)
        scanned = fewer(scanned, FEWEST_SCANNED, SCANNING * total, of_block)
        for now, asked, words in (
            (written, work.teacher_tokens, "the teacher writes {:,} tokens instead of {:,}"),
            (windows, work.windows, f"{{:,}} {work.unit} of {{:,}} are measured"),
            (scanned, work.scanned if work.passes else 0, "each layer is measured on {:,} blocks instead of {:,}"),
        ):
            if now < asked:
                shrunk.append(words.format(now, asked))
    fixed = {
        "before": spent,
        "writing": 0.0 if speeds.writing is None else speeds.writing.seconds(written, work.length),
        "measuring": windows * of_window,
        "scanning": scanned * of_block,
        "saving": 0.0 if total is None else SAVING * total,
    }
    left = None if total is None else max(0.0, total - sum(fixed.values()))
    stages = {}
    for stage in work.plan.stages:
        own = None if left is None else left * (stage.minutes or 0.0) / work.sum_of_shares
        stages[stage.name] = plan_stage(stage, speeds, own, work.tokens + written)
        if stages[stage.name].batch_tokens < stage.batch_tokens:
            shrunk.append(smaller_batch(stage, stages[stage.name].batch_tokens))
    return Schedule(stages, written, windows, scanned, **fixed, shrunk=shrunk)


def fewer(count: int, least: int, seconds: float, each: float) -> int:
    """As many as there is time for, but not fewer than `least`."""
    return count if count * each <= seconds else min(count, max(least, int(seconds / each)))


def plan_stage(stage: Stage, speeds: Speeds, seconds: float | None, tokens: int) -> StagePlan:
    """Steps of a stage, in so many seconds or by its own budget, for a text of so many tokens."""
    cost = speeds.stages[stage.name]
    if seconds is None and stage.minutes is not None:
        seconds = 60 * stage.minutes
    if seconds is None:
        steps = steps_of(stage, tokens)
        return StagePlan(steps, stage.batch_tokens, steps * cost.of(stage.batch_tokens))
    blocks = stage.batch_tokens // stage.block_size
    while seconds < WANTED_STEPS * cost.of(blocks * stage.block_size) and (half := halved(blocks)):
        blocks = half
    batch_tokens = blocks * stage.block_size
    steps = int(seconds / max(cost.of(batch_tokens), 1e-9))
    return StagePlan(steps, batch_tokens, steps * cost.of(batch_tokens))


def halved(blocks: int) -> int:
    """About half as many, which all processes can share; 0: there is no smaller batch."""
    each = blocks // processes.count()
    return each // 2 * processes.count() if each > 1 else 0


def steps_of(stage: Stage, tokens: int) -> int:
    """The optimizer steps of a stage that says how long it is by anything but time."""
    if stage.steps is not None:
        return stage.steps
    wanted = stage.tokens if stage.tokens is not None else (stage.epochs or 0.0) * tokens
    return max(1, int(wanted // stage.batch_tokens))


def smaller_batch(stage: Stage, batch_tokens: int) -> str:
    words = f"a step of {stage.name} has {batch_tokens:,} tokens instead of {stage.batch_tokens:,}"
    made = with_batch(stage, batch_tokens)
    return words if made.learning_rate == stage.learning_rate else f"{words}, at a rate of {made.learning_rate:.2g}"


def with_batch(stage: Stage, batch_tokens: int) -> Stage:
    """The stage with a batch of another size.

    Learning rates follow the root of the batch, as Adam's noise does: at the recipe's rate, steps of one block make a
    model worse. Maps alone, which learn from every attention output of a block, keep theirs."""
    if batch_tokens == stage.batch_tokens:
        return stage
    scale = 1.0 if stage.train == "maps" else math.sqrt(batch_tokens / stage.batch_tokens)
    rates = ("learning_rate", "map_learning_rate", "min_learning_rate", "warmup_init")
    scaled = {name: scale * rate for name in rates if (rate := getattr(stage, name)) is not None}
    return dataclasses.replace(stage, batch_tokens=batch_tokens, **scaled)


def in_minutes(seconds: float) -> str:
    return f"{seconds / 60:.2g} minutes" if seconds < 600 else f"{round(seconds / 60):,} minutes"


def duration(seconds: float) -> str:
    """Words for a time that is known roughly."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(1, round(seconds))} seconds"
