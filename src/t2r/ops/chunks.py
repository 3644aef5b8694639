"""What a chunk is: a piece of the sequence with who may see whom in it, in the frame in which nothing fades.

Features that fade are scaled by powers of their decay, as seen from the middle of the chunk: a key grows with its
position and a query shrinks, so that their product has faded by the distance between them. With queries, keys and
state in that frame, a chunk is computed as if nothing faded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from t2r.ops.common import State, accumulator_dtype, clock, fade, fold_groups


class Stretch(NamedTuple):
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
        cut: Tensor = x.unflatten(2, (self.chunks, self.size))
        return cut.transpose(1, 2).flatten(0, 1)

    def put(self, target: Tensor, rows: Tensor) -> None:
        """Write rows of the chunks, folded by groups, back to where they belong, in the target's dtype."""
        batch, heads, _, size = target.shape
        rows = rows.reshape(batch, self.chunks, heads, self.size, size).transpose(1, 2)
        target[:, :, self.here] = rows.reshape(batch, heads, self.chunks * self.size, size)


def stretches(time: int, size: int, count: int) -> list[Stretch]:
    """All of the sequence: whole chunks, so many at once, and what is left of it."""
    whole = time // size
    found = [Stretch(i * size, min(count, whole - i), size) for i in range(0, whole, count)]
    return found + ([Stretch(whole * size, 1, time % size)] if time % size else [])


class Frame(NamedTuple):
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


class Chunk(NamedTuple):
    """One chunk of each sequence, or several as more of a batch, in the accumulator's dtype, and who may see whom.

    Without packed documents the next to last three are None: everything sees the state and enters it. Without a decay
    there is no frame."""

    q: Tensor  # [batch, key_heads, group * time, feature]
    k: Tensor  # [batch, key_heads, time, feature], masked keys are zero
    v: Tensor
    same: Tensor | None  # [batch, 1, 1, time, time]: query and key are of one document
    fresh: Tensor | None  # [batch, 1, group * time]: no document has started since the chunk before
    keep: Tensor | None  # [batch, 1, time, 1]: still the document with which the chunk ends
    frame: Frame | None

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

    def split(self, chunks: int) -> list[Chunk]:
        """What the state meets on its way, chunk by chunk."""
        if chunks == 1:
            return [self]
        frame, fresh = self.frame, self.fresh
        frames = [frame] * chunks if frame is None or len(frame.state) == 1 else _each(frame, chunks)
        carried = [fresh] * chunks if fresh is None else list(by_chunk(fresh, chunks).unbind(1))
        return [self._replace(frame=f, fresh=c) for f, c in zip(frames, carried, strict=True)]


def by_chunk(x: Tensor, chunks: int) -> Tensor:
    """`[batch * chunks, ...]` to `[batch, chunks, ...]`."""
    parts: Tensor = x.unflatten(0, (-1, chunks))
    return parts


def _each(frame: Frame, chunks: int) -> list[Frame]:
    parts = [by_chunk(x, chunks).unbind(1) for x in frame]
    return [Frame(*part) for part in zip(*parts, strict=True)]


def stack(states: list[State]) -> State:
    """States before (or after) each chunk, as more of a batch."""
    if len(states) == 1:
        return states[0]
    return State(*(None if xs[0] is None else torch.stack(xs, 1).flatten(0, 1) for xs in zip(*states, strict=True)))  # type: ignore[arg-type]


def take(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    mask: Tensor | None,
    document: Tensor | None,
    stretch: Stretch,
) -> Chunk:
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
        frame = Frame(offset, half, fade(decay, -offset), fade(decay, offset), fade(decay, half)[:, :, 0])
        q, k = frame.queries(q), k * frame.key
    if document is None:
        return Chunk(q, k, v, None, None, None, frame)
    earlier = nn.functional.pad(document, (1, 0))[:, :-1]  # the document before each position; before all, the state's
    document, before = stretch.cut(document), stretch.cut(earlier)[:, :1]
    same = (document[:, :, None] == document[:, None, :])[:, None, None]
    fresh = (document == before)[:, None].repeat(1, 1, q.shape[2] // k.shape[2])
    keep = (document == document[:, -1:])[:, None, :, None]
    return Chunk(q, k, v, same, fresh, keep, frame)
