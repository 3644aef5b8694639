"""The progress of a stage: a bar in a terminal, otherwise a line in the log from time to time."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from transformers import ProgressCallback, TrainerCallback

from t2r.training.loop.deadline import Deadline
from t2r.words import duration

logger = logging.getLogger(__name__)

EVERY = 60.0
"""Seconds between lines."""


TERMS = {"loss": "loss", "kl": "KL", "task": "cross entropy"}
"""What is shown of an entry of the log. The KL divergence is per token, as that of the evaluation. The loss may weight
it, or be something else, such as the error of attention outputs in a transfer."""


def shown(logs: Mapping[str, float]) -> dict[str, str]:
    return {words: f"{logs[name]:.4g}" for name, words in TERMS.items() if name in logs}


class Bar(ProgressCallback):
    """A progress bar on stderr with the loss and its terms. With a time budget, its total is an estimate."""

    def __init__(self, stage: str, deadline: Deadline | None = None) -> None:
        super().__init__()
        self.stage, self.deadline = stage, deadline

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description(self.stage)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.training_bar is not None and self.deadline is not None and self.deadline.done:
            self.training_bar.total = round(state.global_step / self.deadline.done)
        super().on_step_end(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is not None and "loss" in (logs or {}):
            self.training_bar.set_postfix(shown(logs))


class Notes(TrainerCallback):
    """Logs the step, the loss with its terms and the time left once a minute, where there is no progress bar: in files
    of batch jobs.

    Args:
        stage: the name of the stage.
        deadline: that of a stage with a time budget, whose number of steps is not known.
    """

    def __init__(self, stage: str, deadline: Deadline | None = None) -> None:
        self.stage, self.deadline = stage, deadline
        self.first = 0
        self.began = self.told = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.first = state.global_step  # of a resumed stage
        self.began = self.told = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        now, done = time.monotonic(), state.global_step - self.first
        if "loss" not in (logs or {}) or not done or now - self.told < EVERY or not state.is_world_process_zero:
            return
        self.told = now
        if self.deadline is None:
            step = f"step {state.global_step:,} of {state.max_steps:,}"
            left = (now - self.began) / done * (state.max_steps - state.global_step)
        else:
            step, left = f"step {state.global_step:,}", max(0.0, self.deadline.seconds - self.deadline.elapsed)
        terms = ", ".join(f"{words} {value}" for words, value in shown(logs).items())
        logger.info("%s: %s, %s, about %s left", self.stage, step, terms, duration(left))
