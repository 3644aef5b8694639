"""Tunes the number of CPU threads by measurement.

Threads that share a small operation wait for the slowest one. If one of two cores is busy, two threads can take twice
as long as one; on two idle cores they are faster. This can change during training.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers import TrainerCallback

from t2r.training.loop import processes

logger = logging.getLogger(__name__)

CHANGED = 1.4
"""If the time of a step changes by this factor, the number of threads is tuned again."""
STEADY = 8
"""Number of steps whose median time is compared with the previous median."""
TRIED = 4
"""Number of steps with each number of threads; the first is a warm-up."""


def candidates(most: int) -> list[int]:
    """Return this number of threads, half of it, and so on down to 1."""
    counts = [most]
    while counts[-1] > 1:
        counts.append(counts[-1] // 2)
    return counts


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
    told = ", ".join(f"{time:.2f} s with {count}" for count, time in times.items())
    logger.info("threads: %d (a step takes %s)", best, told)
    return best


def fastest(times: dict[int, float]) -> int:
    return min(times, key=lambda count: times[count])


class Threads(TrainerCallback):
    """Tunes the number of threads again when the time of a step has changed, using training steps.

    Args:
        most: the largest number of threads to try.
    """

    def __init__(self, most: int) -> None:
        self.counts = candidates(most)
        self.recent: list[float] = []
        self.usual: float | None = None
        """The median time of a step since the number was set."""
        self.queue: list[int] = []
        """Numbers still to be tried; the first is in use."""
        self.tried: dict[int, float] = {}
        self.began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.add(time.perf_counter() - self.began)

    def add(self, seconds: float) -> None:
        """Record the time of a step."""
        self.recent.append(seconds)
        if self.queue:
            if len(self.recent) == TRIED:
                self.tried[self.queue.pop(0)] = median(self.recent[1:])
                self.go_on()
        elif len(self.recent) == STEADY:
            now, self.recent = median(self.recent), []
            if self.usual is None:
                self.usual = now
            elif not 1 / CHANGED < now / self.usual < CHANGED:
                self.queue, self.tried = list(self.counts), {}
                self.go_on()

    def go_on(self) -> None:
        """Try the next number, or set the fastest of those tried."""
        self.recent = []
        if self.queue:
            torch.set_num_threads(self.queue[0])
            return
        self.usual = None
        best = fastest(self.tried)
        torch.set_num_threads(best)
        told = ", ".join(f"{time:.2f} s with {count}" for count, time in self.tried.items())
        logger.info("threads: %d from now on (a step takes %s)", best, told)
