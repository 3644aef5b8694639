"""Windows with soft edges, whose sizes have a gradient: what one more token in the window of a head would be worth.

The weight of a token falls linearly with its distance, from 1 to 0 around the edge of the window, as in the adaptive
attention span of Sukhbaatar et al. (2019). Here the width of the edge is a share of the window, so that small and large
windows are measured with the same relative precision.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from t2r.ops.common import accumulator_dtype, fold_groups

EDGE = 0.5
"""The width of the edge as a share of the window."""
REACH = 1 - EDGE / 2
"""The part of a window that has the whole weight."""


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

    Other arguments and results are those of `t2r.ops.window_attention`. Weights are formed, `[time, time]` for each
    head, and computed again in the backward pass instead of being kept."""
    group = q.shape[1] // k.shape[1]
    found = [
        checkpoint(of_head, q[:, h * group : (h + 1) * group], k[:, h : h + 1], v[:, h : h + 1], sizes[h], sinks,
                   bound, scaling, softcap, use_reentrant=False)
        for h in range(k.shape[1])
    ]  # fmt: skip
    outs, logs = zip(*found, strict=True)
    return torch.cat(outs, 1), torch.cat(logs, 1)


def of_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: Tensor,
    sinks: int,
    bound: int | None,
    scaling: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Attend with the query heads of one key head."""
    time, heads = q.shape[2], q.shape[1]
    position = torch.arange(time, device=q.device)
    distance = position[:, None] - position
    weight = ((1 - distance / size) / EDGE + 0.5).clamp(0, 1)
    if bound is not None:
        weight = weight * (distance < bound)
    weight = torch.where(position < sinks, torch.ones_like(weight), weight)
    scores = (fold_groups(q, 1) @ k.mT).to(accumulator_dtype(q, k, v)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.unflatten(2, (heads, time)).masked_fill(distance < 0, -torch.inf)
    peak = scores.detach().amax(-1, keepdim=True)
    weights = (scores - peak).exp() * weight
    total = weights.sum(-1)
    out = ((weights / total[..., None]).to(v.dtype) @ v[:, :, None]).squeeze(1)
    return out, (total.log() + peak[..., 0]).squeeze(1)
