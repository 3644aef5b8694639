"""Values that depend on weights alone: computed once while the weights are known to be constant, as in decoding."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

_thread = threading.local()
T = TypeVar("T")


@contextmanager
def constant_weights(kept: dict[Any, Any]) -> Iterator[None]:
    """Inside the `with` block, and in this thread, `derived` values are computed once and kept in `kept`. The weights
    must not change as long as `kept` is used."""
    before = getattr(_thread, "kept", None)
    _thread.kept = kept
    try:
        yield
    finally:
        _thread.kept = before


def derived(owner: object, name: Hashable, compute: Callable[[], T]) -> T:
    """A value that depends on `owner` alone: computed now, or kept by `constant_weights` where no gradient is asked."""
    kept: dict[Any, Any] | None = getattr(_thread, "kept", None)
    if kept is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return compute()
    key = id(owner), name
    if key not in kept:
        kept[key] = owner, compute()  # the owner is held, so that no other object gets its id
    value: T = kept[key][1]
    return value
