"""Linear attention in chunks: linear time, plain PyTorch, any device.

A chunk of queries sees its own keys as a small matrix and everything before it as the state. The backward
pass recomputes what it needs from the inputs and one state per chunk, so that neither a T x T nor a T x k x d
tensor ever exists.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from t2r.ops.common import (
    Denominator,
    State,
    accumulator_dtype,
    cast_output,
    fold_groups,
    read,
    safe_denominator,
)
from t2r.ops.reference import absorb, look

CHUNK_SIZE = 128
"""Within a chunk the cost is quadratic, between chunks it is a k x d state: at the paper's sizes the two
balance near here."""


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: State | None = None,
    mask: Tensor | None = None,
    starts: Tensor | None = None,
    causal: bool = True,
    signed: bool = False,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, State]:
    """As `t2r.ops.linear_attention`. Non-causal attention needs no chunks: it is two matrix products."""
    past = State.zeros(k, v, signed) if state is None else state
    if causal:
        out, *new = _Chunked.apply(q, k, v, past.s, past.z, past.z_abs, mask, starts, chunk_size)
        return out, State(*new)
    dtype = accumulator_dtype(q, k, v)
    if mask is not None:
        k, v = (x.masked_fill(~mask[:, None, :, None], 0) for x in (k, v))
    new_state = absorb(past, k.to(dtype), v.to(dtype))
    return cast_output(look(q.to(dtype), new_state), v.dtype), new_state


class _Chunk(NamedTuple):
    """A stretch of the sequence, in the accumulator's dtype, and who may see whom in it.

    Without packed documents the last three are None: everything sees the state and enters it."""

    q: Tensor  # [batch, key_heads, group * time, feature]
    k: Tensor  # [batch, key_heads, time, feature], masked keys are zero
    v: Tensor
    same: Tensor | None  # [batch, 1, 1, time, time]: query and key are of one document
    fresh: Tensor | None  # [batch, 1, group * time]: no document has started since the chunk before
    keep: Tensor | None  # [batch, 1, time, 1]: still the document with which the chunk ends

    def hide(self, weights: Tensor) -> Tensor:
        """Zero, in place, where a query (row) may not look at a key (column)."""
        time = self.k.shape[2]
        by_group = weights.view(*weights.shape[:2], -1, time, time)
        by_group.tril_()
        if self.same is not None:
            by_group.masked_fill_(~self.same, 0)
        return weights

    def from_state(self, x: Tensor) -> Tensor:
        """Zero in the rows of those queries for which the state before the chunk is another document's."""
        return x if self.fresh is None else x * (self.fresh if x.dim() == 3 else self.fresh[..., None])

    def to_state(self, x: Tensor) -> Tensor:
        """Zero in the rows of those keys that the state after the chunk does not hold."""
        return x if self.keep is None else x * self.keep

    def carried(self, x: Tensor) -> Tensor:
        """The state before the chunk, or its gradient after it: zero where a document started in between."""
        if self.fresh is None:
            return x
        carry = self.fresh[:, :, -1]
        return x * carry.view(-1, *[1] * (x.dim() - 1))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        s: Tensor,
        z: Tensor,
        z_abs: Tensor | None,
        mask: Tensor | None,
        starts: Tensor | None,
        size: int,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(q, k, v, s, z, z_abs, mask, starts)
        ctx.size = size
        state = State(s, z, z_abs)
        out = v.new_empty(*q.shape[:3], v.shape[-1])
        document = None if starts is None else starts.cumsum(1)
        for start in range(0, k.shape[2], size):
            chunk = _take(q, k, v, mask, document, start, size)
            num, den, _ = _attend(chunk, state)
            num = num.div_(den.safe[..., None]).masked_fill_(den.empty[..., None], 0)
            _put(out, cast_output(num, out.dtype), start)
            state = _advance(chunk, state)
        if state.z_abs is None:
            return out, state.s, state.z
        ctx.mark_non_differentiable(state.z_abs)
        return out, state.s, state.z, state.z_abs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Someone may call backward inside autocast, which would lower the matrix products of float32 tensors.
        with torch.autocast(grads[0].device.type, enabled=False):
            return _backward(ctx.saved_tensors, ctx.size, *grads[:3])


