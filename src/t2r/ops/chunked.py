"""Chunked linear attention in plain PyTorch. It takes linear time and runs on any device.

The queries of a chunk attend to the keys of the chunk through a small matrix, and to everything before the chunk
through the state. The backward pass recomputes intermediate results from the inputs and one state per chunk, so that
no T x T or T x k x d tensor is allocated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from t2r.ops.chunks import Chunk, Stretch, Totals, by_chunk, stack, stretches, take
from t2r.ops.common import (
    State,
    Sums,
    accumulator_dtype,
    cast_output,
    fold_groups,
    normalize,
    safe_denominator,
    transposed,
)
from t2r.ops.reference import absorb, look

CHUNK_SIZE = 64
"""Tokens per chunk. The cost is quadratic within a chunk, and each chunk updates a k x d state. With the fastest decay,
scale factors reach exp(32) at the ends of a chunk, which float32 can represent."""
MANY_CHUNKS = 16
"""The number of chunks computed as one batch, except for their states, which are computed in sequence."""
IN_CACHE = 1 << 22
"""The size of the tensors of chunks that a CPU computes as one batch. Beyond its cache, one at a time is as fast.
Accelerators prefer fewer and larger operations."""


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
    normalized: bool = True,
    chunk_size: int = CHUNK_SIZE,
    chunks_at_once: int | None = None,
) -> tuple[Tensor | Sums, State]:
    """Compute `t2r.ops.linear_attention`. Non-causal attention needs no chunks: it is two matrix products."""
    if causal:
        if decay is not None:
            chunk_size, decay = min(chunk_size, CHUNK_SIZE), decay.to(accumulator_dtype(q, k, v))
        count = as_one_batch(q, v, chunk_size) if chunks_at_once is None else chunks_at_once
        past_tensors = (None, None, None) if state is None else state
        how = (chunk_size, count), signed, normalized
        out, den, total, *new = _Chunked.apply(q, k, v, *past_tensors, decay, mask, starts, *how)
        return out if normalized else Sums(out, den, total), State(*new)
    return two_products(q, k, v, state, mask, signed=signed, normalized=normalized)


def as_one_batch(q: Tensor, v: Tensor, chunk_size: int) -> int:
    """Return the number of chunks to compute as one batch."""
    if q.device.type != "cpu":
        return MANY_CHUNKS
    rows, size = q.shape[0] * q.shape[1], min(chunk_size, max(1, q.shape[2]))
    return max(1, min(MANY_CHUNKS, IN_CACHE // max(1, rows * size * (size + 2 * q.shape[3] + v.shape[3]))))


def two_products(
    q: Tensor, k: Tensor, v: Tensor, state: State | None, mask: Tensor | None, *, signed: bool, normalized: bool
) -> tuple[Tensor | Sums, State]:
    """Compute non-causal attention: add all keys to the state, then read it with all queries."""
    past = State.zeros(k, v, signed) if state is None else state
    dtype = accumulator_dtype(q, k, v)
    if mask is not None:
        k, v = (x.masked_fill(~mask[:, None, :, None], 0) for x in (k, v))
    new_state = absorb(past, k.to(dtype), v.to(dtype))
    sums = look(q.to(dtype), new_state)
    return normalize(sums, v.dtype) if normalized else sums, new_state


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
        size: tuple[int, int],
        signed: bool,
        normalized: bool,
    ) -> tuple[Tensor | None, ...]:
        """Return the output (or numerator, denominator and magnitude) and the final state."""
        ctx.save_for_backward(q, k, v, s, z, z_abs, decay, mask, starts)
        ctx.size, ctx.signed, ctx.normalized = size, signed, normalized
        ctx.set_materialize_grads(False)
        state = None if s is None or z is None else Totals.of(State(s, z, z_abs))
        dtype = accumulator_dtype(q, k, v)
        out = v.new_empty(*q.shape[:3], v.shape[-1], dtype=v.dtype if normalized else dtype)
        den_out = total_out = None
        if not normalized:
            den_out = out.new_empty(q.shape[:3])
            total_out = torch.empty_like(den_out) if signed else None
        document = None if starts is None else starts.cumsum(1)
        for stretch in stretches(k.shape[2], *size):
            chunk = take(q, k, v, decay, mask, document, stretch)
            before, state = _scan(chunk, state, stretch.chunks, signed)
            (num, den, total, _), _ = _attend(chunk, before, signed)
            if den_out is None:
                bounded = safe_denominator(den, total)
                num = num.div_(bounded.safe[..., None]).masked_fill_(bounded.empty[..., None], 0)
                stretch.put(out, cast_output(num, out.dtype))
            else:
                stretch.put(out, num)
                stretch.put(den_out[..., None], den[..., None])
                if total_out is not None and total is not None:
                    stretch.put(total_out[..., None], total[..., None])
        assert state is not None
        new = state.state()
        ctx.mark_non_differentiable(*(x for x in (total_out, new.z_abs) if x is not None))
        return out, den_out, total_out, *new

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # accessed once: gradient checkpointing recomputes the tensors on access
        g, g_den, _, ds, dz, _ = grads
        # If backward is called under autocast, float32 matrix products would run in lower precision.
        with torch.autocast(saved[0].device.type, enabled=False):
            dq, dk, dv, ds, dz, d_decay = _backward(saved, ctx.size, ctx.signed, ctx.normalized, g, g_den, ds, dz)
            return dq, dk, dv, ds, dz, None, d_decay, *(None,) * 5


def _backward(
    saved: tuple[Tensor | None, ...],
    size: tuple[int, int],
    signed: bool,
    normalized: bool,
    g: Tensor | None,
    g_denominator: Tensor | None,
    ds: Tensor | None,
    dz: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k, v, s, z and decay. Gradients of unused states are None and are not computed."""
    q, k, v, s, z, z_abs, decay, mask, starts = saved
    assert q is not None and k is not None and v is not None
    document = None if starts is None else starts.cumsum(1)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    d_decay = None if decay is None else torch.zeros_like(decay)

    all_of_it = stretches(k.shape[2], *size)
    states = [None if s is None or z is None else Totals.of(State(s, z, z_abs))]
    for stretch in all_of_it[:-1]:
        chunk = take(q, k, v, decay, mask, document, stretch)
        states.append(_scan(chunk, states[-1], stretch.chunks, signed)[1])
    gradient = None if ds is None and dz is None else _gradient(k, v, ds, dz)

    for stretch in reversed(all_of_it):
        chunk = take(q, k, v, decay, mask, document, stretch)
        before, _ = _scan(chunk, states.pop(), stretch.chunks, signed, onward=False)
        frame = chunk.frame
        sums, weights = _attend(chunk, before, signed)
        g_out = torch.zeros_like(sums.numerator) if g is None else _folded(g, stretch, k)
        if normalized:
            g_num, g_den = _through_division(g_out, sums)
        elif g_denominator is None:
            g_num, g_den = g_out, torch.zeros_like(sums.denominator)
        else:
            g_num, g_den = g_out, _folded(g_denominator[..., None], stretch, k)[..., 0]
        g_sums = torch.cat([g_num, g_den[..., None]], -1)

        read_by = None if before is None else Totals(chunk.from_state(chunk.q).mT @ g_sums)
        after, gradient = _scan_back(chunk, read_by, gradient, stretch.chunks)

        d_weights = chunk.hide(g_sums @ transposed(chunk.v))
        dq_chunk, dk_chunk, dv_chunk = d_weights @ chunk.k, d_weights.mT @ chunk.q, weights.mT @ g_sums
        if before is not None:
            dq_chunk += chunk.from_state(g_sums @ transposed(before.s))
        if after is not None:
            dk_chunk += chunk.to_state(chunk.v @ transposed(after.s))
            dv_chunk += chunk.to_state(chunk.k @ after.s)
        if frame is not None and d_decay is not None:
            # Queries shrink and keys grow with their offset. The state decays by half a chunk on entry and on exit.
            d_decay += frame.age(dk_chunk * chunk.k) - frame.age(dq_chunk * chunk.q)
            if after is not None:
                d_decay -= frame.halfway(_dot(_advance(chunk, before, signed), after))
                if before is not None:
                    d_decay -= frame.halfway(_dot(before, after.map(chunk.carried)))
            if before is not None and read_by is not None:
                d_decay -= frame.halfway(_dot(before, read_by))
            dq_chunk, dk_chunk = frame.queries(dq_chunk), dk_chunk * frame.key
        if mask is not None:
            hidden = ~stretch.cut(mask)[:, None, :, None]
            dk_chunk, dv_chunk = dk_chunk.masked_fill_(hidden, 0), dv_chunk.masked_fill_(hidden, 0)
        stretch.put(dq, dq_chunk)
        stretch.put(dk, dk_chunk)
        stretch.put(dv, dv_chunk[..., :-1])
    if s is None or gradient is None:
        return dq, dk, dv, None, None, d_decay
    ds, dz, _ = gradient.state()
    return dq, dk, dv, ds, dz, d_decay


