"""A site of attention that is an RNN, and the mode in which a call computes it.

A site is a stock attention module whose class was exchanged for one that inherits `Recurrence` and the stock class.
It computes normalized linear attention over features. Inside `exact_attention` it computes the softmax attention that
it replaced, with the same weights. The mode belongs to the calling thread: nothing about a call is kept on a module,
so one model can serve many threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from t2r import ops
from t2r.attention.layers import RecurrentLayer
from t2r.attention.masks import padding_and_starts
from t2r.errors import T2RError
from t2r.feature_maps import FeatureMap, repeat_heads


class Inputs(NamedTuple):
    """What an attention is computed from: queries and keys as the map sees them."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scaling: float
    causal: bool


class Recurrence(nn.Module):
    """A site of attention: normalized linear attention over features."""

    feature_map: FeatureMap
    layer_idx: int
    keeps_softmax: bool = False
    """The site computes softmax attention for good, and has no feature map (see `ProjectionAttention.keep_softmax`)."""

    @property
    def exact(self) -> bool:
        """Whether this call computes exact softmax attention."""
        return self.keeps_softmax or mode_of(self) is not None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, layer: Any, scaling: float) -> Tensor:
        """Causal attention over the new tokens and the state of all before: `[batch, heads, time, head_dim]`."""
        phi_q, phi_k = self.feature_map(q * scaling, k)
        return self.advance(phi_q, phi_k, v, mask, layer)

    def advance(self, phi_q: Tensor, phi_k: Tensor, v: Tensor, mask: Tensor | None, layer: Any) -> Tensor:
        """Outputs of one token or many. With a cache layer, its state comes before them and is advanced."""
        v = self.spread(v)
        recurrent = isinstance(layer, RecurrentLayer)
        if recurrent and layer.only_real_tokens:
            mask = None
        padding, starts = padding_and_starts(mask, phi_k.shape[2], layer.position if recurrent else None)
        how: dict[str, Any] = {
            "mask": padding,
            "starts": starts,
            "decay": self.feature_map.decay,
            "signed": self.feature_map.signed,
        }
        if recurrent:
            return layer.advance(phi_q, phi_k, v, **how)
        out, _ = ops.linear_attention(phi_q, phi_k, v, **how)
        return out

    def imitate(self, inputs: Inputs) -> Tensor:
        """The outputs of the recurrence for these inputs, without a cache."""
        q, k, v, mask, scaling, causal = inputs
        phi_q, phi_k = self.feature_map(q * scaling, k)
        padding, starts = padding_and_starts(mask, k.shape[2])
        how: dict[str, Any] = {"mask": padding, "decay": self.feature_map.decay, "signed": self.feature_map.signed}
        out, _ = ops.linear_attention(phi_q, phi_k, self.spread(v), starts=starts, causal=causal, **how)
        return out

    def spread(self, v: Tensor) -> Tensor:
        """Values for every key head of the map: with un-grouped keys, one per query head."""
        return repeat_heads(v, self.feature_map.key_heads)


def recurrent_sites(model: nn.Module) -> list[Recurrence]:
    """Every recurrent site of a model, from the bottom up."""
    return [m for m in model.modules() if isinstance(m, Recurrence) and hasattr(m, "feature_map")]


# --- The mode of a thread -----------------------------------------------------------------------------------

Observer = Callable[[Recurrence, Inputs, Tensor], None]


class Mode(NamedTuple):
    """Sites that compute exact softmax attention in the calls of one thread."""

    sites: frozenset[int]
    observer: Observer | None
    outer: Mode | None


_thread = threading.local()


def mode_of(site: Recurrence) -> Mode | None:
    """The innermost mode of this thread that concerns the site; None: the recurrence."""
    mode: Mode | None = getattr(_thread, "mode", None)
    while mode is not None and id(site) not in mode.sites:
        mode = mode.outer
    return mode


@contextmanager
def exact_attention(
    model: nn.Module, *, recurrent_layers: Collection[int] = (), observer: Observer | None = None
) -> Iterator[None]:
    """Inside the `with` block, and in this thread, every recurrent site computes exact softmax attention.

    It shows that the weights are still those of the base model, and is the target of the transfer stage.

    Args:
        recurrent_layers: layers that stay recurrent.
        observer: called at each site with the site, the inputs that the recurrence would have, and the exact output.
    """
    sites = [site for site in recurrent_sites(model) if site.layer_idx not in recurrent_layers]
    if any(getattr(site, "merged", None) is not None for site in sites):
        raise T2RError("a merged model has no queries and keys: it cannot compute softmax attention")
    before: Mode | None = getattr(_thread, "mode", None)
    _thread.mode = Mode(frozenset(map(id, sites)), observer, before)
    try:
        yield
    finally:
        _thread.mode = before
