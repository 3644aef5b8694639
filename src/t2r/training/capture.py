"""A forward and backward pass as one CUDA graph.

A training step of a small model launches thousands of short kernels, and launching them from Python takes longer than
running them. The shapes of a stage are constant, so the kernels of one step are captured once and replayed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

WARM_UP = 3
"""Eager steps before the capture: they compile kernels and allocate persistent buffers."""

Work = Callable[[dict[str, Tensor]], dict[str, Tensor]]


class CapturedStep:
    """Calls `work` on tensors of a fixed shape: eagerly at first, then by replaying a graph.

    The tensors that a replay returns are overwritten by the next one. Inputs of another shape run eagerly. If a step
    cannot be captured, all later steps run eagerly, with a warning.

    Args:
        work: computes a loss from inputs and its gradients. It must not synchronize with the device.
        parameters: the parameters that get gradients.
        accumulates: gradients are summed over several calls. Otherwise they are assigned.
    """

    def __init__(self, work: Work, parameters: Iterable[nn.Parameter], *, accumulates: bool = False) -> None:
        self.work, self.accumulates = work, accumulates
        self.parameters = [p for p in parameters if p.requires_grad]
        self.waiting: int | None = WARM_UP
        self.graph: torch.cuda.CUDAGraph | None = None
        self.key: Any = None
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.gradients: list[Tensor | None] = []

    def __call__(self, inputs: Mapping[str, Tensor], variant: Any = None) -> dict[str, Tensor]:
        """Return the results of `work`. `variant` is anything else that the work depends on; a graph serves one."""
        key = variant, {name: (x.shape, x.dtype) for name, x in inputs.items()}
        if self.graph is None and self.waiting is not None:
            if self.waiting == 0:
                self.capture(inputs, key)
            else:
                self.waiting -= 1
        if self.graph is None or key != self.key:
            return self.work(dict(inputs))
        for name, x in inputs.items():
            self.inputs[name].copy_(x, non_blocking=True)
        self.graph.replay()
        self.hand_over()
        return self.outputs

    def capture(self, inputs: Mapping[str, Tensor], key: Any) -> None:
        """Capture the work. Nothing is computed, and existing gradients are kept."""
        self.waiting = None
        before = [p.grad for p in self.parameters]
        device = next(iter(inputs.values())).device
        graph = torch.cuda.CUDAGraph()
        try:
            for p in self.parameters:
                p.grad = None
            self.inputs = {name: x.clone() for name, x in inputs.items()}
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # the graph allocates from a pool of its own
            # Other threads, such as one that pins the next batch, may call CUDA meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.outputs = self.work(dict(self.inputs))
            self.gradients = [p.grad for p in self.parameters]
            self.graph, self.key = graph, key
            logger.info("training steps are replayed as one CUDA graph")
        except RuntimeError as error:  # includes out of memory
            self.inputs, self.outputs, self.gradients = {}, {}, []
            torch.cuda.synchronize(device)
            cause = error.__context__ or error  # the error at the end of a failed capture hides the cause
            first = next(iter(str(cause).splitlines()), type(cause).__name__)
            logger.warning("training steps are not captured as a CUDA graph, which is slower: %s", first)
        finally:
            for p, gradient in zip(self.parameters, before, strict=True):
                p.grad = gradient

    def hand_over(self) -> None:
        """Assign or add the gradients of a replay to the parameters."""
        for p, gradient in zip(self.parameters, self.gradients, strict=True):
            if gradient is None:
                continue
            if not self.accumulates:
                p.grad = gradient
            elif p.grad is None:
                p.grad = gradient.clone()
            else:
                p.grad.add_(gradient)
