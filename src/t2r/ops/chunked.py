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
from torch import Tensor, nn

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

CHUNK_SIZE = 128
"""Within a chunk the cost is quadratic, between chunks it is a k x d state: near 128 the two balance at the paper's
sizes. And seen from the middle of so many tokens, the fastest decay is a factor of exp(64) at either end, for which
float32 has room."""
CHUNKS_AT_ONCE = {"cpu": 1}
MANY_CHUNKS = 16
"""So many chunks are computed as one batch, and only their states one after the other. On a CPU one at a time stays in
its cache; an accelerator would rather have fewer and larger operations."""


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
    chunk_size: int = CHUNK_SIZE,
    chunks_at_once: int | None = None,
) -> tuple[Tensor, State]:
    """As `t2r.ops.linear_attention`. Non-causal attention needs no chunks: it is two matrix products."""
    if causal:
        count = CHUNKS_AT_ONCE.get(q.device.type, MANY_CHUNKS) if chunks_at_once is None else chunks_at_once
        if decay is not None:
            chunk_size, decay = min(chunk_size, CHUNK_SIZE), decay.to(accumulator_dtype(q, k, v))
        past_tensors = (None, None, None) if state is None else state
        out, *new = _Chunked.apply(q, k, v, *past_tensors, decay, mask, starts, (chunk_size, count), signed)
        return out, State(*new)
    past = State.zeros(k, v, signed) if state is None else state
    dtype = accumulator_dtype(q, k, v)
    if mask is not None:
        k, v = (x.masked_fill(~mask[:, None, :, None], 0) for x in (k, v))
    new_state = absorb(past, k.to(dtype), v.to(dtype))
    return cast_output(look(q.to(dtype), new_state), v.dtype), new_state


class _Stretch(NamedTuple):
    """Chunks that are computed at once, each as if it were a sequence of the batch."""

    start: int
    chunks: int
    size: int

    @property
    def here(self) -> slice:
        return slice(self.start, self.start + self.chunks * self.size)

    def cut(self, x: Tensor) -> Tensor:
        """`[batch, heads, time, ...]` or `[batch, time]` to the same with `[batch * chunks, ..., size, ...]`."""
        if x.dim() == 2:
            return x[:, self.here].reshape(-1, self.size)
        x = x[:, :, self.here]
        if self.chunks == 1:
            return x
        by_chunk: Tensor = x.unflatten(2, (self.chunks, self.size))
        return by_chunk.transpose(1, 2).flatten(0, 1)

    def put(self, target: Tensor, rows: Tensor) -> None:
        """Write rows of the chunks, folded by groups, back to where they belong, in the target's dtype."""
        batch, heads, _, size = target.shape
        rows = rows.reshape(batch, self.chunks, heads, self.size, size).transpose(1, 2)
        target[:, :, self.here] = rows.reshape(batch, heads, self.chunks * self.size, size)


