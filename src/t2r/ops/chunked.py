"""Linear attention in chunks: linear time, plain PyTorch, any device.

A chunk of queries sees its own keys as a small matrix and everything before it as the state. The backward
pass recomputes what it needs from the inputs and one state per chunk, so that neither a T x T nor a T x k x d
tensor ever exists.

Features that fade are scaled by powers of their decay, as seen from the middle of the chunk: a key grows with its
position and a query shrinks, so that their product has faded by the distance between them. With queries, keys and
state in that frame, a chunk is computed as if nothing faded.
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
    clock,
    fade,
    fold_groups,
    read,
    safe_denominator,
)
from t2r.ops.reference import absorb, look

CHUNK_SIZE = {"cpu": 128}
LARGE_CHUNK = 512
"""Within a chunk the cost is quadratic, between chunks it is a k x d state. On a CPU the two balance near 128 at the
paper's sizes; on an accelerator fewer and larger operations win."""
LARGEST_FADING_CHUNK = 128
"""Seen from the middle of so many tokens, the fastest decay is a factor of exp(64) at either end: float32 has room."""


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: State | None = None,
    mask: Tensor | None = None,
    starts: Tensor | None = None,
    decay: Tensor | None = None,
    causal: bool = True,
    signed: bool = False,
    chunk_size: int | None = None,
) -> tuple[Tensor, State]:
    """As `t2r.ops.linear_attention`. Non-causal attention needs no chunks: it is two matrix products."""
    if causal:
        size = CHUNK_SIZE.get(q.device.type, LARGE_CHUNK) if chunk_size is None else chunk_size
        if decay is not None:
            size, decay = min(size, LARGEST_FADING_CHUNK), decay.to(accumulator_dtype(q, k, v))
        past_tensors = (None, None, None) if state is None else state
        out, *new = _Chunked.apply(q, k, v, *past_tensors, decay, mask, starts, size, signed)
        return out, State(*new)
    past = State.zeros(k, v, signed) if state is None else state
    dtype = accumulator_dtype(q, k, v)
    if mask is not None:
        k, v = (x.masked_fill(~mask[:, None, :, None], 0) for x in (k, v))
    new_state = absorb(past, k.to(dtype), v.to(dtype))
    return cast_output(look(q.to(dtype), new_state), v.dtype), new_state


class _Frame(NamedTuple):
    """How far from the middle of a chunk each position is, in tokens that count, and what that does to features."""

    offset: Tensor  # [batch or 1, time]
    half: Tensor  # [batch or 1, 1]: from either end to the middle
    key: Tensor  # [batch or 1, key_heads, time, feature]: what keys are multiplied by
    query: Tensor  # the same for queries: the inverse
    state: Tensor  # [batch or 1, key_heads, feature]: what the state is multiplied by, on its way in and on its way out

    def queries(self, x: Tensor) -> Tensor:
        """Queries folded by groups, or their gradient, into the frame or out of it."""
        by_group: Tensor = x.unflatten(2, (-1, self.query.shape[2]))
        return (by_group * self.query[:, :, None]).flatten(2, 3)

    def age(self, x: Tensor) -> Tensor:
        """The sum over positions of `x [batch, key_heads, group * time, feature]` times their offset."""
        by_group: Tensor = x.unflatten(2, (-1, self.offset.shape[1]))
        return (by_group.sum(2) * self.offset[:, None, :, None]).sum((0, 2))

    def halfway(self, x: Tensor) -> Tensor:
        """The sum over the batch of `x [batch, key_heads, feature]` times half the length."""
        return (x * self.half[:, :, None]).sum(0)