def _folded(g: Tensor, stretch: Stretch, k: Tensor) -> Tensor:
    """Cut the gradient into chunks and fold it by groups, as the queries are."""
    return fold_groups(stretch.cut(g).to(accumulator_dtype(k, g)), k.shape[1])


def _through_division(g: Tensor, sums: Sums) -> tuple[Tensor, Tensor]:
    """Compute the gradients of numerator and denominator. Bounded denominators are constant and have zero gradient."""
    safe, bounded, empty = safe_denominator(sums.denominator, sums.magnitude)
    g_num = (g / safe[..., None]).masked_fill_(empty[..., None], 0)
    return g_num, ((g_num * sums.numerator).sum(-1) / safe).neg_().masked_fill_(bounded, 0)


def _gradient(k: Tensor, v: Tensor, ds: Tensor | None, dz: Tensor | None) -> Totals:
    """Return the gradient of a state, with zeros for missing parts."""
    zeros = State.zeros(k, v)
    return Totals.of(State(zeros.s if ds is None else ds, zeros.z if dz is None else dz))


def _scan(
    chunk: Chunk, state: Totals | None, chunks: int, signed: bool, onward: bool = True
) -> tuple[Totals | None, Totals | None]:
    """Compute the state before each chunk, decayed to its middle, and, with `onward`, the state after the last one."""
    if chunks == 1:
        before = None if state is None else chunk.framed(state)
        return before, chunk.framed(_advance(chunk, before, signed)) if onward else None
    parts = _each(_advance(chunk, None, signed), chunks)
    state = parts[0].map(torch.zeros_like) if state is None else state
    found = []
    for one, part in zip(chunk.split(chunks), parts, strict=True):
        found.append(one.framed(state))
        state = one.framed(_add(one, found[-1], part))
    return stack(found), state


