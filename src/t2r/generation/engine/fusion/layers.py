"""Feed-forward layers and activations in fewer kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu
from transformers.activations import NewGELUActivation

from t2r.attention.joint import affine, can_be_bypassed, is_linear
from t2r.generation.engine.fusion.replacing import ROUNDING, Replacing, parts, reproduces, sample
from t2r.surgery.adapters import Family

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": relu,
    "silu": silu,
    "gelu": lambda x: gelu(x, approximate="tanh"),
}
Forward = Callable[[Tensor], Tensor]


@torch.no_grad()
def fuse_layers(model: nn.Module, replacing: Replacing) -> None:
    """Compute the activation of feed-forward layers together with the operation before or after it.

    A layer is replaced only if its outputs are reproduced up to rounding."""
    for module in model.modules():
        if replacing.replaceable(module) and (found := fused_forward(module)) is not None:
            forward, weight = found
            x = sample(weight.shape[1], weight)
            if near(forward(x), module(x)):
                replacing.replace(module, for_a_step(module.forward, forward, weight.dtype))
    for module in model.modules():
        if type(module) is NewGELUActivation and replacing.replaceable(module):  # eight kernels
            replacing.replace(module, ACTIVATIONS["gelu"])


def fused_forward(module: nn.Module) -> tuple[Forward, Tensor] | None:
    """Return a forward of a feed-forward layer, and the weight of its first product."""
    known = parts(module)
    if set(known) == set(Family.gated_layer):
        gate, up, act, down = (known[name] for name in Family.gated_layer)
        # The kernel of a gate computes in float32.
        if type(gate) is nn.Linear and gate.weight.dtype != torch.float64 and (kind := kind_of(act)) is not None:
            return gated_forward(gate, up, down, kind), gate.weight
    for names in Family.plain_layers:
        if set(known) == set(names):
            first, act, last = (known[name] for name in names)
            if not is_linear(first) or first.bias is None or not can_be_bypassed(first):
                continue
            if (kind := kind_of(act)) in ("relu", "gelu"):
                return plain_forward(first, last, kind == "gelu"), affine(first)[0]
    return None


def kind_of(act: nn.Module) -> str | None:
    """Return the name of an activation, found by comparing outputs in float32; None if it is not a known one."""
    if not can_be_bypassed(act) or next(act.parameters(), None) is not None:
        return None
    x = sample(256, torch.empty(0, dtype=torch.float32, device="cpu"))
    return next((name for name, function in ACTIVATIONS.items() if reproduces(function(x), act(x))), None)


def gated_forward(gate: nn.Linear, up: nn.Module, down: nn.Module, kind: str) -> Forward:
    from t2r.ops.triton.gated import gated

    return lambda x: down(gated(gate(x), up(x), kind))


def plain_forward(first: Any, last: nn.Module, use_gelu: bool) -> Forward:
    """The library of matrix products applies the activation before it stores the product."""

    def forward(x: Tensor) -> Tensor:
        weight, _ = affine(first)
        y = torch._addmm_activation(first.bias, x.flatten(0, -2), weight.T, use_gelu=use_gelu)
        out: Tensor = last(y.view(*x.shape[:-1], -1))
        return out

    return forward


def for_a_step(stock: Callable[..., Any], forward: Forward, dtype: torch.dtype) -> Callable[..., Any]:
    """Return a forward for inputs `[rows, 1, size]` in the dtype of the layer. Others use the stock forward."""
    return lambda x: forward(x) if x.dim() == 3 and x.shape[1] == 1 and x.dtype == dtype else stock(x)


def near(found: Tensor, expected: Tensor) -> bool:
    """Return whether outputs of products differ as if by rounding. Intermediate values may be rounded or not."""
    eps = max(2 * torch.finfo(expected.dtype).eps, 5 * ROUNDING)
    return bool((found - expected).float().norm() <= eps * expected.float().norm())
