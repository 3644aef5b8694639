"""Chunks of a sequence, their masks, and the rescaling that removes decay from them.

With decay, queries and keys are scaled by powers of the decay relative to the middle of the chunk. Keys grow and
queries shrink with their position, so that their product is decayed by the distance between them. After queries, keys
and state are scaled this way, a chunk is computed as if there were no decay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from t2r.ops.common import State, accumulator_dtype, clock, fade, fold_groups


class Totals(NamedTuple):
    """A state whose normalizer is a further column, because every value has a 1 at its end: one matrix product then
    computes numerator and denominator."""

    s: Tensor  # [batch, key_heads, feature, value + 1]
    z_abs: Tensor | None = None

    @classmethod
    def of(cls, state: State) -> Totals:
        return cls(torch.cat([state.s, state.z[..., None]], -1), state.z_abs)

    def state(self) -> State:
        return State(self.s[..., :-1].contiguous(), self.s[..., -1].contiguous(), self.z_abs)

    def map(self, function: Callable[[Tensor], Tensor]) -> Totals:
        """Apply a function to each tensor."""
        return Totals(function(self.s), None if self.z_abs is None else function(self.z_abs))

    def faded(self, left: Tensor) -> Totals:
        """Multiply each row by the factor `left [batch or 1, key_heads, feature]`."""
        return Totals(self.s * left[..., None], None if self.z_abs is None else self.z_abs * left.detach())


class Stretch(NamedTuple):
    """Consecutive chunks that are computed at once, as additional sequences of the batch."""

    start: int
    chunks: int
    size: int

    @property
    def here(self) -> slice:
        return slice(self.start, self.start + self.chunks * self.size)

    def cut(self, x: Tensor) -> Tensor:
        """Cut `[batch, heads, time, ...]` or `[batch, time]` into `[batch * chunks, ..., size, ...]`."""
        if x.dim() == 2:
            return x[:, self.here].reshape(-1, self.size)
        x = x[:, :, self.here]
        if self.chunks == 1:
            return x
        cut: Tensor = x.unflatten(2, (self.chunks, self.size))
        return cut.transpose(1, 2).flatten(0, 1)

    def put(self, target: Tensor, rows: Tensor) -> None:
        """Write rows of the chunks, folded by groups, to their positions in `target`, in its dtype."""
        batch, heads, _, size = target.shape
        rows = rows.reshape(batch, self.chunks, heads, self.size, size).transpose(1, 2)
        target[:, :, self.here] = rows.reshape(batch, heads, self.chunks * self.size, size)


def stretches(time: int, size: int, count: int) -> list[Stretch]:
    """Split a sequence into stretches of `count` full chunks, and a last, shorter chunk for the remainder."""
    whole = time // size
    found = [Stretch(i * size, min(count, whole - i), size) for i in range(0, whole, count)]
    return found + ([Stretch(whole * size, 1, time % size)] if time % size else [])


class Frame(NamedTuple):
    """Offsets of positions from the middle of a chunk, in unmasked tokens, and the resulting scale factors."""

    offset: Tensor  # [batch or 1, time]
    half: Tensor  # [batch or 1, 1]: half the length of the chunk
    key: Tensor  # [batch or 1, key_heads, time, feature]: factor of the keys
    query: Tensor  # factor of the queries: the inverse
    state: Tensor  # [batch or 1, key_heads, feature]: factor of the state, applied on entry and on exit

    def queries(self, x: Tensor) -> Tensor:
        """Scale queries folded by groups, or their gradient."""
        by_group: Tensor = x.unflatten(2, (-1, self.query.shape[2]))
        return (by_group * self.query[:, :, None]).flatten(2, 3)

    def age(self, x: Tensor) -> Tensor:
        """Sum `x [batch, key_heads, group * time, feature]` over positions, weighted by their offset."""
        offsets = self.offset.repeat(1, x.shape[2] // self.offset.shape[1])
        return (offsets[:, None, None] @ x)[:, :, 0].sum(0)

    def halfway(self, x: Tensor) -> Tensor:
        """Sum `x [batch, key_heads, feature]` over the batch, weighted by half the length."""
        return (x * self.half[:, :, None]).sum(0)


class Chunk(NamedTuple):
    """One chunk of each sequence, or several as additional sequences, in the accumulator dtype, with its masks.

    Without packed documents, `same`, `fresh` and `keep` are None. Without decay, `frame` is None."""

    q: Tensor  # [batch, key_heads, group * time, feature]
    k: Tensor  # [batch, key_heads, time, feature], masked keys are zero
    v: Tensor  # [batch, key_heads, time, value + 1]: the last column is 1, or 0 if masked
    same: Tensor | None  # [batch, 1, 1, time, time]: query and key belong to the same document
    fresh: Tensor | None  # [batch, 1, group * time]: the query belongs to the document of the previous state
    keep: Tensor | None  # [batch, 1, time, 1]: the key belongs to the last document of the chunk
    frame: Frame | None

    def hide(self, weights: Tensor) -> Tensor:
        """Set masked weights to zero in place: later keys (columns) and keys of other documents."""
        time = self.k.shape[2]
        by_group = weights.view(*weights.shape[:2], -1, time, time)
        by_group.tril_()
        if self.same is not None:
            by_group.masked_fill_(~self.same, 0)
        return weights

    def from_state(self, x: Tensor) -> Tensor:
        """Zero the rows of queries whose document differs from that of the state before the chunk."""
        return x if self.fresh is None else x * (self.fresh if x.dim() == 3 else self.fresh[..., None])

    def to_state(self, x: Tensor) -> Tensor:
        """Zero the rows of keys that the state after the chunk does not contain."""
        return x if self.keep is None else x * self.keep

    def carried(self, x: Tensor) -> Tensor:
        """Zero the state before the chunk, or the gradient of the state after it, where a document starts in it."""
        if self.fresh is None:
            return x
        carry = self.fresh[:, :, -1]
        return x * carry.view(-1, *[1] * (x.dim() - 1))

    def framed(self, state: Totals) -> Totals:
        """Decay a state by half a chunk: from its start to its middle, or from its middle to its end."""
        return state if self.frame is None else state.faded(self.frame.state)

    def split(self, chunks: int) -> list[Chunk]:
        """Split into single chunks, with the `frame` and `fresh` that the scan over states needs."""
        if chunks == 1:
            return [self]
        frame, fresh = self.frame, self.fresh
        frames = [frame] * chunks if frame is None or len(frame.state) == 1 else _each(frame, chunks)
        carried = [fresh] * chunks if fresh is None else list(by_chunk(fresh, chunks).unbind(1))
        return [self._replace(frame=f, fresh=c) for f, c in zip(frames, carried, strict=True)]


def by_chunk(x: Tensor, chunks: int) -> Tensor:
    """Reshape `[batch * chunks, ...]` to `[batch, chunks, ...]`."""
    parts: Tensor = x.unflatten(0, (-1, chunks))
    return parts


def _each(frame: Frame, chunks: int) -> list[Frame]:
    parts = [by_chunk(x, chunks).unbind(1) for x in frame]
    return [Frame(*part) for part in zip(*parts, strict=True)]


def stack(states: list[Totals]) -> Totals:
    """Stack the states of several chunks along the batch dimension."""
    if len(states) == 1:
        return states[0]
    return Totals(*(None if xs[0] is None else torch.stack(xs, 1).flatten(0, 1) for xs in zip(*states, strict=True)))  # type: ignore[arg-type]


def take(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    mask: Tensor | None,
    document: Tensor | None,
    stretch: Stretch,
) -> Chunk:
    """Cut out the chunks of a stretch. Append a 1 to values, set masked keys and values to 0, and scale for decay."""
    dtype, heads = accumulator_dtype(q, k, v), k.shape[1]
    # Contiguous, because every product would copy a transposed factor again.
    q, k = (stretch.cut(x).to(dtype).contiguous() for x in (q, k))
    v = nn.functional.pad(stretch.cut(v).to(dtype), (0, 1), value=1.0)
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
    earlier = nn.functional.pad(document, (1, 0))[:, :-1]  # the previous position's document; 0 is the initial state's
    document, before = stretch.cut(document), stretch.cut(earlier)[:, :1]
    same = (document[:, :, None] == document[:, None, :])[:, None, None]
    fresh = (document == before)[:, None].repeat(1, 1, q.shape[2] // k.shape[2])
    keep = (document == document[:, -1:])[:, None, :, None]
    return Chunk(q, k, v, same, fresh, keep, frame)
