"""Root mean square norms of a model in one kernel each, while a decoding step is captured.

A captured step is bound by the number of its kernels. transformers' norms are seven or eight of them, twice per layer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from t2r.ops.registry import BACKENDS

KINDS: tuple[dict[str, bool], ...] = (
    {"round_first": True, "plus_one": False},  # Llama and most others
    {"round_first": False, "plus_one": False},  # OLMo 2
    {"round_first": False, "plus_one": True},  # Gemma
)
"""Formulas of families: which factor is used, and what is rounded."""


ROUNDING = 2e-6
"""The relative difference between two orders of summation in float32."""


@contextmanager
def fused_norms(model: nn.Module) -> Iterator[list[str]]:
    """Compute norms in one kernel each, inside the `with` block and in this thread. Yields the names of these norms.

    A norm is replaced only if the kernel reproduces its outputs up to the last bit of some values."""
    thread, replaced = threading.get_ident(), {}
    kinds: dict[Any, dict[str, bool] | None] = {}
    for name, module in model.named_modules():
        if (norm := fusable(module)) is None:
            continue
        key = type(module), norm[0].dtype
        if key not in kinds:
            kinds[key] = kind_of(module, *norm)
        if (kind := kinds[key]) is not None:
            replaced[name] = module
            module.forward = in_thread(thread, module, *norm, kind)
    try:
        yield list(replaced)
    finally:
        for module in replaced.values():
            del module.forward


def fusable(module: nn.Module) -> tuple[Tensor, float] | None:
    """Return weight and epsilon of a root mean square norm with a single input, or None for other modules."""
    from t2r.ops.triton.norm import LARGEST

    weight, named = getattr(module, "weight", None), type(module).__name__
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not (named.endswith("RMSNorm") or named == "T5LayerNorm") or "forward" in vars(module):
        return None
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if weight.numel() > LARGEST or weight.dtype == torch.float64 or not weight.is_contiguous():
        return None
    return weight, eps


@torch.no_grad()
def kind_of(module: nn.Module, weight: Tensor, eps: float) -> dict[str, bool] | None:
    """Return the formula of a norm, found by comparing outputs, or None if it is none of the known ones."""
    from t2r.ops.triton.norm import rms_norm

    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(4, weight.numel(), generator=generator)).to(weight.device, weight.dtype)
    expected = module(x)
    best: tuple[int, dict[str, bool]] | None = None
    for kind in KINDS:
        found = rms_norm(x, weight, eps, **kind)
        near = (found - expected).abs() <= (2 * torch.finfo(x.dtype).eps + ROUNDING) * expected.abs()
        different = int((found != expected).sum())
        if found.dtype == expected.dtype and bool(near.all()) and (best is None or different < best[0]):
            best = different, kind
    return None if best is None else best[1]


def in_thread(thread: int, module: nn.Module, weight: Tensor, eps: float, kind: dict[str, bool]) -> Callable[..., Any]:
    """Return a forward that uses the kernel in one thread, and the module's own forward in others."""
    from t2r.ops.triton.norm import rms_norm

    def forward(hidden_states: Tensor) -> Any:
        if threading.get_ident() != thread or hidden_states.dtype != weight.dtype:
            return type(module).forward(module, hidden_states)
        return rms_norm(hidden_states, weight, eps, **kind)

    return forward


def available() -> bool:
    """Return whether Triton kernels run on this machine."""
    return BACKENDS["triton"].missing() is None
