"""Recurrent attention sites, and the mode that selects recurrent or exact attention.

A site is a stock attention module whose class was changed to one that inherits `Recurrence` and the stock class. It
computes normalized linear attention over features. Inside `exact_attention` it computes the original softmax attention
with the same weights. The mode is stored per thread and not on the module, so one model can serve many threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from t2r import ops
from t2r.attention.layers import RecurrentLayer
from t2r.attention.masks import padding_and_starts
from t2r.attention.observation import observe_linear
from t2r.errors import T2RError
from t2r.feature_maps import FeatureMap, repeat_heads


class Inputs(NamedTuple):
    """Inputs of an attention site. Queries and keys are those that the feature map receives."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scaling: float
    causal: bool


class Recurrence(nn.Module):
    """An attention site that computes normalized linear attention over features."""

    feature_map: FeatureMap
    layer_idx: int
    keeps_softmax: bool = False
    """Whether the site always computes softmax attention and has no map (see `ProjectionAttention.keep_softmax`)."""

    @property
    def exact(self) -> bool:
        """Whether this call computes exact softmax attention."""
        return self.keeps_softmax or mode_of(self) is not None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, layer: Any, scaling: float) -> Tensor:
        """Compute causal attention of new tokens, from the state of the cache: `[batch, heads, time, head_dim]`."""
        if (features := self.fused(q, v, mask, layer, scaling)) is None:
            one = q.shape[2] == 1 and layer is not None and not torch.is_grad_enabled()
            q, k = self.feature_map.of_token(q, k, scaling) if one else self.feature_map(q * scaling, k)
        return self.advance(q, k, v, mask, layer, features)

    def fused(self, q: Tensor, v: Tensor, mask: Tensor | None, layer: Any, scaling: float = 1.0) -> ops.Features | None:
        """Return how the kernel of a decoding step computes the features. None: they are computed before it."""
        if q.shape[2] > 1 or not isinstance(layer, RecurrentLayer) or not layer.can_step(mask):
            return None
        feature_map = self.feature_map
        return feature_map.step_features(scaling) if ops.computes_features(q, v, feature_map.feature_size) else None

    def advance(
        self,
        phi_q: Tensor,
        phi_k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        layer: Any,
        features: ops.Features | None = None,
    ) -> Tensor:
        """Compute the outputs of one or more tokens. With a cache layer, start from its state and advance it.

        With `features`, queries and keys are the inputs of the feature map."""
        recurrent, feature_map = isinstance(layer, RecurrentLayer), self.feature_map
        padding = starts = None
        if mask is not None and not (recurrent and layer.only_real_tokens):
            padding, starts = padding_and_starts(mask, phi_k.shape[2], layer.position if recurrent else None)
        how: dict[str, Any] = {
            "mask": padding,
            "starts": starts,
            "decay": feature_map.decay,
            "signed": feature_map.signed,
        }
        if features is not None:
            return layer.advance(phi_q, phi_k, v, **how, features=features)
        v = self.spread(v)
        if recurrent:
            return layer.advance(phi_q, phi_k, v, **how)
        observe_linear(self, phi_q, phi_k, v, how)
        out, _ = ops.linear_attention(phi_q, phi_k, v, **how)
        return out

    def imitate(self, inputs: Inputs) -> Tensor:
        """Compute the outputs of the recurrence for these inputs, without a cache."""
        q, k, v, mask, scaling, causal = inputs
        phi_q, phi_k = self.feature_map(q * scaling, k)
        padding, starts = padding_and_starts(mask, k.shape[2])
        how: dict[str, Any] = {"mask": padding, "decay": self.feature_map.decay, "signed": self.feature_map.signed}
        out, _ = ops.linear_attention(phi_q, phi_k, self.spread(v), starts=starts, causal=causal, **how)
        return out

    def unused_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the stock module that the recurrence does not use. They get no gradient, and
        distributed training fails if one of them requires it."""
        return []

    def spread(self, v: Tensor) -> Tensor:
        """Repeat values for every key head of the feature map. With un-grouped keys, this is one per query head."""
        return repeat_heads(v, self.feature_map.key_heads)


def recurrent_sites(model: nn.Module) -> list[Recurrence]:
    """Return all recurrent sites of a model, from the first layer to the last."""
    return [m for m in model.modules() if isinstance(m, Recurrence) and hasattr(m, "feature_map")]


def computes_exactly(model: nn.Module) -> bool:
    """Return whether recurrent sites of the model now compute exact attention, in this thread."""
    return any(mode_of(site) is not None for site in recurrent_sites(model))


# --- The mode of a thread -----------------------------------------------------------------------------------

Observer = Callable[[Recurrence, Inputs, Tensor], None]


class Mode(NamedTuple):
    """Sites that compute exact softmax attention in the calls of one thread."""

    sites: frozenset[int]
    observer: Observer | None
    outer: Mode | None


_thread = threading.local()


def mode_of(site: Recurrence) -> Mode | None:
    """Return the innermost mode of this thread that includes the site, or None for the recurrence."""
    mode: Mode | None = getattr(_thread, "mode", None)
    while mode is not None and id(site) not in mode.sites:
        mode = mode.outer
    return mode


def exact_somewhere() -> bool:
    """Return whether some recurrent site computes exact attention now, in this thread."""
    return getattr(_thread, "mode", None) is not None


@contextmanager
def exact_attention(
    model: nn.Module, *, recurrent_layers: Collection[int] = (), observer: Observer | None = None
) -> Iterator[None]:
    """Compute exact softmax attention in all recurrent sites, inside the `with` block and in this thread.

    The equivalence check compares it with the base model, and the transfer stage uses its outputs as targets.
    With gradient checkpointing, `backward` computes the layers again: call it inside the block too.

    Args:
        recurrent_layers: layers that stay recurrent.
        observer: called at each site with the site, the inputs of the recurrence, and the exact output.

    Raises:
        T2RError: the model is merged.
    """
    sites = [site for site in recurrent_sites(model) if site.layer_idx not in recurrent_layers]
    if any(getattr(site, "merged", None) is not None for site in sites):
        raise T2RError("a merged model cannot compute softmax attention, because it has no queries and keys")
    before: Mode | None = getattr(_thread, "mode", None)
    _thread.mode = Mode(frozenset(map(id, sites)), observer, before)
    try:
        yield
    finally:
        _thread.mode = before