def _stretches(time: int, size: int, count: int) -> list[_Stretch]:
    """All of the sequence: whole chunks, so many at once, and what is left of it."""
    whole = time // size
    found = [_Stretch(i * size, min(count, whole - i), size) for i in range(0, whole, count)]
    return found + ([_Stretch(whole * size, 1, time % size)] if time % size else [])


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
    """One chunk of each sequence, or several as more of a batch, in the accumulator's dtype, and who may see whom.

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

    def framed(self, state: State) -> State:
        """The state before the chunk as seen from its middle; or as seen there, from its end."""
        return state if self.frame is None else state.faded(self.frame.state)

    def split(self, chunks: int) -> list[_Chunk]:
        """What the state meets on its way, chunk by chunk."""
        if chunks == 1:
            return [self]
        frame, fresh = self.frame, self.fresh
        frames = [frame] * chunks if frame is None or len(frame.state) == 1 else _each(frame, chunks)
        carried = [fresh] * chunks if fresh is None else list(_by_chunk(fresh, chunks).unbind(1))
        return [self._replace(frame=f, fresh=c) for f, c in zip(frames, carried, strict=True)]


def _by_chunk(x: Tensor, chunks: int) -> Tensor:
    """`[batch * chunks, ...]` to `[batch, chunks, ...]`."""
    by_chunk: Tensor = x.unflatten(0, (-1, chunks))
    return by_chunk


def _each(frame: _Frame, chunks: int) -> list[_Frame]:
    parts = [_by_chunk(x, chunks).unbind(1) for x in frame]
    return [_Frame(*part) for part in zip(*parts, strict=True)]


def _stack(states: list[State]) -> State:
    """States before (or after) each chunk, as more of a batch."""
    if len(states) == 1:
        return states[0]
    return State(*(None if xs[0] is None else torch.stack(xs, 1).flatten(0, 1) for xs in zip(*states, strict=True)))  # type: ignore[arg-type]


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
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(q, k, v, s, z, z_abs, decay, mask, starts)
        ctx.size, ctx.signed = size, signed
        ctx.set_materialize_grads(False)
        state = None if s is None or z is None else State(s, z, z_abs)
        out = v.new_empty(*q.shape[:3], v.shape[-1])
        document = None if starts is None else starts.cumsum(1)
        for stretch in _stretches(k.shape[2], *size):
            chunk = _take(q, k, v, decay, mask, document, stretch)
            before, state = _scan(chunk, state, stretch.chunks, signed)
            num, den, _ = _attend(chunk, before, signed)
            num = num.div_(den.safe[..., None]).masked_fill_(den.empty[..., None], 0)
            stretch.put(out, cast_output(num, out.dtype))
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
    size: tuple[int, int],
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

    stretches = _stretches(k.shape[2], *size)
    states = [None if s is None or z is None else State(s, z, z_abs)]
    for stretch in stretches[:-1]:
        chunk = _take(q, k, v, decay, mask, document, stretch)
        states.append(_scan(chunk, states[-1], stretch.chunks, signed)[1])
    gradient = None if ds is None and dz is None else _gradient(k, v, ds, dz)

    for stretch in reversed(stretches):
        chunk = _take(q, k, v, decay, mask, document, stretch)
        before, _ = _scan(chunk, states.pop(), stretch.chunks, signed, onward=False)
        frame = chunk.frame
        num, den, weights = _attend(chunk, before, signed)
        g_out = torch.zeros_like(num) if g is None else fold_groups(stretch.cut(g).to(num.dtype), k.shape[1])
        g_num = (g_out / den.safe[..., None]).masked_fill_(den.empty[..., None], 0)
        # out = num / den, and the bound is a constant: no gradient to the denominator where it acts.
        g_den = ((g_num * num).sum(-1) / den.safe).neg_().masked_fill_(den.bounded, 0)

        read_by = None
        if before is not None:
            seen = chunk.from_state(chunk.q)
            read_by = State(seen.mT @ g_num, (seen * g_den[..., None]).sum(-2))
        after, gradient = _scan_back(chunk, read_by, gradient, stretch.chunks)

        d_weights = chunk.hide((g_num @ chunk.v.mT).add_(g_den[..., None]))
        dq_chunk, dk_chunk, dv_chunk = d_weights @ chunk.k, d_weights.mT @ chunk.q, weights.mT @ g_num
        if before is not None:
            dq_chunk += chunk.from_state(g_num @ before.s.mT + g_den[..., None] * before.z[:, :, None])
        if after is not None:
            dk_chunk += chunk.to_state(chunk.v @ after.s.mT + after.z[:, :, None])
            dv_chunk += chunk.to_state(chunk.k @ after.s)
        if frame is not None and d_decay is not None:
            # A query shrinks with its place in the chunk, a key grows; the state fades by half a chunk on its way in
            # and by half a chunk on its way out.
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
        stretch.put(dv, dv_chunk)
    if s is None or gradient is None:
        return dq, dk, dv, None, None, d_decay
    return dq, dk, dv, gradient.s, gradient.z, d_decay


def _gradient(k: Tensor, v: Tensor, ds: Tensor | None, dz: Tensor | None) -> State:
    """The gradient of a state has the shape of one; what is not asked for is zero."""
    zeros = State.zeros(k, v)
    return State(zeros.s if ds is None else ds, zeros.z if dz is None else dz)


def _scan(
    chunk: _Chunk, state: State | None, chunks: int, signed: bool, onward: bool = True
) -> tuple[State | None, State | None]:
    """The states before each chunk, as seen from its middle, and the one after the last, if it goes onward."""
    if chunks == 1:
        before = None if state is None else chunk.framed(state)
        return before, chunk.framed(_advance(chunk, before, signed)) if onward else None
    own = _advance(chunk, None, signed)
    parts = [State(*part) for part in zip(*(_unbound(x, chunks) for x in own), strict=True)]
    state = parts[0].map(torch.zeros_like) if state is None else state
    found = []
    for one, part in zip(chunk.split(chunks), parts, strict=True):
        found.append(one.framed(state))
        state = one.framed(_add(one, found[-1], part))
    return _stack(found), state


def _unbound(x: Tensor | None, chunks: int) -> tuple[Tensor | None, ...]:
    return (None,) * chunks if x is None else _by_chunk(x, chunks).unbind(1)


def _scan_back(
    chunk: _Chunk, read_by: State | None, gradient: State | None, chunks: int
) -> tuple[State | None, State | None]:
    """From what each chunk has to do with the state before it, and the gradient of the state after the last: those
    of the states at the end of each chunk, as seen from its middle, and of the state before the first."""
    if chunks == 1:
        after = None if gradient is None else chunk.framed(gradient)
        if read_by is None:
            return after, None
        carried = read_by if after is None else _sum(after.map(chunk.carried), read_by)
        return after, chunk.framed(carried)
    assert read_by is not None
    parts = [State(*part) for part in zip(*(_unbound(x, chunks) for x in read_by), strict=True)]
    gradient = parts[0].map(torch.zeros_like) if gradient is None else gradient
    found = []
    for one, part in zip(reversed(chunk.split(chunks)), reversed(parts), strict=True):
        found.append(one.framed(gradient))
        gradient = one.framed(_sum(found[-1].map(one.carried), part))
    return _stack(found[::-1]), gradient


def _sum(a: State, b: State) -> State:
    return State(a.s + b.s, a.z + b.z)


def _dot(state: State, gradient: State) -> Tensor:
    """How much each row of a state has to do with the loss: `[batch, key_heads, feature]`."""
    return (state.s * gradient.s).sum(-1) + state.z * gradient.z


def _take(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    mask: Tensor | None,
    document: Tensor | None,
    stretch: _Stretch,
) -> _Chunk:
    """Cut chunks, with masked keys and values as zeros, in the frame of their middle."""
    dtype, heads = accumulator_dtype(q, k, v), k.shape[1]
    q, k, v = (stretch.cut(x).to(dtype) for x in (q, k, v))
    q, mask = fold_groups(q, heads), None if mask is None else stretch.cut(mask)
    if mask is not None:
        hidden = ~mask[:, None, :, None]
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    frame = None
    if decay is not None:
        time = clock(mask, k.shape[2], k)
        half = time[:, -1:] / 2
        offset = time - half
        frame = _Frame(offset, half, fade(decay, -offset), fade(decay, offset), fade(decay, half)[:, :, 0])
        q, k = frame.queries(q), k * frame.key
    if document is None:
        return _Chunk(q, k, v, None, None, None, frame)
    earlier = nn.functional.pad(document, (1, 0))[:, :-1]  # the document before each position; before all, the state's
    document, before = stretch.cut(document), stretch.cut(earlier)[:, :1]
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
    return _add(chunk, state, State(k.mT @ chunk.v, k.sum(-2), k.abs().sum(-2) if signed else None))


def _add(chunk: _Chunk, state: State | None, own: State) -> State:
    """A state, as far as it is still of the same document, and what the chunk itself adds."""
    if state is None:
        return own
    z_abs = None if own.z_abs is None or state.z_abs is None else chunk.carried(state.z_abs) + own.z_abs
    return State(chunk.carried(state.s) + own.s, chunk.carried(state.z) + own.z, z_abs)
