"""The weights of linear attention, which the recurrence never forms. For analysis: time and memory are quadratic."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from t2r.ops.common import accumulator_dtype, bound_decay, clock, safe_denominator

BLOCK = 32
"""Queries per block with decay. Within a block, the decay of each pair of tokens is computed for every feature."""


class Weights(NamedTuple):
    """Attention weights of queries, and which queries have a bounded denominator."""

    weights: Tensor
    """`[batch, heads, queries, keys]`. A row sums to 1 unless its denominator was bounded. Signed maps give negative
    weights."""
    bounded: Tensor
    """`[batch, heads, queries]`: the denominator was bounded, or all weights are zero."""


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    mask: Tensor | None = None,
    starts: Tensor | None = None,
    decay: Tensor | None = None,
    causal: bool = True,
    signed: bool = False,
    first: int = 0,
) -> Weights:
    """Return the weights with which `linear_attention` averages the values.

    The arguments are those of `linear_attention`, without an initial state. Only the queries from `first` on are
    computed."""
    dtype, group = accumulator_dtype(q, k), q.shape[1] // k.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        q, k = q[:, :, first:].to(dtype), k.to(dtype).repeat_interleave(group, dim=1)
        if mask is not None:
            k = k.masked_fill(~mask.bool()[:, None, :, None], 0)
        time = rates = None
        if decay is not None:
            rates = bound_decay(decay).to(dtype).repeat_interleave(group, dim=0)
            time = clock(None if mask is None else mask.bool(), k.shape[2], k)
        visible = _visible(q.shape[2], k.shape[2], first, starts, q.device) if causal else None
        weights = _products(q, k, rates, time, visible, first)
        total = _products(q.abs(), k.abs(), rates, time, visible, first).sum(-1) if signed else None
        safe, bounded, empty = safe_denominator(weights.sum(-1), total)
        return Weights((weights / safe[..., None]).masked_fill(empty[..., None], 0), bounded)


def _visible(queries: int, keys: int, first: int, starts: Tensor | None, device: torch.device) -> Tensor:
    """Return which keys a query attends to, `[batch or 1, 1, queries, keys]`."""
    position = torch.arange(keys, device=device)
    visible = (position[first : first + queries, None] >= position)[None]
    if starts is not None:
        document = starts.bool().cumsum(1)
        visible = visible & (document[:, first : first + queries, None] == document[:, None])
    return visible[:, None]


def _products(
    q: Tensor, k: Tensor, rates: Tensor | None, time: Tensor | None, visible: Tensor | None, first: int
) -> Tensor:
    """Return the products of query and key features, with decay, and 0 for keys that are not visible."""
    if rates is None or time is None:
        found = q @ k.mT
    else:
        blocks = range(0, q.shape[2], BLOCK)
        found = torch.cat([_faded(q[:, :, i : i + BLOCK], k, rates, time, first + i) for i in blocks], dim=2)
    return found if visible is None else found.masked_fill(~visible, 0)


def _faded(q: Tensor, k: Tensor, rates: Tensor, time: Tensor, first: int) -> Tensor:
    """Return the products of a block of queries, which begin at position `first`, with all keys.

    The decay from an earlier key to a query is the product of the decay up to the block and the decay within it.
    Neither factor is above 1, so nothing overflows."""
    last = first + q.shape[2]
    here, before = time[:, first:last], time[:, :first]
    rate = rates[None, :, None]
    begin = here[:, :1]

    def left(elapsed: Tensor) -> Tensor:  # [batch, time] -> [batch, heads, time, feature]
        return torch.exp(-rate * elapsed[:, None, :, None])

    parts = [(q * left(here - begin)) @ (k[:, :, :first] * left(begin - before)).mT]
    elapsed = (here[:, :, None] - here[:, None, :]).clamp_min(0)  # later keys are masked by the caller
    within = torch.exp(-rate[:, :, None] * elapsed[:, None, :, :, None])
    parts.append(torch.einsum("bhif,bhjf,bhijf->bhij", q, k[:, :, first:last], within.expand(len(q), -1, -1, -1, -1)))
    parts.append(q.new_zeros(*q.shape[:3], k.shape[2] - last))
    return torch.cat(parts, dim=-1)
