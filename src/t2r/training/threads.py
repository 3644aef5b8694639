"""How many threads torch uses on a CPU, by measuring.

Threads that share a small operation wait for the slowest of them. On two cores of which one has other work, two threads
can take twice as long as one; on two idle cores they are faster. Which is the case changes while a model trains.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers import TrainerCallback

from t2r.training import processes

logger = logging.getLogger(__name__)

CHANGED = 1.4
"""When steps take longer or shorter by this factor, the number of threads is chosen again."""
STEADY = 8
"""Steps whose median is compared with the one before."""
TRIED = 4
"""Steps that are made with each number; the first warms up."""


def candidates(most: int) -> list[int]:
    """This number of threads, half of it, and so on down to one."""
    counts = [most]
    while counts[-1] > 1:
        counts.append(counts[-1] // 2)
    return counts


def can_choose(place: torch.device) -> bool:
    """Whether there is a choice: on a CPU that no other process of this training shares."""
    return place.type == "cpu" and processes.count() == 1 and torch.get_num_threads() > 1


def choose(seconds: Callable[[], float]) -> int:
    """Use as many threads as a step is fastest with. `seconds` makes a step and returns its time. When fewer threads
    are much slower, still fewer are not tried."""
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
    """Chooses the number of threads again when the time of a step has changed, by steps of the training itself.

    Args:
        most: the largest number that is tried.
    """

    def __init__(self, most: int) -> None:
        self.counts = candidates(most)
        self.recent: list[float] = []
        self.usual: float | None = None
        """The median time of a step since the number was chosen."""
        self.queue: list[int] = []
        """Numbers that are still to be tried, the first of them now."""
        self.tried: dict[int, float] = {}
        self.began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.add(time.perf_counter() - self.began)

    def add(self, seconds: float) -> None:
        """A step has taken so long."""
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
        """Try the next number, or use the fastest of those that were tried."""
        self.recent = []
        if self.queue:
            torch.set_num_threads(self.queue[0])
            return
        self.usual = None
        best = fastest(self.tried)
        torch.set_num_threads(best)
        told = ", ".join(f"{time:.2f} s with {count}" for count, time in self.tried.items())
        logger.info("threads: %d from now on (a step takes %s)", best, told)
