"""A stage by the clock: it ends when its time is over, and its learning rate follows the time, not the steps.

A machine that gets busy while it trains makes fewer steps in the same time, and one that gets idle makes more. Either
way the schedule ends where it should. A checkpoint records how much of the time has passed.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from t2r.storage import write_text
from t2r.training import processes

FILE = "deadline.json"
"""In a checkpoint."""
FASTER = 8
"""At most so many times as many steps are made as were planned."""
AGREE = 10
"""Several processes must agree on the time, which costs something: they do so after so many steps."""


class Deadline(TrainerCallback):
    """Ends a stage after so many seconds of training.

    Args:
        seconds: the time for the stage, in all processes that work on it one after the other.
        steps: how many were planned: the length of the schedule.
    """

    def __init__(self, seconds: float, steps: int) -> None:
        self.seconds, self.steps = seconds, steps
        self.elapsed = 0.0
        self.began: float | None = None
        self.step = self.first = 0
        """The last step, and the one with which this process began."""
        self.before = 0.0

    @property
    def done(self) -> float:
        """The share of the time that has passed."""
        return min(1.0, self.elapsed / self.seconds) if self.seconds > 0 else 1.0

    @property
    def over(self) -> bool:
        """Whether there is no time for most of another step."""
        made = self.step - self.first
        each = (self.elapsed - self.before) / made if made else 0.0
        return self.elapsed + each / 2 >= self.seconds

    def planned_step(self, step: int) -> float:
        """The planned step that the schedule has reached after `step` steps were made."""
        if step != self.step:  # it is asked once for each group of parameters
            self.step = step
            if self.began is not None and (processes.count() == 1 or step % AGREE == 0):
                self.elapsed = processes.agreed(self.before + time.monotonic() - self.began)
        return self.done * self.steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = self.first = state.global_step
        self.before, self.began = self.elapsed, time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.over:
            control.should_training_stop = True

    def save(self, folder: Path) -> None:
        write_text(folder / FILE, json.dumps({"elapsed": self.elapsed}))

    def load(self, folder: Path) -> None:
        self.elapsed = float(json.loads((folder / FILE).read_text(encoding="utf-8"))["elapsed"])
