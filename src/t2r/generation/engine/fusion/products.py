"""Linear layers that read the same input, such as the projections of an attention, as one matrix product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from t2r.attention.joint import Joint, is_linear, is_small
from t2r.generation.engine.fusion.replacing import Replacing
from t2r.ops.constants import derived


def join_products(model: nn.Module, replacing: Replacing, step: Callable[[], None]) -> None:
    """Compute layers that read the same input in a step by one product, where their weights are small."""
    for group in readers(model, step):
        if all(map(replacing.replaceable, group)) and is_small(group):
            joint = JointProduct(group)
            for i, layer in enumerate(group):
                replacing.replace(layer, joint.forward(i))


def readers(model: nn.Module, step: Callable[[], None]) -> list[list[nn.Module]]:
    """Run a step, and return groups of linear layers that read the same tensor, in the order of their calls."""
    seen: dict[Any, tuple[Tensor, list[nn.Module]]] = {}  # the reference to the tensor keeps its id unique
    calls: dict[int, int] = {}

    def noting(layer: nn.Module) -> Callable[..., Any]:
        stock = layer.forward

        def forward(x: Tensor) -> Any:
            seen.setdefault((id(x), version(x)), (x, []))[1].append(layer)
            calls[id(layer)] = calls.get(id(layer), 0) + 1
            return stock(x)

        return forward

    with Replacing() as replacing:
        for layer in model.modules():
            if is_linear(layer) and replacing.replaceable(layer):
                replacing.replace(layer, noting(layer))
        step()
    groups = [group for _, group in seen.values() if len(group) > 1]
    return [g for g in groups if len({x.weight.dtype for x in g}) == 1 and all(calls[id(x)] == 1 for x in g)]


def version(x: Tensor) -> float:
    """Return a number that changes when the tensor is modified in place: of tensors in inference mode, their sum."""
    return float(x.double().sum()) if x.is_inference() else x._version


class JointProduct:
    """The product of one input with the weights of several layers, computed when the first of them is called."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers, self.input, self.outputs = layers, torch.empty(0), dict[int, Tensor]()
        self.stock = [layer.forward for layer in layers]

    def forward(self, i: int) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if i == 0:
                joint = derived(self.layers[0], "joint", lambda: Joint.of(self.layers))
                self.input, self.outputs = x, dict(enumerate(joint.outputs(x)))
            known = self.outputs.pop(i, None) if self.input is x else None
            found: Tensor = self.stock[i](x) if known is None else known
            return found

        return forward
