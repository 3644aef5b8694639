"""Windows with soft edges, whose sizes have a gradient: what one more token in the window of a head would be worth.

The weight of a token falls linearly with its distance, from 1 to 0 around the edge of the window, as in the adaptive
attention span of Sukhbaatar et al. (2019). Here the width of the edge is a share of the window, so that small and large
windows are measured with the same relative precision.

There are two ways. On a CPU, each head goes through blocks of queries and skips the keys that they cannot see. A GPU
would wait for the many small kernels of that: there, the logarithm of the weight is a bias of the scores of all heads.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from t2r.ops.common import Windows, accumulator_dtype, fold_groups

EDGE = 0.5
"""The width of the edge as a share of the window."""
REACH = 1 - EDGE / 2
"""The part of a window that has the whole weight."""
BLOCK = {"cpu": 256}
"""Queries of a head that are computed at once, with the keys that they can see. Other devices compute all heads."""
AT_ONCE = 1 << 28
"""Scores of all rows and heads that are computed at once on other devices. Their gradient is 512 MB in bfloat16. Four
rows of 2,304 tokens with 9 heads are less: such a layer is one call."""
LEAST = 64
"""Queries that are computed at once in any case. Blocks are multiples of it, because kernels require multiples of 8."""
WIDE = 1 << 26
"""The same of one head with a softcap, where several tensors of this size are kept in float32."""


def soft_window_attention(
    q: Tensor, k: Tensor, v: Tensor, windows: Windows, *, scaling: float, softcap: float | None = None
) -> Tensor:
    """Attend to windows whose sizes are floating-point numbers of tokens above 0, in whole sequences.

    Arguments are those of `t2r.ops.window_attention`. Returns the average of the values alone: soft windows show what a
    window is worth without a state, so nobody adds more to the sums. Weights are computed again in the backward pass
    instead of being kept."""
    if softcap is not None or q.device.type in BLOCK:
        return by_head(q, k, v, windows, scaling, softcap)
    return all_heads(q, k, v, windows, scaling)


def weight_at(distance: Tensor, size: Tensor) -> Tensor:
    """Return the weight at a distance, before it is limited to the range from 0 to 1."""
    return (1 - distance / size) / EDGE + 0.5


# --- All heads at once ------------------------------------------------------------------------------------------


def all_heads(q: Tensor, k: Tensor, v: Tensor, windows: Windows, scaling: float) -> Tensor:
    """Attend with all heads, and as many queries as `AT_ONCE` allows."""
    (rows, heads, time, _), key_heads = q.shape, k.shape[1]
    group = heads // key_heads
    # The query heads of a key head become rows: they have the same bias, which is not repeated for them.
    q = q.unflatten(1, (key_heads, group)).transpose(1, 2).flatten(0, 1)
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    block = max(LEAST, AT_ONCE // (rows * heads * time) // LEAST * LEAST)
    parts = [
        checkpoint(biased, q[:, :, start : start + block], *(x[:, :, : start + block] for x in (k, v)), *windows,
                   scaling, use_reentrant=False, preserve_rng_state=False)
        for start in range(0, time, block)
    ]  # fmt: skip
    out: Tensor = torch.cat(parts, 2).unflatten(0, (rows, group))
    return out.transpose(1, 2).flatten(1, 2)


_KERNELS = threading.Lock()


def biased(q: Tensor, k: Tensor, v: Tensor, sizes: Tensor, sinks: int, bound: int | None, scaling: float) -> Tensor:
    """Attend with the last queries of a sequence."""
    bias: Tensor = _Bias.apply(sizes, q.shape[2], k.shape[2], sinks, bound, q.dtype)
    if bias.requires_grad and not q.requires_grad:
        # In the first layer of a frozen model. If only the bias has a gradient, the kernel of the backward pass reads
        # logarithms of sums that torch has not made (pytorch/pytorch#148476).
        q = q.detach().requires_grad_()
    # The kernel of cuDNN has no gradient of the bias, and could be chosen all the same. The choice belongs to the
    # process: two threads that change it at the same time would restore each other's.
    with _KERNELS, sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scaling)


class _Bias(torch.autograd.Function):
    """The logarithms of the weights that the last queries of a sequence give its keys, `[1, key_heads, queries, keys]`.

    Its gradient is that of the scores. A function of its own keeps nothing of this size for the backward pass, and sums
    over the scores in the dtype of the sizes."""

    @staticmethod
    def forward(
        ctx: Any, sizes: Tensor, queries: int, keys: int, sinks: int, bound: int | None, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(sizes)
        ctx.given = queries, keys, sinks, bound
        distance = torch.arange(keys, device=sizes.device)
        logs = weight_at(distance, sizes[:, None]).clamp(0, 1).log()  # minus infinity where it is 0
        if bound is not None:
            logs = logs.masked_fill(distance >= bound, -torch.inf)
        bias = by_position(logs.to(dtype), queries, -torch.inf)
        before = distance[-queries:, None] >= distance[:sinks]
        bias[:, :, :sinks].masked_fill_(before, 0)
        return bias[None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (sizes,), (queries, keys, sinks, bound) = ctx.saved_tensors, ctx.given
        distance = torch.arange(keys, device=sizes.device)
        size = sizes[:, None]
        weight = weight_at(distance, size)
        falls = (weight > 0) & (weight <= 1)
        if bound is not None:
            falls &= distance < bound
        slope = torch.where(falls, distance / (EDGE * size**2) / weight, 0)
        slopes = by_position(slope, queries, 0)
        slopes[:, :, :sinks] = 0
        return (grad[0] * slopes).sum((1, 2)), None, None, None, None, None


def by_position(numbers: Tensor, queries: int, after: float) -> Tensor:
    """Return `[heads, queries, keys]` of numbers by distance, `[heads, keys]`, and one for keys after a query."""
    position = torch.arange(numbers.shape[1], device=numbers.device)
    distance = position[-queries:, None] - position
    return pad(numbers, (0, queries - 1), value=after)[:, distance]  # negative distances count from the end


# --- Head by head -----------------------------------------------------------------------------------------------


def by_head(q: Tensor, k: Tensor, v: Tensor, windows: Windows, scaling: float, softcap: float | None) -> Tensor:
    """Attend with one head after the other, block by block."""
    sizes, sinks, bound = windows
    (rows, _, time, _), group = q.shape, q.shape[1] // k.shape[1]
    block = BLOCK.get(q.device.type) or max(LEAST, WIDE // (rows * group * time))
    limit = time if bound is None else min(time, bound)
    # The device is not waited for if its only block sees all keys before it anyway.
    reach = [min(limit, math.ceil(size * (1 + EDGE / 2))) for size in sizes.tolist()] if block < time else None
    found = []
    for h in range(len(sizes)):
        own = q[:, h * group : (h + 1) * group], k[:, h : h + 1], v[:, h : h + 1]
        farthest = limit if reach is None else reach[h]
        parts = [
            checkpoint(of_block, *own, sizes[h], start, min(start + block, time), farthest, sinks, bound, scaling,
                       softcap, use_reentrant=False, preserve_rng_state=False)
            for start in range(0, time, block)
        ]  # fmt: skip
        found.append(torch.cat(parts, 2))
    return torch.cat(found, 1)


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
) -> Tensor:
    """Attend with a block of queries of one key head, to the sinks and to keys nearer than `farthest`."""
    heads, first = q.shape[1], max(0, start - farthest + 1)
    kept = min(sinks, first)
    position = torch.cat([torch.arange(kept, device=q.device), torch.arange(first, end, device=q.device)])
    keys, values = (x[:, :, first:end] if not kept else x[:, :, position] for x in (k, v))
    distance = torch.arange(start, end, device=q.device)[:, None] - position
    weight = weight_at(distance, size).clamp(0, 1)
    if bound is not None:
        weight = weight * (distance < bound)
    weight = torch.where(position < sinks, torch.ones_like(weight), weight)
    scores = (fold_groups(q[:, :, start:end], 1) @ keys.mT).to(accumulator_dtype(q, k, v)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.unflatten(2, (heads, end - start)).masked_fill(distance < 0, -torch.inf)
    peak = scores.detach().amax(-1, keepdim=True)
    weights = (scores - peak).exp() * weight
    weights = weights / weights.sum(-1, keepdim=True)
    out: Tensor = (weights.to(v.dtype) @ values[:, :, None]).squeeze(1)
    return out
