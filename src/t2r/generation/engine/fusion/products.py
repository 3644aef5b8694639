"""Linear layers that read the same input, such as the projections of an attention, as one matrix product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers.pytorch_utils import Conv1D

from t2r.generation.engine.fusion.replacing import Replacing, is_ordinary
from t2r.ops.constants import derived

LARGEST, LARGEST_ON_A_CPU = 2**24, 2**22
"""The size in bytes of the largest joint weight. It is a copy, and the time of a larger product is not that of its
launch or, on a CPU, of starting threads."""
ALIGNED = 16
"""The parts of a joint output begin at multiples of this number of values, which fast kernels require."""


def join_products(model: nn.Module, replacing: Replacing, step: Callable[[], None]) -> None:
    """Compute layers that read the same input in a step by one product, where their weights are small."""
    for group in readers(model, step):
        largest = LARGEST_ON_A_CPU if affine(group[0])[0].device.type == "cpu" else LARGEST
        if all(map(replacing.replaceable, group)) and size_of(group) <= largest:
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
    return [g for g in groups if len({affine(x)[0].dtype for x in g}) == 1 and all(calls[id(x)] == 1 for x in g)]


def version(x: Tensor) -> float:
    """Return a number that changes when the tensor is modified in place: of tensors in inference mode, their sum."""
    return float(x.double().sum()) if x.is_inference() else x._version


def is_linear(layer: Any) -> bool:
    """Return whether a layer is linear, with ordinary weights."""
    return type(layer) in (nn.Linear, Conv1D) and is_ordinary(layer.weight, layer.bias)


def affine(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Return weight `[out, in]` and bias of a layer."""
    return layer.weight.T if isinstance(layer, Conv1D) else layer.weight, layer.bias


def size_of(layers: list[nn.Module]) -> int:
    return sum(weight.numel() * weight.element_size() for weight, _ in map(affine, layers))


class JointProduct:
    """The product of one input with the weights of several layers, computed when the first of them is called."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers, self.input, self.outputs = layers, torch.empty(0), dict[int, Tensor]()
        self.stock = [layer.forward for layer in layers]

    def weights(self) -> tuple[Tensor, Tensor | None, list[tuple[int, int]]]:
        """Return the joint weight and bias, and where the output of each layer begins and ends."""
        parts, biases, places, start = [], [], [], 0
        for weight, bias in map(affine, self.layers):
            rows = len(weight)
            more = -rows % ALIGNED
            parts.append(pad(weight, (0, 0, 0, more)))
            biases.append(pad(weight.new_zeros(rows) if bias is None else bias, (0, more)))
            places.append((start, start + rows))
            start += rows + more
        biased = any(layer.bias is not None for layer in self.layers)
        return torch.cat(parts), torch.cat(biases) if biased else None, places

    def forward(self, i: int) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if i == 0:
                weight, bias, places = derived(self.layers[0], "joint", self.weights)
                out = linear(x, weight, bias)
                self.input, self.outputs = x, {i: out[..., a:b] for i, (a, b) in enumerate(places)}
            known = self.outputs.pop(i, None) if self.input is x else None
            found: Tensor = self.stock[i](x) if known is None else known
            return found

        return forward
