"""Norms in one kernel each, together with the sum before them; on a CPU, in fewer operations of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from t2r.attention.joint import is_ordinary
from t2r.generation.engine.fusion.replacing import Replacing, reproduces, sample
from t2r.generation.engine.fusion.sums import DeferredSums, Sum
from t2r.surgery.adapters import Family

KINDS: tuple[dict[str, bool], ...] = (
    {"round_first": True},  # Llama and most others
    {"round_first": False},  # OLMo 2
    {"plus_one": True},  # Gemma
)
"""Formulas of root mean square norms: which factor is used, and what is rounded."""


class Norm(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    eps: float
    centered: bool


def fuse_norms(model: nn.Module, replacing: Replacing, sums: DeferredSums) -> None:
    """Compute norms in one kernel each. transformers' root mean square norms are seven or eight.

    A norm is replaced only if the kernel reproduces its outputs up to the last bit of some values."""
    from t2r.ops.triton.norm import LARGEST

    for module in model.modules():
        if not replacing.replaceable(module) or (norm := norm_of(module)) is None:
            continue
        if norm.weight.numel() > LARGEST or norm.weight.dtype == torch.float64:
            continue
        if (kind := kind_of(module, norm)) is not None:
            replacing.replace(module, fused_forward(module, norm, kind, sums))


@torch.no_grad()
def shorten_norms(model: nn.Module, replacing: Replacing) -> None:
    """Compute root mean square norms in four operations instead of six, where that changes nothing but rounding."""
    for module in model.modules():
        if not replacing.replaceable(module) or (norm := norm_of(module)) is None or norm.centered:
            continue
        if norm.weight.dtype != torch.float32:
            continue  # formulas differ in what they round, also float64 to float32
        x = sample(norm.weight.numel(), norm.weight)
        expected = module(x)
        for weight in (norm.weight.detach(), 1 + norm.weight.detach()):  # the second is Gemma's
            forward = short_forward(module, norm._replace(weight=weight))
            if reproduces(forward(x), expected):
                replacing.replace(module, forward)
                break


def short_forward(module: nn.Module, norm: Norm) -> Callable[[Tensor], Any]:
    stock, size, eps = module.forward, norm.weight.numel(), norm.weight.new_full((1, 1, 1), norm.eps)

    def forward(x: Tensor) -> Any:
        if x.dim() != 3 or x.shape[1:] != (1, size) or x.dtype != eps.dtype:
            return stock(x)
        mean = torch.baddbmm(eps, x, x.mT, alpha=1 / size)  # of the squares, plus eps
        return x * mean.rsqrt() * norm.weight

    return forward


def norm_of(module: nn.Module) -> Norm | None:
    """Return the parameters of a layer norm, or of a root mean square norm with a single input; None for others."""
    named, centered = type(module).__name__, type(module) is nn.LayerNorm
    if not (centered or named.endswith(Family.norms)):
        return None
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or not is_ordinary(weight, bias) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if not weight.is_contiguous():
        return None
    return Norm(weight, bias, eps, centered)


@torch.no_grad()
def kind_of(module: nn.Module, norm: Norm) -> dict[str, bool] | None:
    """Return the formula of a norm, found by comparing outputs, or None if it is none of the known ones."""
    x = sample(norm.weight.numel(), norm.weight)
    expected = module(x)
    best: tuple[int, dict[str, bool]] | None = None
    for kind in ({"centered": True},) if norm.centered else KINDS:
        found = compute(x, norm, kind)
        different = int((found != expected).sum())
        if reproduces(found, expected) and (best is None or different < best[0]):
            best = different, kind
    return None if best is None else best[1]


def compute(x: Tensor, norm: Norm, kind: dict[str, bool], summed: Sum | None = None) -> Tensor:
    from t2r.ops.triton.norm import norm as launch

    how: dict[str, Any] = dict(kind)
    if summed is not None:
        x, how["other"], how["total"] = summed
    out: Tensor = launch(x, norm.weight, norm.bias, norm.eps, **how)
    return out


def fused_forward(module: nn.Module, norm: Norm, kind: dict[str, bool], sums: DeferredSums) -> Callable[..., Any]:
    stock = module.forward

    def forward(x: Tensor) -> Any:
        if x.dtype != norm.weight.dtype or x.shape[-1] != norm.weight.numel():
            return stock(x)
        summed = sums.take(x)
        if summed is None and norm.centered:
            return stock(x)  # one kernel as well
        return compute(x, norm, kind, summed)

    return forward
