"""Sums that wait for the operation after them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

SUMS = (Tensor.add, Tensor.__add__, torch.add)
FREE = (Tensor.size, Tensor.dim, Tensor.view, Tensor.is_contiguous, Tensor.numel)
"""Functions that do not read values, besides attributes such as `shape`."""


class Sum(NamedTuple):
    x: Tensor
    other: Tensor
    total: Tensor


class DeferredSums(TorchFunctionMode):
    """Compute a sum of two tensors only when another function is called, so that a norm can compute it as well.

    At most one sum is deferred at a time, so that the order of all other operations stays."""

    def __init__(self) -> None:
        super().__init__()
        self.deferred: Sum | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in FREE and getattr(func, "__name__", "") != "__get__":
            self.compute()
        if func in SUMS and not kwargs and len(args) == 2 and alike(*args):
            x, other = args
            self.deferred = Sum(x, other, torch.empty_like(x))
            return self.deferred.total
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        self.compute()
        super().__exit__(*error)

    def compute(self) -> None:
        if (found := self.deferred) is not None:
            self.deferred = None
            torch.add(found.x, found.other, out=found.total)

    def take(self, total: Tensor) -> Sum | None:
        """Return the deferred sum if it is this one. The caller must compute it."""
        found = self.deferred
        if found is None or found.total is not total:
            return None
        self.deferred = None
        return found


def alike(x: Any, y: Any) -> bool:
    """Return whether two operands have the same layout, so that their sum has it too."""
    if type(x) is not Tensor or type(y) is not Tensor or not x.is_floating_point() or torch.is_grad_enabled():
        return False
    if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device) or x.dim() < 2:
        return False
    return x.is_contiguous() and y.is_contiguous()