def _backward(
    saved: tuple[Tensor | None, ...], size: int, g: Tensor, ds: Tensor, dz: Tensor
) -> tuple[Tensor | None, ...]:
    q, k, v, s, z, z_abs, mask, starts = saved
    assert q is not None and k is not None and v is not None and s is not None and z is not None
    document = None if starts is None else starts.cumsum(1)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    offsets = range(0, k.shape[2], size)
    states = [State(s, z, z_abs)]
    for start in offsets[:-1]:
        states.append(_advance(_take(q, k, v, mask, document, start, size), states[-1]))

    for start in reversed(offsets):
        chunk, state = _take(q, k, v, mask, document, start, size), states.pop()
        num, den, weights = _attend(chunk, state)
        gradient = fold_groups(g[:, :, start : start + size].to(num.dtype), k.shape[1])
        g_num = (gradient / den.safe[..., None]).masked_fill_(den.empty[..., None], 0)
        # out = num / den, and the bound is a constant: no gradient to the denominator where it acts.
        g_den = -(g_num * num).sum(-1) / den.safe
        g_den = g_den.masked_fill_(den.bounded, 0)

        d_weights = chunk.hide((g_num @ chunk.v.mT).add_(g_den[..., None]))
        past = g_num @ state.s.mT + g_den[..., None] * state.z[:, :, None]
        _put(dq, d_weights @ chunk.k + chunk.from_state(past), start)
        future = chunk.v @ ds.mT + dz[:, :, None]
        dk_chunk = d_weights.mT @ chunk.q + chunk.to_state(future)
        dv_chunk = weights.mT @ g_num + chunk.to_state(chunk.k @ ds)
        if mask is not None:
            hidden = ~mask[:, None, start : start + size, None]
            dk_chunk, dv_chunk = dk_chunk.masked_fill_(hidden, 0), dv_chunk.masked_fill_(hidden, 0)
        _put(dk, dk_chunk, start)
        _put(dv, dv_chunk, start)

        seen = chunk.from_state(chunk.q)
        ds = chunk.carried(ds) + seen.mT @ g_num
        dz = chunk.carried(dz) + (seen * g_den[..., None]).sum(-2)
    return dq, dk, dv, ds, dz, None, None, None, None


def _take(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, document: Tensor | None, start: int, size: int
) -> _Chunk:
    """Cut the chunk that begins at `start`, with masked keys and values as zeros."""
    dtype, heads = accumulator_dtype(q, k, v), k.shape[1]
    here = slice(start, start + size)
    q, k, v = fold_groups(q[:, :, here].to(dtype), heads), k[:, :, here].to(dtype), v[:, :, here].to(dtype)
    if mask is not None:
        hidden = ~mask[:, None, here, None]
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    if document is None:
        return _Chunk(q, k, v, None, None, None)
    before = document[:, start - 1 : start] if start else torch.zeros_like(document[:, :1])
    document = document[:, here]
    same = (document[:, :, None] == document[:, None, :])[:, None, None]
    fresh = (document == before)[:, None].repeat(1, 1, q.shape[2] // k.shape[2])
    keep = (document == document[:, -1:])[:, None, :, None]
    return _Chunk(q, k, v, same, fresh, keep)


def _attend(chunk: _Chunk, state: State) -> tuple[Tensor, Denominator, Tensor]:
    """Numerator, denominator and the weights within the chunk."""
    weights = chunk.hide(chunk.q @ chunk.k.mT)
    num, den, total = (None if x is None else chunk.from_state(x) for x in read(chunk.q, state))
    assert num is not None and den is not None
    num, den = num + weights @ chunk.v, den + weights.sum(-1)
    if total is not None:
        total = total + chunk.hide(chunk.q.abs() @ chunk.k.abs().mT).sum(-1)
    return num, safe_denominator(den, total), weights


def _advance(chunk: _Chunk, state: State) -> State:
    """The state after the chunk."""
    k = chunk.to_state(chunk.k)
    s = chunk.carried(state.s) + k.mT @ chunk.v
    z = chunk.carried(state.z) + k.sum(-2)
    return State(s, z, None if state.z_abs is None else chunk.carried(state.z_abs) + k.abs().sum(-2))


def _put(target: Tensor, rows: Tensor, start: int) -> None:
    """Write a chunk's rows, folded by groups, back to where they belong, in the target's dtype."""
    batch, heads, _, size = target.shape
    rows = rows.reshape(batch, heads, -1, size)
    target[:, :, start : start + rows.shape[2]] = rows
