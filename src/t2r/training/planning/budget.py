"""Fits a run into a budget of minutes. The budget covers everything: loading, the teacher's generation, timing,
training, the scan of the layers, evaluation and saving.

If time is short, the teacher generates fewer tokens, fewer windows are evaluated, and batches are smaller, so that
training keeps most of the time. The timetable is computed from measured speeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from t2r.errors import T2RError
from t2r.training.loop import processes
from t2r.training.planning.timing import Speeds
from t2r.training.recipes.recipe import Recipe, Stage
from t2r.words import counted, duration, in_minutes

WRITING, MEASURING, SCANNING, SAVING = 0.25, 0.2, 0.15, 0.02
"""Maximum shares of a budget for the teacher's generation, for evaluation, for the scan and for saving."""
WANTED_STEPS = 300
"""The batch is made smaller until a stage has this many steps: their number matters more than their size."""
FASTER = 1.5
"""The batch is halved only if a step becomes faster by this factor. On a GPU, or with many optimizer states, steps
of a small batch take as long as those of a larger one."""
FEWEST_STEPS, ADVISED_STEPS = 5, 50
"""A budget in which a stage has fewer steps is refused, and one in which it has this many is named instead."""
LONGEST = 60.0 * 525_600
"""The largest budget, in seconds."""
FEWEST_WINDOWS, FEWEST_SCANNED = 4, 4
"""Minimum numbers of windows evaluated, and of blocks scanned."""


@dataclass(frozen=True)
class Work:
    """The requested work, before anything is reduced."""

    plan: Recipe
    teacher_tokens: int = 0
    """Tokens that the teacher generates."""
    tokens: int = 0
    """Tokens of the other training text."""
    windows: int = 0
    """Windows of one evaluation."""
    window: int = 0
    """Tokens of a window."""
    windows_of: Callable[[int], int] | None = None
    """Returns the windows of an evaluation if the teacher generates this number of tokens. None: always `windows`."""
    unit: str = "windows"
    """What is measured, in words."""
    reads: int = 0
    """Number of forward passes over the windows, by students and by the teacher."""
    passes: int = 0
    """Number of forward passes of the scan over its blocks. 0: there is no scan."""
    scanned: int = 16
    """Blocks of the scan."""
    fewest_blocks: int = 16
    """Blocks, of the smallest size, that the teacher generates at least."""
    told_writing: Callable[[int, int], str] = "the teacher generates {:,} tokens instead of {:,}".format
    """Describes that the teacher generates fewer tokens than was asked."""
    smallest_block: Callable[[int], int] = int
    """The size to which blocks of a size may be divided."""

    @property
    def length(self) -> int:
        return max(stage.block_size for stage in self.plan.stages)

    @property
    def sum_of_shares(self) -> float:
        return sum(stage.minutes or 0.0 for stage in self.plan.stages)


@dataclass(frozen=True)
class StagePlan:
    """The planned length of a stage."""

    steps: int
    batch_tokens: int
    seconds: float


@dataclass(frozen=True)
class Timetable:
    """The work that will be done, and the seconds planned for each part."""

    stages: dict[str, StagePlan]
    teacher_tokens: int = 0
    windows: int = 0
    scanned: int = 0
    before: float = 0.0
    """Seconds spent so far."""
    writing: float = 0.0
    measuring: float = 0.0
    scanning: float = 0.0
    saving: float = 0.0
    shrunk: list[str] = field(default_factory=list)
    """Descriptions of what was reduced."""
    writes_too_long: bool = False
    """Whether the teacher cannot generate the least that is required in its share of the time."""

    @property
    def seconds(self) -> float:
        others = self.before + self.writing + self.measuring + self.scanning + self.saving
        return others + sum(stage.seconds for stage in self.stages.values())

    @property
    def enough(self) -> bool:
        return self.has_steps(FEWEST_STEPS)

    def has_steps(self, count: int) -> bool:
        """Return whether every stage has this many steps, and the teacher enough time."""
        return not self.writes_too_long and all(stage.steps >= count for stage in self.stages.values())

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Timetable:
        return cls(**values | {"stages": {name: StagePlan(**stage) for name, stage in values["stages"].items()}})


def decide(work: Work, speeds: Speeds, total: float | None, spent: float) -> Timetable:
    """Return a timetable that fits into `total` seconds, `spent` of which have passed. None: no limit.

    Raises T2RError if a stage would have too few steps; the message says how many minutes are enough."""
    timetable = arrange(work, speeds, total, spent)
    if total is None or timetable.enough:
        return timetable
    needed, longer = max(total, 1.0), timetable
    while not longer.has_steps(ADVISED_STEPS) and needed < LONGEST:
        needed *= 1.1
        longer = arrange(work, speeds, needed, spent)
    name, stage = min(timetable.stages.items(), key=lambda item: item[1].steps)
    reason = f"stage {name} would have {counted(stage.steps, 'step')} of {stage.batch_tokens} tokens"
    if timetable.writes_too_long:
        reason = f"{timetable.shrunk[0]}, which takes {duration(timetable.writing)}"
    raise T2RError(
        f"a time of {in_minutes(total)} is not enough on this machine: {reason}; give about {in_minutes(needed)}, or "
        "use a smaller model"
    )


