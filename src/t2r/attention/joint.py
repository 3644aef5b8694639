"""Linear layers that read the same input, such as the projections of an attention, as one matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers.pytorch_utils import Conv1D

from t2r.errors import T2RError

LARGEST, LARGEST_ON_A_CPU = 2**24, 2**22
"""The size in bytes of the largest joint weight. It is a copy, and the time of a larger product is not that of its
launch or, on a CPU, of starting threads."""
ALIGNED = 16
"""The parts of a joint output begin at multiples of this number of values, which fast kernels require."""


class Joint(NamedTuple):
    """The weights of several layers, one below the other."""

    weight: Tensor
    bias: Tensor | None
    places: list[tuple[int, int]]
    """Where the output of each layer begins and ends."""

    @classmethod
    def of(cls, layers: Sequence[nn.Module]) -> Joint:
        parts, biases, places, start = [], [], [], 0
        for weight, bias in map(affine, layers):
            rows = len(weight)
            more = -rows % ALIGNED
            parts.append(pad(weight, (0, 0, 0, more)))
            biases.append(pad(weight.new_zeros(rows) if bias is None else bias, (0, more)))
            places.append((start, start + rows))
            start += rows + more
        biased = any(affine(layer)[1] is not None for layer in layers)
        return cls(torch.cat(parts), torch.cat(biases) if biased else None, places)

    def outputs(self, x: Tensor) -> list[Tensor]:
        """Return the outputs of the layers for an input."""
        out = linear(x, self.weight, self.bias)
        return [out[..., start:end] for start, end in self.places]


def joinable(layers: Sequence[nn.Module]) -> bool:
    """Return whether the layers are linear and computed by nothing but their forward, of one dtype, and small."""
    return (
        all(is_linear(layer) and can_be_bypassed(layer) for layer in layers)
        and len({(layer.weight.dtype, layer.weight.device) for layer in layers}) == 1
        and is_small(layers)
    )


def is_small(layers: Sequence[nn.Module]) -> bool:
    """Return whether one product is faster than several, so that a copy of the weights is worth its memory."""
    weights: list[Any] = [layer.weight for layer in layers]
    largest = LARGEST_ON_A_CPU if weights[0].device.type == "cpu" else LARGEST
    return sum(x.numel() * x.element_size() for x in weights) <= largest


def is_linear(layer: Any) -> bool:
    """Return whether a layer is linear, with ordinary weights."""
    return type(layer) in (nn.Linear, Conv1D) and is_ordinary(layer.weight, layer.bias)


def affine(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Return weight `[out, in]` and bias of a layer."""
    return layer.weight.T if isinstance(layer, Conv1D) else layer.weight, layer.bias


def is_ordinary(*tensors: Tensor | None) -> bool:
    """Return whether weights are numbers in memory, and not quantized or distributed."""
    return all(x is None or type(x) in (Tensor, nn.Parameter) for x in tensors)


def refuse_quantized_layers(model: nn.Module, what: str) -> None:
    """Raise T2RError if a layer has weights that are not tensors, as after torch's `quantize_dynamic`."""
    for name, module in model.named_modules():
        if callable(getattr(module, "weight", None)):
            raise T2RError(
                f"the weights of {name} are quantized in a form of torch: {what} the model without quantization"
            )


def can_be_bypassed(module: nn.Module) -> bool:
    """Return whether calling a module computes its forward and nothing else, so that no call of it is required."""
    return has_stock_forward(module) and not (module._forward_hooks or module._forward_pre_hooks)


def has_stock_forward(module: nn.Module) -> bool:
    """Return whether the forward of a module is that of its class, and not one of the instance, as of accelerate."""
    return vars(module).get("forward", stock_forward(module)) == stock_forward(module)


def stock_forward(module: nn.Module) -> MethodType:
    return MethodType(type(module).forward, module)
