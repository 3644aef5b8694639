"""Windows with soft edges, whose sizes have a gradient: what one more token in the window of a head would be worth.

The weight of a token falls linearly with its distance, from 1 to 0 around the edge of the window, as in the adaptive
attention span of Sukhbaatar et al. (2019). Here the width of the edge is a share of the window, so that small and large
windows are measured with the same relative precision.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from t2r.ops.common import accumulator_dtype, fold_groups

EDGE = 0.5
"""The width of the edge as a share of the window."""
REACH = 1 - EDGE / 2
"""The part of a window that has the whole weight."""


BLOCK = {"cpu": 256}
LARGE = 512
"""Queries that are computed at once, with the keys that they can see. More on a GPU, where each block launches its
kernels again, but not all of a long text: most heads can see a small part of it."""


def soft_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: Tensor,
    sinks: int,
    bound: int | None,
    scaling: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to windows of `sizes [key_heads]`, floating-point numbers of tokens above 0, and within a `bound`.

    Other arguments and results are those of `t2r.ops.window_attention`. Weights are formed for each head and block of
    queries, and computed again in the backward pass instead of being kept."""
    group, time = q.shape[1] // k.shape[1], q.shape[2]
    block = BLOCK.get(q.device.type, LARGE)
    limit = time if bound is None else min(time, bound)
    found = []
    for h, size in enumerate(sizes.tolist()):
        farthest = min(limit, math.ceil(size * (1 + EDGE / 2)))
        own = q[:, h * group : (h + 1) * group], k[:, h : h + 1], v[:, h : h + 1]
        parts = [
            checkpoint(of_block, *own, sizes[h], start, min(start + block, time), farthest, sinks, bound, scaling,
                       softcap, use_reentrant=False)
            for start in range(0, time, block)
        ]  # fmt: skip
        found.append([torch.cat(each, 2) for each in zip(*parts, strict=True)])
    outs, logs = zip(*found, strict=True)
    return torch.cat(outs, 1), torch.cat(logs, 1)


def of_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: Tensor,
    start: int,
    end: int,
    farthest: int,
    sinks: int,
    bound: int | None,
    scaling: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Attend with a block of queries of one key head, to the sinks and to keys nearer than `farthest`."""
    heads, first = q.shape[1], max(0, start - farthest + 1)
    kept = min(sinks, first)
    position = torch.cat([torch.arange(kept, device=q.device), torch.arange(first, end, device=q.device)])
    keys, values = (x[:, :, first:end] if not kept else x[:, :, position] for x in (k, v))
    distance = torch.arange(start, end, device=q.device)[:, None] - position
    weight = ((1 - distance / size) / EDGE + 0.5).clamp(0, 1)
    if bound is not None:
        weight = weight * (distance < bound)
    weight = torch.where(position < sinks, torch.ones_like(weight), weight)
    scores = (fold_groups(q[:, :, start:end], 1) @ keys.mT).to(accumulator_dtype(q, k, v)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.unflatten(2, (heads, end - start)).masked_fill(distance < 0, -torch.inf)
    peak = scores.detach().amax(-1, keepdim=True)
    weights = (scores - peak).exp() * weight
    total = weights.sum(-1)
    out = ((weights / total[..., None]).to(v.dtype) @ values[:, :, None]).squeeze(1)
    return out, (total.log() + peak[..., 0]).squeeze(1)
