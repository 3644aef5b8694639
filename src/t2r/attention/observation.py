"""Observation of attention: the inputs from which the weights of a layer can be computed afterwards.

No attention function forms its weights. Inside `observing`, every attention module of a swapped model passes what its
weights depend on to an observer: features, or queries and keys. The weights of one layer are then computed when they
are needed, so that those of all layers are never in memory together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from t2r.attention.softmax import softmax_weights
from t2r.context import current, within
from t2r.ops import Rule, Sum
from t2r.ops.weights import Weights, attention_weights


class LinearInputs(NamedTuple):
    """Inputs of linear attention: features of queries and keys, values, and the arguments of `ops.linear_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]

    @property
    def signed(self) -> bool:
        """Whether weights can be negative."""
        return bool(self.options.get("signed"))

    def weights(self, first: int = 0) -> Weights:
        """Compute the weights of the queries from `first` on."""
        return attention_weights(self.q, self.k, **self.options, first=first)


class SoftmaxInputs(NamedTuple):
    """Inputs of softmax attention: queries, keys, values, and the other arguments of `softmax_weights`."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]

    @property
    def signed(self) -> bool:
        return False

    def weights(self, first: int = 0) -> Weights:
        q, options = self.q[:, :, first:], self.options
        if (bias := options.get("position_bias")) is not None:
            options = options | {"position_bias": bias[:, :, -q.shape[2] :]}  # a bias of keys alone has a single row
        found = softmax_weights(q, self.k, **options)
        return Weights(found, found.new_zeros(found.shape[:3], dtype=torch.bool))


Observed = LinearInputs | SoftmaxInputs
Observer = Callable[[nn.Module, Observed], None]


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Call `observer` with the module and the inputs of each attention, inside the block and in this thread.

    Attention that continues from a cache is not observed, because a state does not contain the earlier keys."""
    with within(observer=observer):
        yield


def observe_linear(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, rule: Rule, **options: Any) -> None:
    observer: Observer | None = current("observer")
    if observer is not None and isinstance(rule, Sum):  # another recurrence has no attention weights
        decay = rule.decay if options.get("causal", True) else None
        observer(module, LinearInputs(q, k, v, {"decay": decay, "signed": rule.signed, **options}))


def observe_softmax(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    observer: Observer | None = current("observer")
    if observer is not None:
        observer(module, SoftmaxInputs(q, k, v, options))
