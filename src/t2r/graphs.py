"""Work captured as a CUDA graph, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

WARM_UP = 3
"""Runs before a capture: they compile kernels, initialize libraries and allocate persistent buffers, which cannot be
done while a graph is captured."""


class CannotCapture(RuntimeError):
    """Raised if work cannot be captured, with the first line of the cause."""


class CudaGraph(Generic[T]):
    """Work that is captured when this is created. Calling it replays the work, without Python and kernel launches.

    The work reads and writes the same memory every time, and must not wait for the device.

    Args:
        warm_up: the number of runs before the capture.
        pool: memory that is shared with other graphs, which are not replayed at the same time.

    Raises torch.OutOfMemoryError or CannotCapture.
    """

    def __init__(
        self, work: Callable[[], T], device: torch.device, *, warm_up: int = WARM_UP, pool: Any = None
    ) -> None:
        self.device = device
        with torch.cuda.device(device):
            if warm_up:
                self.run(work, warm_up)
            self.graph = torch.cuda.CUDAGraph()
            try:
                # Other threads, such as one that pins the next batch, may use the device meanwhile.
                with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
                    self.result = work()
            except RuntimeError as error:
                # Ending a failed capture may raise another error, which hides the cause.
                cause = error.__context__ or error
                if any(isinstance(x, torch.OutOfMemoryError) for x in (error, cause)):
                    raise torch.OutOfMemoryError("out of memory while a CUDA graph was captured") from error
                raise CannotCapture(next(iter(str(cause).splitlines()), type(cause).__name__)) from error

    def run(self, work: Callable[[], T], times: int) -> None:
        """Run the work on a stream of its own, as captures do."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(times):
                work()
        torch.cuda.current_stream().wait_stream(stream)

    def __call__(self) -> T:
        """Replay the work. Its result has the same memory every time."""
        with torch.cuda.device(self.device):
            self.graph.replay()
        return self.result
