"""Temporary replacement of the forwards of modules."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

ROUNDING = 2e-6
"""The relative difference between two orders of summation in float32."""


class Replacing:
    """Replace the forwards of modules, inside the `with` block and in this thread."""

    def __init__(self) -> None:
        self.thread, self.modules = threading.get_ident(), dict[int, nn.Module]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for module in self.modules.values():
            del module.forward

    def replaceable(self, module: nn.Module, *arguments: str) -> bool:
        """Return whether the module computes what its class defines, for inference, from these arguments or one."""
        if "forward" in vars(module) or module.training:
            return False
        some = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        known = inspect.signature(module.forward).parameters.values()
        required = [x.name for x in known if x.default is x.empty and x.kind not in some]
        return set(required) <= set(arguments) if arguments else len(required) == 1

    def replace(self, module: nn.Module, forward: Callable[..., Any], *, single: bool = True) -> None:
        """Replace the forward of a module, if `single` only for calls with a single positional argument."""
        thread, stock = self.thread, module.forward

        def in_thread(*args: Any, **kwargs: Any) -> Any:
            fits = threading.get_ident() == thread and (not single or (len(args) == 1 and not kwargs))
            return (forward if fits else stock)(*args, **kwargs)

        module.forward = in_thread
        self.modules[id(module)] = module


def sample(size: int, like: Tensor) -> Tensor:
    """Return random inputs of one token for some rows, `[rows, 1, size]`, to compare two formulas with."""
    generator = torch.Generator().manual_seed(0)
    return (3 * torch.randn(4, 1, size, generator=generator)).to(like.device, like.dtype)


def reproduces(found: Tensor, expected: Tensor) -> bool:
    """Return whether outputs are equal up to the last bit of some values."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    eps, size = torch.finfo(expected.dtype).eps, expected.abs()
    return bool(((found - expected).abs() <= 2 * eps * size + ROUNDING * size.max()).all())
