"""Tunes the number of CPU threads of a training by measurement (see `t2r.threads`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from t2r.threads import CHANGED, Tuner, candidates, described, fastest
from t2r.training.loop import processes

logger = logging.getLogger(__name__)


def can_choose(place: torch.device) -> bool:
    """Return whether the number of threads can be tuned: on a CPU, with a single process and several threads."""
    return place.type == "cpu" and processes.count() == 1 and torch.get_num_threads() > 1


def choose(seconds: Callable[[], float]) -> int:
    """Set the number of threads with which a step is fastest, and return it.

    `seconds` runs a step and returns its time. Once fewer threads are much slower, even fewer are not tried."""
    times: dict[int, float] = {}
    for count in candidates(torch.get_num_threads()):
        torch.set_num_threads(count)
        times[count] = seconds()
        if times[count] > CHANGED * min(times.values()):
            break
    best = fastest(times)
    torch.set_num_threads(best)
    logger.info("threads: %d (%s)", best, described(times))
    return best


class Threads(TrainerCallback):
    """Tunes the number of threads again when the time of a step has changed, using training steps.

    Args:
        most: the largest number of threads to try.
    """

    def __init__(self, most: int) -> None:
        self.tuner = Tuner(most)
        self.tuner.count = torch.get_num_threads()
        self.began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.add(time.perf_counter() - self.began)

    def add(self, seconds: float) -> None:
        """Record the time of a step."""
        before = self.tuner.count
        self.tuner.add(seconds)
        if self.tuner.count != before:
            torch.set_num_threads(self.tuner.count)
