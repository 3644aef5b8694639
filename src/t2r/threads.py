"""The number of CPU threads: measured, and set for one thread of Python.

Threads that share a small operation wait for the slowest one. If one of two cores is busy, two threads can take several
times as long as one; on two idle cores they are faster. This can change while a program runs.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

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


def fastest(times: dict[int, float]) -> int:
    return min(times, key=lambda count: times[count])


def described(times: dict[int, float]) -> str:
    return "a step takes " + ", ".join(f"{time:.3g} s with {count}" for count, time in times.items())


def fixed_by_user() -> bool:
    """Return whether the environment sets the number of threads."""
    return any(os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))


class Tuner:
    """Finds the number of threads with which a repeated step is fastest, from the times of the steps themselves.

    Use `count` threads for a step and `add` its time. Numbers are tried again when the time has changed.

    Args:
        most: the largest number of threads to try, and the one to start with.
        seconds: the time after which the trial of a number ends early, with two steps or more.
    """

    def __init__(self, most: int, seconds: float = math.inf) -> None:
        self.counts, self.seconds = candidates(most), seconds
        self.count = most
        self.recent: list[float] = []
        self.usual: float | None = None
        """The median time of a step since the number was set."""
        self.queue: list[int] = []
        """Numbers still to be tried; the first is in use."""
        self.tried: dict[int, float] = {}

    def try_all(self) -> None:
        """Try every number of threads with the next steps."""
        self.queue, self.tried = list(self.counts), {}
        self._go_on()

    def add(self, seconds: float) -> None:
        """Record the time of a step."""
        self.recent.append(seconds)
        if self.queue:
            slow = len(self.recent) > 1 and sum(self.recent) > self.seconds
            if slow or len(self.recent) == TRIED:
                self.tried[self.queue.pop(0)] = median(self.recent[1:])
                self._go_on()
        elif len(self.recent) == STEADY:
            now, self.recent = median(self.recent), []
            if self.usual is None:
                self.usual = now
            elif not 1 / CHANGED < now / self.usual < CHANGED:
                self.try_all()

    def _go_on(self) -> None:
        """Try the next number, or use the fastest of those tried.

        Once fewer threads are much slower, even fewer are not tried."""
        self.recent = []
        if self.tried and self.tried[next(reversed(self.tried))] > CHANGED * min(self.tried.values()):
            self.queue = []
        if self.queue:
            self.count = self.queue[0]
            return
        self.usual = None
        self.count = fastest(self.tried)
        logger.info("threads: %d from now on (%s)", self.count, described(self.tried))


# --- One thread of Python -----------------------------------------------------------------------------------


def set_own_threads(count: int) -> None:
    """Set the number of threads for operations of the calling thread of Python, until `restore_threads`.

    `torch.set_num_threads` also sets it for every thread of Python that starts later, for its whole life."""
    openmp, mkl = _libraries()
    openmp(count)
    mkl(count)


def restore_threads(count: int) -> None:
    """Undo `set_own_threads`. The number of threads before it was `count`."""
    openmp, mkl = _libraries()
    openmp(count)
    mkl(0)  # that of all threads


@contextmanager
def own_threads(count: int) -> Iterator[None]:
    """Set the number of threads of the calling thread of Python, inside the `with` block."""
    before = torch.get_num_threads()
    set_own_threads(count)
    try:
        yield
    finally:
        restore_threads(before)


@functools.cache
def _libraries() -> tuple[Callable[[int], Any], Callable[[int], Any]]:
    """Return the functions that set the number of threads of the calling thread, in OpenMP and in MKL.

    They are those of the libraries that torch is linked with. Where torch does not use OpenMP or does not export it,
    `torch.set_num_threads` takes their place."""
    nothing: Callable[[int], Any] = lambda count: None  # noqa: E731
    before = torch.get_num_threads()  # also initializes the number of this thread
    try:
        file = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))
        library = ctypes.PyDLL(str(file))  # PyDLL keeps the interpreter lock, which is faster
        openmp = library.omp_set_num_threads
        openmp(before + 1)
        seen = torch.get_num_threads()
        openmp(before)
    except (StopIteration, OSError, AttributeError):
        seen = before
    if seen != before + 1:
        return torch.set_num_threads, nothing
    return openmp, getattr(library, "MKL_Set_Num_Threads_Local", nothing)