def _each(totals: Totals, chunks: int) -> list[Totals]:
    """Split the states of several chunks."""
    parts = ((None,) * chunks if x is None else by_chunk(x, chunks).unbind(1) for x in totals)
    return [Totals(*part) for part in zip(*parts, strict=True)]


def _scan_back(
    chunk: Chunk, read_by: Totals | None, gradient: Totals | None, chunks: int
) -> tuple[Totals | None, Totals | None]:
    """Propagate state gradients backward through the chunks.

    `read_by` holds the gradients that the queries of each chunk give to the state before it, and `gradient` is that of
    the state after the last chunk. Returns the gradients of the states after each chunk, decayed to its middle, and
    the gradient of the state before the first chunk."""
    if chunks == 1:
        after = None if gradient is None else chunk.framed(gradient)
        if read_by is None:
            return after, None
        carried = read_by if after is None else Totals(chunk.carried(after.s) + read_by.s)
        return after, chunk.framed(carried)
    assert read_by is not None
    parts = _each(read_by, chunks)
    gradient = parts[0].map(torch.zeros_like) if gradient is None else gradient
    found = []
    for one, part in zip(reversed(chunk.split(chunks)), reversed(parts), strict=True):
        found.append(one.framed(gradient))
        gradient = one.framed(Totals(one.carried(found[-1].s) + part.s))
    return stack(found[::-1]), gradient


def _dot(state: Totals, gradient: Totals) -> Tensor:
    """Sum the product of a state and its gradient over each row: `[batch, key_heads, feature]`."""
    return (state.s * gradient.s).sum(-1)


def _attend(chunk: Chunk, state: Totals | None, signed: bool) -> tuple[Sums, Tensor]:
    """Compute the sums of the queries of a chunk, and the attention weights within the chunk."""
    weights = chunk.hide(chunk.q @ transposed(chunk.k))
    sums = weights @ chunk.v
    total = chunk.hide(chunk.q.abs() @ transposed(chunk.k.abs())).sum(-1) if signed else None
    if state is not None:
        sums += chunk.from_state(chunk.q @ state.s)
        if total is not None and state.z_abs is not None:
            total += chunk.from_state((chunk.q.abs() @ state.z_abs[..., None])[..., 0])
    return Sums(sums[..., :-1], sums[..., -1], total), weights


def _advance(chunk: Chunk, state: Totals | None, signed: bool) -> Totals:
    """Compute the state after the chunk."""
    k = chunk.to_state(chunk.k)
    return _add(chunk, state, Totals(k.mT @ chunk.v, k.abs().sum(-2) if signed else None))


def _add(chunk: Chunk, state: Totals | None, own: Totals) -> Totals:
    """Add the contribution of a chunk to the state, which is reset where a document starts in the chunk."""
    if state is None:
        return own
    z_abs = None if own.z_abs is None or state.z_abs is None else chunk.carried(state.z_abs) + own.z_abs
    return Totals(chunk.carried(state.s) + own.s, z_abs)