class _Chunk(NamedTuple):
    """A stretch of the sequence, in the accumulator's dtype, and who may see whom in it.

    Without packed documents the next to last three are None: everything sees the state and enters it. Without a decay
    there is no frame."""

    q: Tensor  # [batch, key_heads, group * time, feature]
    k: Tensor  # [batch, key_heads, time, feature], masked keys are zero
    v: Tensor
    same: Tensor | None  # [batch, 1, 1, time, time]: query and key are of one document
    fresh: Tensor | None  # [batch, 1, group * time]: no document has started since the chunk before
    keep: Tensor | None  # [batch, 1, time, 1]: still the document with which the chunk ends
    frame: _Frame | None

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

    def framed(self, state: State | None) -> State | None:
        """The state before the chunk as seen from its middle; or as seen there, from its end."""
        return state if state is None or self.frame is None else state.faded(self.frame.state)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        s: Tensor | None,
        z: Tensor | None,
        z_abs: Tensor | None,
        decay: Tensor | None,
        mask: Tensor | None,
        starts: Tensor | None,
        size: int,
        signed: bool,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(q, k, v, s, z, z_abs, decay, mask, starts)
        ctx.size, ctx.signed = size, signed
        ctx.set_materialize_grads(False)
        state = None if s is None or z is None else State(s, z, z_abs)
        out = v.new_empty(*q.shape[:3], v.shape[-1])
        document = None if starts is None else starts.cumsum(1)
        for start in range(0, k.shape[2], size):
            chunk = _take(q, k, v, decay, mask, document, start, size)
            state = chunk.framed(state)
            num, den, _ = _attend(chunk, state, signed)
            num = num.div_(den.safe[..., None]).masked_fill_(den.empty[..., None], 0)
            _put(out, cast_output(num, out.dtype), start)
            state = chunk.framed(_advance(chunk, state, signed))
        assert state is not None
        if state.z_abs is None:
            return out, state.s, state.z
        ctx.mark_non_differentiable(state.z_abs)
        return out, state.s, state.z, state.z_abs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: gradient checkpointing recomputes them when they are asked for
        # Someone may call backward inside autocast, which would lower the matrix products of float32 tensors.
        with torch.autocast(saved[0].device.type, enabled=False):
            dq, dk, dv, ds, dz, d_decay = _backward(saved, ctx.size, ctx.signed, *grads[:3])
            return dq, dk, dv, ds, dz, None, d_decay, *(None,) * 4


