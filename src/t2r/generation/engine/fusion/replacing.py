"""Temporary replacement of the forwards of modules."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from t2r.attention.joint import has_stock_forward, stock_forward

ROUNDING = 2e-6
"""The relative difference between two orders of summation in float32."""
_one_thread = threading.RLock()


class Replacing:
    """Replace the forwards of modules, inside the `with` block and in this thread.

    Other threads compute the stock forwards. Only one thread at a time replaces forwards; others wait at the block."""

    def __init__(self) -> None:
        self.thread, self.modules = threading.get_ident(), dict[int, nn.Module]()

    def __enter__(self) -> Self:
        _one_thread.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            for module in self.modules.values():
                del module.forward
        finally:
            _one_thread.release()

    def replaceable(self, module: nn.Module, *arguments: str) -> bool:
        """Return whether the module computes what its class defines, for inference, from these arguments or one."""
        if module.training or not has_stock_forward(module):
            return False
        some = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        known = inspect.signature(module.forward).parameters.values()
        required = [x.name for x in known if x.default is x.empty and x.kind not in some]
        return set(required) <= set(arguments) if arguments else len(required) == 1

    def replace(self, module: nn.Module, forward: Callable[..., Any], *, single: bool = True) -> None:
        """Replace the forward of a module, if `single` only for calls with a single positional argument."""
        module.forward = Replacement(module, forward, self.thread, single)
        self.modules[id(module)] = module


class Replacement:
    """The forward of a module in one thread. Others, and copies of the module, compute the stock forward."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], thread: int, single: bool) -> None:
        self.module, self.stock, self.forward = module, module.forward, forward
        self.thread, self.single = thread, single

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fits = threading.get_ident() == self.thread and (not self.single or (len(args) == 1 and not kwargs))
        return (self.forward if fits else self.stock)(*args, **kwargs)

    def __reduce__(self) -> Any:
        return stock_forward, (self.module,)  # for copies by another thread


def parts(module: nn.Module) -> dict[str, Any]:
    """Return the children of a module, except dropout, which does nothing in inference."""
    return {k: x for k, x in module._modules.items() if not isinstance(x, nn.Dropout) or x.training}


def sample(size: int, like: Tensor) -> Tensor:
    """Return random inputs of one token for some rows, `[rows, 1, size]`, to compare two formulas with."""
    generator = torch.Generator("cpu").manual_seed(0)
    return (3 * torch.randn(4, 1, size, generator=generator, device="cpu")).to(like.device, like.dtype)


def reproduces(found: Tensor, expected: Tensor) -> bool:
    """Return whether outputs are equal up to the last bit of some values."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    eps, size = torch.finfo(expected.dtype).eps, expected.abs()
    return bool(((found - expected).abs() <= 2 * eps * size + ROUNDING * size.max()).all())
