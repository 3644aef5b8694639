"""Exact attention to the last tokens of a sequence, with a window of its own for each key head, and what leaves it.

A token attends to itself and to the tokens before it, `size` in all, and to the first `sinks` tokens of the sequence. A
token that is neither is `delayed`: it enters a recurrent state in the step in which it leaves the window.

`window_attention` returns `Sums`, because a state may have more to say about the same query (`combine`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from t2r.errors import T2RError
from t2r.ops.common import Features, Slots, State, Sums, Windows, accumulator_dtype, fold_groups
from t2r.ops.registry import BACKENDS, PREFERENCE
from t2r.ops.rounding import Draws

LARGEST_STATE = 16384
"""The most numbers of the state of a head that a step in one kernel advances."""
MOST_ROWS = 65535
"""The most sequences of a step in one kernel: a GPU's limit for the second dimension of a launch."""
BLOCK = 256
"""Queries that are computed at once. Their keys are those of a block and of the largest window before it."""


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: Windows,
    *,
    scaling: float,
    origin: Tensor | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> Sums:
    """Attend to the window of each token.

    Args:
        q, k, v: queries `[batch, heads, time, dim]`, keys `[batch, key_heads, time, dim]` and values.
        windows: the window of each key head.
        scaling: factor of the scores.
        origin: `[batch, time]`: where the sequence (or document) of each token begins. Negative: before the first of
            these tokens. None: at 0.
        softcap: bound of the scores (Gemma 2).
        backend: `auto`, `torch` or `triton`.

    Returns the average of the values as the numerator, a denominator of 1, and the logarithm of the sum of weights as
    the peak, minus infinity for heads without a window. The average has the dtype of the values; sums are accumulated
    in float32 (float64 for float64 inputs).
    """
    if windows.sizes.shape != k.shape[1:2]:
        raise T2RError(f"windows must have a size for each of {k.shape[1]} key heads; got {len(windows.sizes)}")
    if windows.sizes.is_floating_point():
        raise T2RError("windows with soft edges have no sums: they are for soft_window_attention")
    triton = BACKENDS["triton"]
    fits = q.device.type in (triton.abilities.devices or ()) and q.dtype in triton.abilities.dtypes
    fits = fits and softcap is None and q.shape[3] <= 256
    if backend == "triton" or (backend == "auto" and q.is_cuda and fits and triton.missing() is None):
        from t2r.ops.triton.window import window_attention as fast

        out, lse = fast(q, k, v, windows, scaling, origin)
    else:
        out, lse = in_blocks(q, k, v, windows, scaling, origin, softcap)
    return Sums(out, torch.ones_like(lse), peak=lse)