def _backward(
    saved: tuple[Tensor | None, ...],
    size: int,
    signed: bool,
    g: Tensor | None,
    ds: Tensor | None,
    dz: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, s, z and the decay. What nobody asks for (a state that was not given, or not used after)
    stays None and costs nothing."""
    q, k, v, s, z, z_abs, decay, mask, starts = saved
    assert q is not None and k is not None and v is not None
    document = None if starts is None else starts.cumsum(1)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    d_decay = None if decay is None else torch.zeros_like(decay)

    offsets = range(0, k.shape[2], size)
    states = [None if s is None or z is None else State(s, z, z_abs)]
    for start in offsets[:-1]:
        chunk = _take(q, k, v, decay, mask, document, start, size)
        states.append(chunk.framed(_advance(chunk, chunk.framed(states[-1]), signed)))

    for start in reversed(offsets):
        chunk = _take(q, k, v, decay, mask, document, start, size)
        state, frame = chunk.framed(states.pop()), chunk.frame
        num, den, weights = _attend(chunk, state, signed)
        if g is None:
            gradient = torch.zeros_like(num)
        else:
            gradient = fold_groups(g[:, :, start : start + size].to(num.dtype), k.shape[1])
        g_num = (gradient / den.safe[..., None]).masked_fill_(den.empty[..., None], 0)
        # out = num / den, and the bound is a constant: no gradient to the denominator where it acts.
        g_den = ((g_num * num).sum(-1) / den.safe).neg_().masked_fill_(den.bounded, 0)
        if frame is not None and d_decay is not None and (ds is not None or dz is not None):
            # The state leaves the frame: it fades by half a chunk.
            ds, dz = (
                None if x is None else x * frame.state.view(*frame.state.shape, *[1] * (x.dim() - 3)) for x in (ds, dz)
            )
            d_decay -= frame.halfway(_dot(_advance(chunk, state, signed), ds, dz))

        d_weights = chunk.hide((g_num @ chunk.v.mT).add_(g_den[..., None]))
        dq_chunk, dk_chunk, dv_chunk = d_weights @ chunk.k, d_weights.mT @ chunk.q, weights.mT @ g_num
        if state is not None:
            dq_chunk += chunk.from_state(g_num @ state.s.mT + g_den[..., None] * state.z[:, :, None])
        if ds is not None:
            dk_chunk += chunk.to_state(chunk.v @ ds.mT)
            dv_chunk += chunk.to_state(chunk.k @ ds)
        if dz is not None:
            dk_chunk += chunk.to_state(dz[:, :, None].expand_as(dk_chunk))
        if frame is not None and d_decay is not None:
            # A query shrinks with its place in the chunk, a key grows.
            d_decay += frame.age(dk_chunk * chunk.k) - frame.age(dq_chunk * chunk.q)
            dq_chunk, dk_chunk = frame.queries(dq_chunk), dk_chunk * frame.key
        if mask is not None:
            hidden = ~mask[:, None, start : start + size, None]
            dk_chunk, dv_chunk = dk_chunk.masked_fill_(hidden, 0), dv_chunk.masked_fill_(hidden, 0)
        _put(dq, dq_chunk, start)
        _put(dk, dk_chunk, start)
        _put(dv, dv_chunk, start)

        if state is not None:
            seen = chunk.from_state(chunk.q)
            to_s, to_z = seen.mT @ g_num, (seen * g_den[..., None]).sum(-2)
            ds = to_s if ds is None else chunk.carried(ds) + to_s
            dz = to_z if dz is None else chunk.carried(dz) + to_z
            if frame is not None and d_decay is not None:
                d_decay -= frame.halfway(_dot(state, ds, dz))
                ds, dz = ds * frame.state[..., None], dz * frame.state
    return dq, dk, dv, None if s is None else ds, None if z is None else dz, d_decay


def _dot(state: State, ds: Tensor | None, dz: Tensor | None) -> Tensor:
    """How much each row of a state has to do with the loss: `[batch, key_heads, feature]`."""
    total = torch.zeros_like(state.z)
    if ds is not None:
        total = total + (state.s * ds).sum(-1)
    if dz is not None:
        total = total + state.z * dz
    return total


def _take(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    mask: Tensor | None,
    document: Tensor | None,
    start: int,
    size: int,
) -> _Chunk:
    """Cut the chunk that begins at `start`, with masked keys and values as zeros, in the frame of its middle."""
    dtype, heads = accumulator_dtype(q, k, v), k.shape[1]
    here = slice(start, start + size)
    q, k, v = fold_groups(q[:, :, here].to(dtype), heads), k[:, :, here].to(dtype), v[:, :, here].to(dtype)
    if mask is not None:
        hidden = ~mask[:, None, here, None]
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    frame = None
    if decay is not None:
        time = clock(None if mask is None else mask[:, here], k.shape[2], k)
        half = time[:, -1:] / 2
        offset = time - half
        frame = _Frame(offset, half, fade(decay, -offset), fade(decay, offset), fade(decay, half)[:, :, 0])
        q, k = frame.queries(q), k * frame.key
    if document is None:
        return _Chunk(q, k, v, None, None, None, frame)
    before = document[:, start - 1 : start] if start else torch.zeros_like(document[:, :1])
    document = document[:, here]
    same = (document[:, :, None] == document[:, None, :])[:, None, None]
    fresh = (document == before)[:, None].repeat(1, 1, q.shape[2] // k.shape[2])
    keep = (document == document[:, -1:])[:, None, :, None]
    return _Chunk(q, k, v, same, fresh, keep, frame)


def _attend(chunk: _Chunk, state: State | None, signed: bool) -> tuple[Tensor, Denominator, Tensor]:
    """Numerator, denominator and the weights within the chunk."""
    weights = chunk.hide(chunk.q @ chunk.k.mT)
    num, den = weights @ chunk.v, weights.sum(-1)
    total = chunk.hide(chunk.q.abs() @ chunk.k.abs().mT).sum(-1) if signed else None
    if state is not None:
        past_num, past_den, past_total = read(chunk.q, state)
        num, den = num + chunk.from_state(past_num), den + chunk.from_state(past_den)
        if total is not None and past_total is not None:
            total = total + chunk.from_state(past_total)
    return num, safe_denominator(den, total), weights


def _advance(chunk: _Chunk, state: State | None, signed: bool) -> State:
    """The state after the chunk."""
    k = chunk.to_state(chunk.k)
    new = State(k.mT @ chunk.v, k.sum(-2), k.abs().sum(-2) if signed else None)
    if state is None:
        return new
    z_abs = None if new.z_abs is None or state.z_abs is None else chunk.carried(state.z_abs) + new.z_abs
    return State(chunk.carried(state.s) + new.s, chunk.carried(state.z) + new.z, z_abs)


def _put(target: Tensor, rows: Tensor, start: int) -> None:
    """Write a chunk's rows, folded by groups, back to where they belong, in the target's dtype."""
    batch, heads, _, size = target.shape
    rows = rows.reshape(batch, heads, -1, size)
    target[:, :, start : start + rows.shape[2]] = rows
