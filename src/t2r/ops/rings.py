"""A ring buffer with the keys and values of a window and its sinks, for key heads with windows of one size.

The first `sinks` slots hold the first tokens of a sequence. Token n after them is in slot `sinks + (n - sinks) % size`,
where it replaces the token that leaves the window. Rows are independent: `seen [rows]` is the number of tokens that
each has read. Padding is not stored, so a ring needs no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from t2r.ops.common import Sums
from t2r.ops.stored import AS_THEY_ARE, EIGHT, read, stored
from t2r.ops.windows import Left, softmax_sums


class Ring(NamedTuple):
    """Buffers `[rows, heads, sinks + size, …]`. Functions that change them return new ones unless told otherwise."""

    held: tuple[Tensor, ...]
    """What is stored of keys and values (`t2r.ops.stored`)."""
    size: int
    sinks: int

    @property
    def nbits(self) -> int:
        return AS_THEY_ARE if len(self.held) == 2 else EIGHT

    def slot(self, n: Tensor) -> Tensor:
        """Return the slot of token n."""
        return torch.where(n < self.sinks, n, self.sinks + (n - self.sinks) % self.size)

    def tokens(self, seen: Tensor) -> Tensor:
        """Return which token is in each slot, `[rows, slots]`, after `seen [rows]` tokens. Negative: none yet."""
        slot, size = torch.arange(self.held[0].shape[2], device=seen.device), self.size
        turns = torch.div(seen[:, None] - 1 - slot, size, rounding_mode="floor")
        latest = torch.where(slot < self.sinks, slot, slot + turns * size)
        return torch.where(slot < seen[:, None], latest, -1)

    def step(
        self, q: Tensor, new: Sequence[Tensor], dtype: torch.dtype, seen: Tensor, mask: Tensor | None, how: How
    ) -> tuple[Ring, Sums, tuple[Tensor, ...], Tensor]:
        """Store one token, given as it is stored, and attend to the window with it. `dtype` is that of values.

        Returns also what was in its slot, as it was stored, and whether that has left the window."""
        at = self.slot(seen)[:, None, None, None]
        old = tuple(x.gather(2, at.expand(-1, x.shape[1], 1, x.shape[3])) for x in self.held)
        new = [x.to(before.dtype) for x, before in zip(new, old, strict=True)]
        if mask is not None:  # padding is not stored
            new = [torch.where(mask[:, None, :, None], x, before) for x, before in zip(new, old, strict=True)]
        held = tuple(write(x, at.expand_as(y), y, how.inplace) for x, y in zip(self.held, new, strict=True))
        count = seen + (1 if mask is None else mask[:, 0].long())
        filled = torch.arange(held[0].shape[2], device=seen.device) < count[:, None]
        keys, values = read(held, q.dtype)
        out, lse = softmax_sums(q, keys, values.to(dtype), filled[:, None, None], how.scaling, how.softcap)
        valid = (seen >= self.sinks + self.size)[:, None, None].expand(-1, held[0].shape[1], 1)
        return self._replace(held=held), Sums(out, torch.ones_like(lse), peak=lse), old, valid

    def attend(self, q: Tensor, seen: Tensor, how: How) -> Sums:
        """Attend with new queries `[rows, heads, time, dim]` to the tokens that are stored before them."""
        held = self.tokens(seen)[:, None]
        position = seen[:, None] + torch.arange(q.shape[2], device=q.device)
        near = position[:, :, None] - held < self.size
        allowed = (held >= 0) & (near | (held < self.sinks))
        out, lse = softmax_sums(q, *read(self.held, q.dtype), allowed[:, None], how.scaling, how.softcap)
        return Sums(out, torch.ones_like(lse), peak=lse)

    def leaving(self, k: Tensor, v: Tensor, seen: Tensor) -> Left:
        """Return what leaves the window at each of the new positions, whose keys and values are given, rounded."""
        time = k.shape[2]
        token = seen[:, None] + torch.arange(time, device=k.device) - self.size  # [rows, time]
        before = token < seen[:, None]
        slot, place = self.slot(token.clamp_min(0)), (token - seen[:, None]).clamp(0, max(0, time - 1))
        found = []
        old = read(tuple(at(x, slot) for x in self.held), k.dtype)
        for own, new in zip(old, (k, v), strict=True):
            found.append(torch.where(before[:, None, :, None], own.to(new.dtype), at(new, place)))
        return Left(found[0], found[1], (token >= self.sinks)[:, None].expand(-1, k.shape[1], -1))

    def extended(self, k: Tensor, v: Tensor, seen: Tensor, count: Tensor, how: How) -> Ring:
        """Store the first `count [rows]` of new tokens."""
        if not k.shape[2]:
            return self
        tokens = self.tokens(seen + count)
        new, place = tokens >= seen[:, None], (tokens - seen[:, None]).clamp(0, max(0, k.shape[2] - 1))
        made = []
        for own, x in zip(self.held, stored(k, v, self.nbits), strict=True):
            kept = torch.where(new[:, None, :, None], at(x, place).to(own.dtype), own)
            made.append(own.copy_(kept) if how.inplace else kept)
        return self._replace(held=tuple(made))


class How(NamedTuple):
    """How a ring attends, and whether its buffers are changed in place."""

    scaling: float
    softcap: float | None = None
    inplace: bool = False


def at(x: Tensor, index: Tensor) -> Tensor:
    """Return the tokens of x `[rows, heads, tokens, …]` at an index `[rows, time]`."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def write(x: Tensor, at: Tensor, y: Tensor, inplace: bool) -> Tensor:
    return x.scatter_(2, at, y) if inplace else x.scatter(2, at, y)
