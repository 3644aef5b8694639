"""Caching of values that depend only on weights, while the weights are known to be constant, as in decoding."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from t2r.context import current, within

T = TypeVar("T")


@contextmanager
def constant_weights(kept: dict[Any, Any]) -> Iterator[None]:
    """Compute `derived` values once and store them in `kept`, inside the `with` block and in this thread.

    The weights must not change while `kept` is in use."""
    with within(constants=kept):
        yield


def _usable() -> dict[Any, Any] | None:
    """Return the cache of this thread, unless there is none or it must not be used now."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    found: dict[Any, Any] | None = current("constants")
    return found


def derived(owner: object, name: Hashable, compute: Callable[[], T]) -> T:
    """Return a value that depends only on `owner`: from the cache of `constant_weights`, or newly computed.

    The cache is not used if gradients are enabled or during compilation."""
    kept = _usable()
    if kept is None:
        return compute()
    key = id(owner), name
    if key not in kept:
        kept[key] = owner, compute()  # the reference to the owner keeps its id unique
    value: T = kept[key][1]
    return value


def derived_once(owner: object, name: Hashable, compute: Callable[[], T]) -> T | None:
    """Return a `derived` value where it is computed once, and None elsewhere: for values that serve speed alone."""
    return None if _usable() is None else derived(owner, name, compute)
