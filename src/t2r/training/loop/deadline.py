"""Stages with a time budget: the stage ends when its time is over, and its learning rate follows the elapsed time.

The number of steps depends on how busy the machine is, but the learning rate schedule always reaches its end. The
elapsed time is saved in checkpoints.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from t2r.storage import write_text
from t2r.training.loop import processes

FILE = "deadline.json"
"""The file in a checkpoint."""
FASTER = 8
"""The number of steps is limited to this multiple of the plan."""
AGREE = 10
"""Several processes synchronize their clocks at least once in this many steps."""
ENOUGH = 1.0
"""They do so after every step that takes this many seconds: an exchange takes milliseconds."""


def next_agreement(each: float) -> int:
    """Return after how many steps, of `each` seconds, several processes synchronize their clocks again.

    All of them must get the same `each`."""
    return max(1, min(AGREE, int(ENOUGH / each))) if each > 0 else AGREE


class Deadline(TrainerCallback):
    """Ends a stage after a number of seconds of training.

    Args:
        seconds: the time for the stage, including the time before it was resumed.
        steps: the planned number of steps: the length of the schedule.
    """

    def __init__(self, seconds: float, steps: int) -> None:
        self.seconds, self.steps = seconds, steps
        self.elapsed = 0.0
        self.began: float | None = None
        self.step = self.first = 0
        """The last step, and the first step of this process."""
        self.before = 0.0
        self.due = 0
        """The step after which several processes synchronize their clocks."""

    @property
    def done(self) -> float:
        """The fraction of the time that has passed."""
        return min(1.0, self.elapsed / self.seconds) if self.seconds > 0 else 1.0

    @property
    def each(self) -> float:
        """The mean seconds of a step of this process."""
        made = self.step - self.first
        return (self.elapsed - self.before) / made if made else 0.0

    @property
    def over(self) -> bool:
        """Whether less than half of another step fits into the time."""
        return self.elapsed + self.each / 2 >= self.seconds

    def planned_step(self, step: int) -> float:
        """Return the planned step that corresponds to the time elapsed after `step` steps."""
        if step != self.step:  # the scheduler calls this once per parameter group
            self.step = step
            if self.began is not None and (processes.count() == 1 or step >= self.due):
                self.elapsed = processes.agreed(self.before + time.monotonic() - self.began)
                self.due = step + next_agreement(self.each)
        return self.done * self.steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = self.first = self.due = state.global_step
        self.before, self.began = self.elapsed, time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.over:
            control.should_training_stop = True

    def save(self, folder: Path) -> None:
        write_text(folder / FILE, json.dumps({"elapsed": self.elapsed}))

    def load(self, folder: Path) -> None:
        self.elapsed = float(json.loads((folder / FILE).read_text(encoding="utf-8"))["elapsed"])
