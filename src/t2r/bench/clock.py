"""Clocks of the benchmarks, and the bandwidth of memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from t2r.graphs import CudaGraph

PROBE = {"cuda": 1 << 28, "cpu": 1 << 24}
"""Numbers that are copied to measure the bandwidth."""
AT_LEAST_MS = 20.0
"""A measurement on a GPU replays the graph until it takes about this long."""


def clock(function: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Return a function that measures the milliseconds of a function, which is warmed up now. On a GPU, the captured
    work is timed on the device, without Python and kernel launches."""
    return _device_clock(function, device) if device.type == "cuda" else _wall_clock(function)


def bandwidth(device: torch.device, repeats: int = 5) -> float:
    """Measure the bytes per second of a copy in the memory of a device, reads and writes together."""
    numbers = torch.zeros(PROBE.get(device.type, PROBE["cpu"]), dtype=torch.float32, device=device)
    other = torch.empty_like(numbers)
    measure = clock(lambda: other.copy_(numbers), device)
    return 2 * numbers.nbytes / median(measure() for _ in range(repeats)) * 1e3


def _wall_clock(function: Callable[[], object]) -> Callable[[], float]:
    def milliseconds() -> float:
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e3

    milliseconds()  # warm-up
    return milliseconds


def _device_clock(function: Callable[[], object], device: torch.device) -> Callable[[], float]:
    captured = CudaGraph(function, device)

    def replay(times: int) -> float:
        with torch.cuda.device(device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(times):
                captured.graph.replay()
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) / times

    replay(3)
    times = max(1, min(1000, round(AT_LEAST_MS / max(replay(3), 1e-3))))
    return lambda: replay(times)
