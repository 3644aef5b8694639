"""Counting the kernels of a decoding step on a CPU, as a GPU would launch them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "_unsafe_view")
"""Operations that launch no kernel although their result is not a view in their schema."""


class Kernels(TorchDispatchMode):
    """Count operations by name, except views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns, name = func._schema.returns, func._schema.name.removeprefix("aten::")
        views = [x.alias_info is not None and not x.alias_info.is_write for x in returns]
        if not (views and all(views)) and name not in ALLOCATIONS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.names)


@contextmanager
def counted_kernels(monkeypatch: Any) -> Iterator[Kernels]:
    """Count the kernels inside the block. Launches of Triton kernels are counted, but not computed."""
    from triton.runtime import interpreter

    counter = Kernels()
    with monkeypatch.context() as patch, counter, torch.no_grad():
        patch.setattr(
            interpreter.GridExecutor, "__call__", lambda self, *args, **how: counter.names.append(self.fn.__name__)
        )
        yield counter
