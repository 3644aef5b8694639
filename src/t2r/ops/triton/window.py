"""Attention to windows whose sizes differ by head: forward and backward, as in flash attention.

Blocks of keys outside the windows of a block of queries are not read, except those with sinks.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from t2r.ops.common import Windows
from t2r.ops.triton.blocks import block, inner, on_device, precision
from t2r.ops.triton.math import dot
from t2r.ops.triton.presence import INTERPRETED

SIZES = ["heads", "key_heads", "group", "time", "sinks"]
BLOCK = 16 if INTERPRETED else 64
"""Queries, or keys, of a program, and of an iteration."""
LOG2_E = 1.4426950408889634
LOG2 = tl.constexpr(LOG2_E)


@triton.jit
def rows(x, offsets, ok, d, DIM: tl.constexpr):
    """Load rows of a matrix. Elements out of bounds are zero."""
    return tl.load(x + offsets[:, None] + d[None, :], mask=ok[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def seen(m, n, begin, size, sinks, time):
    """Return which keys `n` are in the windows of queries `m`, whose sequences begin at `begin`: `[m, n]`."""
    distance = m[:, None] - n[None, :]
    near = (distance < size) | (n[None, :] - begin[:, None] < sinks)
    return near & (distance >= 0) & (n[None, :] >= begin[:, None]) & (n < time)[None, :]


@triton.jit
def origins(origin, b, m, time, HAS_ORIGIN: tl.constexpr):
    if HAS_ORIGIN:
        return tl.load(origin + b * time + m, mask=m < time, other=0).to(tl.int32)
    return m * 0


@triton.jit
def ranges(begin, m, start, size, sinks, time, BN: tl.constexpr):
    """Return where the blocks of keys of a block of queries begin: with sinks (and where these end), and in windows."""
    first = tl.min(tl.where(m < time, begin, time), 0)
    low = tl.maximum(tl.maximum(start - size + 1, first), 0) // BN * BN
    return tl.maximum(first, 0) // BN * BN, tl.minimum(low, first + sinks), low


@triton.jit
def absorb(
    query, acc, peak, total, k_here, v_here, n0, m, begin, size, sinks, time, scale, k_t, v_t, d,
    DIM: tl.constexpr, BN: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Add a block of keys to the running sums of a block of queries."""
    n = n0 + tl.arange(0, BN)
    key, value = (
        rows(k_here, n.to(tl.int64) * k_t, n < time, d, DIM),
        rows(v_here, n.to(tl.int64) * v_t, n < time, d, DIM),
    )
    score = dot(query, tl.trans(key), HOW) * scale
    score = tl.where(seen(m, n, begin, size, sinks, time), score, float("-inf"))
    new = tl.maximum(peak, tl.max(score, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    left, weight = tl.exp2(peak - safe), tl.exp2(score - safe[:, None])
    return acc * left[:, None] + dot(weight, value, HOW), new, total * left + tl.sum(weight, 1)


@triton.jit(do_not_specialize=SIZES)
def forward(
    q, k, v, sizes, origin, out, lse,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, heads, group, time, sinks, scale,
    DIM: tl.constexpr, HAS_ORIGIN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    HOW: tl.constexpr,
):  # fmt: skip
    """Compute the averages of a block of queries and the logarithms of their sums of weights."""
    b, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    h, start = head // group, tl.program_id(1) * BM
    size = tl.load(sizes + h).to(tl.int32)
    sinks = tl.where(size > 0, sinks, 0)
    m, d = start + tl.arange(0, BM), tl.arange(0, BD)
    begin = origins(origin, b, m, time, HAS_ORIGIN)
    query = rows(q + b * q_b + head * q_h, m.to(tl.int64) * q_t, m < time, d, DIM)
    k_here, v_here = k + b * k_b + h * k_h, v + b * v_b + h * v_h
    acc, total = tl.zeros([BM, BD], tl.float32), tl.zeros([BM], tl.float32)
    peak = tl.full([BM], float("-inf"), tl.float32)
    first, sinks_end, low = ranges(begin, m, start, size, sinks, time, BN)
    for n0 in range(first, sinks_end, BN):
        acc, peak, total = absorb(
            query, acc, peak, total, k_here, v_here, n0, m, begin, size, sinks, time, scale, k_t, v_t, d, DIM, BN, HOW
        )
    for n0 in range(low, tl.minimum(start + BM, time), BN):
        acc, peak, total = absorb(
            query, acc, peak, total, k_here, v_here, n0, m, begin, size, sinks, time, scale, k_t, v_t, d, DIM, BN, HOW
        )
    empty = total == 0  # a head without a window
    total = tl.where(empty, 1.0, total)
    row = tl.program_id(0).to(tl.int64) * time + m
    ok = (m < time)[:, None] & (d < DIM)[None, :]
    tl.store(out + row[:, None] * DIM + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=ok)
    tl.store(lse + row, tl.where(empty, float("-inf"), (peak + tl.log2(total)) / LOG2), mask=m < time)


@triton.jit
def weights_of(
    query, key, logs, m, n, begin, size, sinks, time, scale, HOW: tl.constexpr
):  # fmt: skip
    """Compute the weights `[m, n]` again, from the logarithms of their sums."""
    score = dot(query, tl.trans(key), HOW) * scale
    return tl.where(seen(m, n, begin, size, sinks, time), tl.exp2(score - logs[:, None] * LOG2), 0.0)


@triton.jit
def add_query_gradient(
    acc, query, g, logs, delta, k_here, v_here, n0, m, begin, size, sinks, time, scale, k_t, v_t, d,
    DIM: tl.constexpr, BN: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    n = n0 + tl.arange(0, BN)
    key, value = (
        rows(k_here, n.to(tl.int64) * k_t, n < time, d, DIM),
        rows(v_here, n.to(tl.int64) * v_t, n < time, d, DIM),
    )
    weight = weights_of(query, key, logs, m, n, begin, size, sinks, time, scale, HOW)
    return acc + dot(weight * (dot(g, tl.trans(value), HOW) - delta[:, None]), key, HOW)


@triton.jit(do_not_specialize=SIZES)
def query_gradients(
    q, k, v, sizes, origin, g, lse, deltas, dq,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, heads, group, time, sinks, scale, scaling,
    DIM: tl.constexpr, HAS_ORIGIN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    HOW: tl.constexpr,
):  # fmt: skip
    b, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    h, start = head // group, tl.program_id(1) * BM
    size = tl.load(sizes + h).to(tl.int32)
    sinks = tl.where(size > 0, sinks, 0)
    m, d = start + tl.arange(0, BM), tl.arange(0, BD)
    begin = origins(origin, b, m, time, HAS_ORIGIN)
    query = rows(q + b * q_b + head * q_h, m.to(tl.int64) * q_t, m < time, d, DIM)
    grad = rows(g + b * g_b + head * g_h, m.to(tl.int64) * g_t, m < time, d, DIM)
    row = tl.program_id(0).to(tl.int64) * time + m
    logs = tl.load(lse + row, mask=m < time, other=0.0)
    delta = tl.load(deltas + row, mask=m < time, other=0.0)
    k_here, v_here = k + b * k_b + h * k_h, v + b * v_b + h * v_h
    acc = tl.zeros([BM, BD], tl.float32)
    first, sinks_end, low = ranges(begin, m, start, size, sinks, time, BN)
    for n0 in range(first, sinks_end, BN):
        acc = add_query_gradient(
            acc, query, grad, logs, delta, k_here, v_here, n0, m, begin, size, sinks, time, scale, k_t, v_t, d,
            DIM, BN, HOW,
        )  # fmt: skip
    for n0 in range(low, tl.minimum(start + BM, time), BN):
        acc = add_query_gradient(
            acc, query, grad, logs, delta, k_here, v_here, n0, m, begin, size, sinks, time, scale, k_t, v_t, d,
            DIM, BN, HOW,
        )  # fmt: skip
    ok = (m < time)[:, None] & (d < DIM)[None, :]
    tl.store(dq + row[:, None] * DIM + d[None, :], (acc * scaling).to(dq.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=SIZES)
def key_gradients(
    q, k, v, sizes, origin, g, lse, deltas, dk, dv,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, key_heads, group, time, sinks, scale, scaling,
    DIM: tl.constexpr, HAS_ORIGIN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    HOW: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys and values, from all query heads that share them."""
    b, h = (tl.program_id(0) // key_heads).to(tl.int64), (tl.program_id(0) % key_heads).to(tl.int64)
    n0 = tl.program_id(1) * BN
    size = tl.load(sizes + h).to(tl.int32)
    sinks = tl.where(size > 0, sinks, 0)
    n, d = n0 + tl.arange(0, BN), tl.arange(0, BD)
    key = rows(k + b * k_b + h * k_h, n.to(tl.int64) * k_t, n < time, d, DIM)
    value = rows(v + b * v_b + h * v_h, n.to(tl.int64) * v_t, n < time, d, DIM)
    of_keys = origins(origin, b, n, time, HAS_ORIGIN)
    sunk = tl.max(((n - of_keys < sinks) & (n < time)).to(tl.int32), 0)  # whether a sink is among the keys
    end = tl.where(sunk > 0, time, tl.minimum(time, n0 + BN - 1 + size))
    dk_acc, dv_acc = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BD], tl.float32)
    for i in range(0, group):
        head = h * group + i
        q_here, g_here = q + b * q_b + head * q_h, g + b * g_b + head * g_h
        row = (b * key_heads * group + head) * time
        for m0 in range(n0 // BM * BM, end, BM):
            m = m0 + tl.arange(0, BM)
            begin = origins(origin, b, m, time, HAS_ORIGIN)
            query = rows(q_here, m.to(tl.int64) * q_t, m < time, d, DIM)
            grad = rows(g_here, m.to(tl.int64) * g_t, m < time, d, DIM)
            logs = tl.load(lse + row + m, mask=m < time, other=0.0)
            delta = tl.load(deltas + row + m, mask=m < time, other=0.0)
            weight = weights_of(query, key, logs, m, n, begin, size, sinks, time, scale, HOW)
            weight = tl.where((m < time)[:, None], weight, 0.0)
            dv_acc += dot(tl.trans(weight), grad, HOW)
            d_score = weight * (dot(grad, tl.trans(value), HOW) - delta[:, None])
            dk_acc += dot(tl.trans(d_score), query, HOW)
    row = tl.program_id(0).to(tl.int64) * time + n
    ok = (n < time)[:, None] & (d < DIM)[None, :]
    tl.store(dk + row[:, None] * DIM + d[None, :], (dk_acc * scaling).to(dk.dtype.element_ty), mask=ok)
    tl.store(dv + row[:, None] * DIM + d[None, :], dv_acc.to(dv.dtype.element_ty), mask=ok)


def _how(q: Tensor, k: Tensor, v: Tensor, origin: Tensor | None) -> dict[str, Any]:
    dim = q.shape[3]
    side = BLOCK if dim * q.element_size() <= 256 else max(16, BLOCK // 2)  # by the shared memory that tiles take
    return dict(DIM=dim, HAS_ORIGIN=origin is not None, BM=side, BN=side, BD=block(dim, 256), HOW=precision(q, k, v))


def _strides(*tensors: Tensor) -> list[int]:
    return [x.stride(i) for x in tensors for i in range(3)]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sizes: Tensor, origin: Tensor | None, sinks: int, scaling: float
) -> tuple[Tensor, Tensor]:
    q, k, v = inner(q), inner(k), inner(v)
    (batch, heads, time, dim), key_heads, how = q.shape, k.shape[1], _how(q, k, v, origin)
    out = torch.empty(batch, heads, time, dim, dtype=v.dtype, device=q.device)
    lse = torch.empty(batch, heads, time, dtype=torch.float32, device=q.device)
    with on_device(q):
        forward[(batch * heads, -(-time // how["BM"]))](
            q, k, v, sizes, sizes if origin is None else origin, out, lse, *_strides(q, k, v),
            heads, heads // key_heads, time, sinks, scaling * LOG2_E, **how, num_warps=4, num_stages=2,
        )  # fmt: skip
    return out, lse


def _backward(
    q: Tensor, k: Tensor, v: Tensor, sizes: Tensor, origin: Tensor | None, sinks: int, scaling: float,
    g: Tensor, lse: Tensor, delta: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, g = inner(q), inner(k), inner(v), inner(g)
    (batch, heads, time, _), key_heads, how = q.shape, k.shape[1], _how(q, k, v, origin)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    given = (q, k, v, sizes, sizes if origin is None else origin, g, lse, delta)
    rest = (*_strides(q, k, v, g),)
    with on_device(q):
        query_gradients[(batch * heads, -(-time // how["BM"]))](
            *given, dq, *rest, heads, heads // key_heads, time, sinks, scaling * LOG2_E, scaling,
            **how, num_warps=4, num_stages=2,
        )  # fmt: skip
        key_gradients[(batch * key_heads, -(-time // how["BN"]))](
            *given, dk, dv, *rest, key_heads, heads // key_heads, time, sinks, scaling * LOG2_E, scaling,
            **how, num_warps=4, num_stages=2,
        )  # fmt: skip
    return dq, dk, dv


# torch.compile treats the launches as two custom operators. Eager calls skip their dispatch.
_forward_traced = torch.library.custom_op("t2r::window_attention", _forward, mutates_args=())
_backward_traced = torch.library.custom_op("t2r::window_attention_backward", _backward, mutates_args=())


@_forward_traced.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sizes: Tensor, origin: Tensor | None, sinks: int, scaling: float
) -> tuple[Tensor, Tensor]:
    out = torch.empty(q.shape, dtype=v.dtype, device=q.device)
    return out, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


@_backward_traced.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sizes: Tensor, origin: Tensor | None, sinks: int, scaling: float,
    g: Tensor, lse: Tensor, delta: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        run: Any = _forward_traced if torch.compiler.is_compiling() else _forward
        out, lse = run(*inputs)
        *tensors, ctx.sinks, ctx.scaling = inputs
        ctx.save_for_backward(*tensors, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        if g is None:
            g = torch.zeros_like(out)
        delta = (g.float() * out.float()).sum(-1)
        if g_lse is not None:  # a larger sum of weights makes each weight smaller
            delta = delta - g_lse
        delta = delta.contiguous()  # `g` may be a transposed view, whose order of dimensions the sum would keep
        run: Any = _backward_traced if torch.compiler.is_compiling() else _backward
        return *run(*tensors, ctx.sinks, ctx.scaling, g, lse, delta), None, None, None, None


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, windows: Windows, scaling: float, origin: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `t2r.ops.window_attention`: the averages, and the logarithms of the sums of weights."""
    sizes = windows.sizes
    origin = None if origin is None else origin.to(torch.int32).contiguous()
    return _WindowAttention.apply(q, k, v, sizes, origin, windows.sinks, scaling)