def arrange(work: Work, speeds: Speeds, total: float | None, spent: float) -> Timetable:
    """Return a timetable, without checking its number of steps."""
    shrunk: list[str] = []
    written, size = work.teacher_tokens, work.smallest_block(work.length)
    windows, scanned = work.windows, work.scanned if work.passes else 0
    asked = windows
    of_window, of_block = speeds.reading * work.window * work.reads, speeds.reading * work.length * work.passes
    if total is not None:
        if speeds.writing is not None:
            written = min(written, max(work.fewest_blocks * size, speeds.writing.tokens(WRITING * total, size)))
        if work.windows_of is not None and written < work.teacher_tokens:  # a part of what it generates is measured
            asked = windows = min(windows, work.windows_of(written))
        windows = fewer(windows, FEWEST_WINDOWS, MEASURING * total, of_window)
        scanned = fewer(scanned, FEWEST_SCANNED, SCANNING * total, of_block)
        for now, wanted, words in (
            (written, work.teacher_tokens, work.told_writing),
            (windows, asked, f"{{:,}} of {{:,}} {work.unit} are evaluated".format),
            (scanned, work.scanned if work.passes else 0, "layers are scanned on {:,} blocks instead of {:,}".format),
        ):
            if now < wanted:
                shrunk.append(words(now, wanted))
    fixed = {
        "before": spent,
        "writing": 0.0 if speeds.writing is None else speeds.writing.seconds(written, size),
        "measuring": windows * of_window,
        "scanning": scanned * of_block,
        "saving": 0.0 if total is None else SAVING * total,
    }
    left = None if total is None else max(0.0, total - sum(fixed.values()))
    stages = {}
    for stage in work.plan.stages:
        own = None if left is None else left * (stage.minutes or 0.0) / work.sum_of_shares
        smallest = work.smallest_block(stage.block_size)
        stages[stage.name] = plan_stage(stage, speeds, own, work.tokens + written, smallest)
        if stages[stage.name].batch_tokens < stage.batch_tokens:
            shrunk.append(smaller_batch(stage, stages[stage.name].batch_tokens))
    late = total is not None and written < work.teacher_tokens and fixed["writing"] > WRITING * total
    return Timetable(stages, written, windows, scanned, **fixed, shrunk=shrunk, writes_too_long=late)


def fewer(count: int, least: int, seconds: float, each: float) -> int:
    """Return how many of `count` items fit into `seconds` at `each` seconds, but not fewer than `least`."""
    return count if count * each <= seconds else min(count, max(least, int(seconds / each)))


def plan_stage(
    stage: Stage, speeds: Speeds, seconds: float | None, tokens: int, smallest: int | None = None
) -> StagePlan:
    """Plan the steps of a stage for `seconds`, or by its own budget, on a text of `tokens` tokens.

    A block may be divided down to the size `smallest`. None: it may not."""
    cost = speeds.stages[stage.name]
    if seconds is None and stage.minutes is not None:
        seconds = 60 * stage.minutes
    if seconds is None:
        steps = steps_of(stage, tokens)
        return StagePlan(steps, stage.batch_tokens, steps * cost.of(stage.batch_tokens))
    batch_tokens = stage.batch_tokens
    while seconds < WANTED_STEPS * cost.of(batch_tokens):
        half = halved(batch_tokens, stage.block_size, smallest or stage.block_size)
        if not half or cost.of(batch_tokens) < FASTER * cost.of(half):
            break
        batch_tokens = half
    steps = int(seconds / max(cost.of(batch_tokens), 1e-9))
    return StagePlan(steps, batch_tokens, steps * cost.of(batch_tokens))


def halved(batch_tokens: int, block_size: int, smallest: int) -> int:
    """Return about half of a batch: whole blocks, divisible among all processes, or smaller blocks, one for each
    process. 0: there is no smaller batch."""
    world = processes.count()
    each = batch_tokens // world  # several blocks, or a block that is already smaller
    if each > block_size:
        return each // block_size // 2 * block_size * world
    return each // 2 * world if each // 2 >= smallest else 0


def steps_of(stage: Stage, tokens: int) -> int:
    """Return the optimizer steps of a stage whose budget is not minutes."""
    if stage.steps is not None:
        return stage.steps
    wanted = stage.tokens if stage.tokens is not None else (stage.epochs or 0.0) * tokens
    return max(1, int(wanted // stage.batch_tokens))


def smaller_batch(stage: Stage, batch_tokens: int) -> str:
    words = f"a batch of {stage.name} has {batch_tokens:,} tokens instead of {stage.batch_tokens:,}"
    made = with_batch(stage, batch_tokens)
    if made.learning_rate == stage.learning_rate:
        return words
    return f"{words}, with learning rate {made.learning_rate:.2g}"


def with_batch(stage: Stage, batch_tokens: int) -> Stage:
    """Return the stage with another batch size. A batch smaller than a block has smaller blocks.

    The learning rates of pretrained weights are scaled by the fourth root of the batch size: with small batches the
    recipe's make a model worse at first, and with the square root, which the gradient noise of Adam suggests, the few
    steps of a short budget change too little. Maps keep their learning rate, because every attention output of a block
    is a training signal."""
    if batch_tokens == stage.batch_tokens:
        return stage
    scale = 1.0 if stage.train == "maps" else (batch_tokens / stage.batch_tokens) ** 0.25
    rates = ("learning_rate", "min_learning_rate", "warmup_init")
    scaled = {name: scale * rate for name in rates if (rate := getattr(stage, name)) is not None}
    block_size = min(stage.block_size, batch_tokens // processes.count())
    if block_size < stage.block_size:  # of a task that reads one block at a time
        scaled["device_tokens"] = block_size
    return dataclasses.replace(stage, batch_tokens=batch_tokens, block_size=block_size, **scaled)
