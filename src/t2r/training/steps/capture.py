"""Forward and backward passes as CUDA graphs.

A training step of a small model launches thousands of short kernels, and launching them from Python takes longer than
running them. Batches of a stage have one shape, or a few, so the kernels of a step are captured once for each shape and
replayed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from t2r.graphs import WARM_UP, CudaGraph

logger = logging.getLogger(__name__)

MOST = 32
"""Graphs of a stage. Batches of further shapes run eagerly."""

Work = Callable[[dict[str, Tensor]], dict[str, Tensor]]


class Graph(NamedTuple):
    """A captured step, and the tensors that it reads."""

    replay: CudaGraph[dict[str, Tensor]]
    inputs: dict[str, Tensor]


class CapturedStep:
    """Calls `work` on tensors of a few shapes: eagerly at first, then by replaying a graph of each shape.

    The tensors that a replay returns are overwritten by the next one. All graphs add gradients to the same buffers, and
    share their memory. If a step cannot be captured, all later steps run eagerly, with a warning.

    Args:
        work: computes a loss from inputs, and adds its gradients to those of the parameters. It must not synchronize
            with the device.
        parameters: the parameters that get gradients.
    """

    def __init__(self, work: Work, parameters: Iterable[nn.Parameter]) -> None:
        self.work = work
        self.parameters = [p for p in parameters if p.requires_grad]
        self.graphs: dict[Any, Graph] = {}
        self.waiting: dict[Any, int] = {}
        """Eager steps that remain before the capture of a shape."""
        self.possible = True
        self.pool: Any = None
        self.reached: set[nn.Parameter] = set()
        """Parameters with gradients in the first steps. Others keep none, so that an optimizer does not decay them."""
        self.gradients: dict[nn.Parameter, Tensor] = {}
        """The gradient buffers of these parameters."""

    def __call__(self, inputs: Mapping[str, Tensor], variant: Any = None) -> dict[str, Tensor]:
        """Return the results of `work`. `variant` is anything else that the work depends on."""
        key = variant, tuple((name, x.shape, x.dtype) for name, x in inputs.items())
        if key not in self.graphs and self.possible and len(self.graphs) < MOST:
            left = self.waiting.setdefault(key, 1 if self.graphs else WARM_UP)  # steps of the training are its warm-up
            if left == 0:
                self.capture(inputs, key)
            self.waiting[key] = left - 1
        if key not in self.graphs:
            results = self.work(dict(inputs))
            if not self.gradients:
                self.reached |= {p for p in self.parameters if p.grad is not None}
            return results
        replay, own = self.graphs[key]
        for name, x in inputs.items():
            own[name].copy_(x, non_blocking=True)
        self.use_buffers()
        return replay()

    def capture(self, inputs: Mapping[str, Tensor], key: Any) -> None:
        """Capture the work. Nothing is computed, and existing gradients are kept."""
        device = next(iter(inputs.values())).device
        generator = torch.cuda.default_generators[device.index or 0]
        random = generator.clone_state()
        before = [p.grad for p in self.parameters]
        try:
            own = {name: x.clone() for name, x in inputs.items()}
            if self.pool is None:
                self.gradients = {p: torch.zeros_like(p) for p in self.parameters if p in self.reached}
                self.pool = torch.cuda.graph_pool_handle()
            for p in self.parameters:
                p.grad = self.gradients.get(p)
            graph = CudaGraph(lambda: self.work(dict(own)), device, warm_up=0, pool=self.pool)
            if not self.graphs:
                logger.info("training steps are replayed as CUDA graphs")
            self.graphs[key] = Graph(graph, own)
        except RuntimeError as error:  # includes out of memory
            self.possible = False
            torch.cuda.synchronize(device)
            # The state of a failed capture gives no random numbers any more, and earlier graphs would draw from it.
            generator.graphsafe_set_state(random)
            self.graphs.clear()
            first = next(iter(str(error).splitlines()), type(error).__name__)
            logger.warning("training steps are not captured as a CUDA graph, which is slower: %s", first)
        finally:
            for p, gradient in zip(self.parameters, before, strict=True):
                p.grad = gradient

    def use_buffers(self) -> None:
        """Make the buffers the gradients of the parameters. Gradients that are there already are kept."""
        empty = [buffer for p, buffer in self.gradients.items() if p.grad is None]
        if empty:
            torch._foreach_zero_(empty)
        for p, buffer in self.gradients.items():
            if p.grad is not None and p.grad is not buffer:
                buffer.copy_(p.grad)
            p.grad = buffer