def steps_at_once(q: Tensor, v: Tensor, softcap: float | None) -> bool:
    """Return whether one kernel computes a step of all windows of a layer."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or softcap is not None:
        return False
    triton = BACKENDS["triton"]
    preferred = triton.name in PREFERENCE.get(q.device.type, ()) and triton.missing() is None
    preferred = preferred and q.shape[0] <= MOST_ROWS
    return preferred and q.dtype in triton.abilities.dtypes and max(q.shape[3], v.shape[3]) <= 256


class Far(NamedTuple):
    """The states of what has left the windows of a layer, which a step of these windows advances in place and reads.

    The keys and values that leave are the inputs of the feature map."""

    state: State
    features: Features
    decay: Tensor | None = None
    numbers: Tensor | None = None
    """The number of the state of each head of keys, `[key_heads]`, negative for none. None: each has its own."""
    slots: Slots | None = None
    draws: Draws | None = None
    """How states in half precision are rounded. None: to the nearest number."""


def advances_at_once(far: Far) -> bool:
    """Return whether the same kernel can advance these states: their features are those of an affine map, and the state
    of a head fits into its registers."""
    feature, value = far.state.s.shape[2:]
    maps = far.state.z_abs is None and far.features.q_weight is not None
    return maps and feature <= 256 and feature * value <= LARGEST_STATE


def in_blocks(
    q: Tensor, k: Tensor, v: Tensor, windows: Windows, scaling: float, origin: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attend block by block in plain PyTorch. Returns the averages and the logarithms of the sums of weights."""
    time, largest = q.shape[2], int(windows.sizes.max())
    if origin is not None or time <= BLOCK:
        return attend(q, k, v, windows, scaling, 0, 0, origin, softcap)
    outs, logs = [], []
    for start in range(0, time, BLOCK):
        end = min(start + BLOCK, time)
        first = max(0, start - largest + 1)
        sinks = min(windows.sinks, first)
        keys, values = (
            torch.cat([x[:, :, :sinks], x[:, :, first:end]], 2) if sinks else x[:, :, first:end] for x in (k, v)
        )
        out, log = attend(q[:, :, start:end], keys, values, windows, scaling, start, first, None, softcap, sinks)
        outs.append(out)
        logs.append(log)
    return torch.cat(outs, 2), torch.cat(logs, 2)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: Windows,
    scaling: float,
    start: int,
    first: int,
    origin: Tensor | None,
    softcap: float | None,
    sinks: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attend with queries from position `start` on to the sinks and to the keys from position `first` on."""
    queries, keys = q.shape[2], k.shape[2]
    column = torch.arange(keys, device=q.device)
    position = torch.where(column < sinks, column, column - sinks + first)
    row = torch.arange(start, start + queries, device=q.device)
    distance = row[:, None] - position
    begin = torch.zeros_like(row)[None] if origin is None else origin
    sink = position[None, None, :] - begin[:, :, None] < windows.sinks
    size = windows.sizes[:, None, None]
    seen = (distance >= 0) & (position >= begin[:, :, None])
    allowed = ((distance < size) | (sink[:, None] & (size > 0))) & seen[:, None]  # [batch or 1, key_heads, ...]
    return softmax_sums(q, k, v, allowed, scaling, softcap)


def softmax_sums(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scaling: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend to the allowed keys `[batch or 1, key_heads, queries, keys]`. Returns averages and logarithms of sums.

    Where nothing is allowed, the average is 0 and the logarithm is minus infinity."""
    (_, heads, queries, _), key_heads = q.shape, k.shape[1]
    group, wide = heads // key_heads, accumulator_dtype(q, k, v)
    scores = (fold_groups(q, key_heads) @ k.mT).to(wide) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.unflatten(2, (group, queries)).masked_fill(~allowed[:, :, None], -torch.inf)
    empty = ~allowed.any(-1)[:, :, None].expand(scores.shape[:4])
    lse = scores.masked_fill(empty[..., None], 0).logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    out = (weights.flatten(2, 3).to(v.dtype) @ v).reshape(q.shape[0], heads, queries, v.shape[3])
    return out, lse.masked_fill(empty, -torch.inf).reshape(q.shape[0], heads, queries)


# --- What has left the window -------------------------------------------------------------------------------


class _Shift(torch.autograd.Function):
    """Shift each head of `x [batch, heads, time, size]` along the time, by its own number of positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Tensor) -> Tensor:
        ctx.save_for_backward(by)
        return shifted(x, by)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (by,) = ctx.saved_tensors
        return shifted(g, -by), None


def shifted(x: Tensor, by: Tensor) -> Tensor:
    """Return y with `y[t] = x[t - by]`, and zeros where there is no such position."""
    source = torch.arange(x.shape[2], device=x.device) - by[:, None]
    there = (source >= 0) & (source < x.shape[2])
    index = source.clamp(0, max(0, x.shape[2] - 1))[None, :, :, None].expand(x.shape)
    return x.gather(2, index).masked_fill(~there[None, :, :, None], 0)


class Left(NamedTuple):
    """Tokens that leave windows: the key and value that leave at each position, `[batch, key_heads, time, …]`."""

    k: Tensor
    v: Tensor
    valid: Tensor
    """`[batch or 1, key_heads, time]`: whether one leaves that is not a sink."""


def delayed(k: Tensor, v: Tensor, windows: Windows, origin: Tensor | None = None) -> Left:
    """Return what leaves the windows of whole sequences. `origin` is that of `window_attention`."""
    time, size = k.shape[2], windows.sizes
    sinks = torch.where(size > 0, windows.sinks, 0)
    position = torch.arange(time, device=k.device)[None]
    age = position if origin is None else position - origin
    return Left(_Shift.apply(k, size), _Shift.apply(v, size), age[:, None] >= (size + sinks)[:, None])
