"""What every backend shares: the state, its precision, and the one safe denominator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

DENOMINATOR_FLOOR = 1e-6
"""Non-negative features: the denominator is clamped from below by this, in float32 or better."""

SIGNED_FLOOR = 1e-2
"""Signed features: its magnitude is bounded from below by this share of the sum of absolute weights,
so that no output is larger than `max|v| / SIGNED_FLOOR`."""


FASTEST_DECAY = 1.0
"""The highest rate of forgetting: a row of the state is then e times smaller after every token. It bounds the powers
that appear when a stretch of tokens is computed at once."""


class State(NamedTuple):
    """The memory of linear attention, per key head: all that the past is to the future.

    `s` is the sum of outer products of key features and values, `[batch, key_heads, feature, value]`;
    `z` the sum of key features, `[batch, key_heads, feature]`; `z_abs` the sum of their magnitudes, kept
    only for signed features, whose denominator needs a scale. Always float32 or float64.
    """

    s: Tensor
    z: Tensor
    z_abs: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> State:
        """The same function of each tensor."""
        return State(function(self.s), function(self.z), None if self.z_abs is None else function(self.z_abs))

    def faded(self, left: Tensor) -> State:
        """The same with each row multiplied by what is left of it, `[batch or 1, key_heads, feature]`."""
        z_abs = None if self.z_abs is None else self.z_abs * left.detach()
        return State(self.s * left[..., None], self.z * left, z_abs)

    @classmethod
    def zeros(cls, k: Tensor, v: Tensor, signed: bool = False) -> State:
        """The empty state for keys and values of these shapes."""
        batch, heads, _, feature = k.shape
        dtype = accumulator_dtype(k, v)
        z = torch.zeros(batch, heads, feature, dtype=dtype, device=k.device)
        s = torch.zeros(batch, heads, feature, v.shape[-1], dtype=dtype, device=k.device)
        return cls(s, z, torch.zeros_like(z) if signed else None)


class Sums(NamedTuple):
    """Attention before its division: what another term with the same normalizer can be added to.

    Always in the accumulator's dtype (float32, or float64 for float64 inputs).
    """

    numerator: Tensor  # [batch, heads, time, value]
    denominator: Tensor  # [batch, heads, time]
    magnitude: Tensor | None = None
    """`[batch, heads, time]`: the sum of absolute weights, for signed features only. It has no gradient."""


def accumulator_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if anything is, float32 otherwise: sums over a whole text do not fit half precision."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


@dataclass
class BoundCount:
    """How many queries were read, and for how many of them the bound on the denominator acted."""

    queries: int = 0
    bounded: int = 0


_counts: list[BoundCount] = []


@contextmanager
def count_bounds() -> Iterator[BoundCount]:
    """Count, for every read inside the `with` block, how often the denominator's bound acts."""
    count = BoundCount()
    _counts.append(count)
    try:
        yield count
    finally:
        _counts.remove(count)


class Denominator(NamedTuple):
    """A denominator that is safe to divide by, where it is not the true one, and where nothing was seen."""

    safe: Tensor
    bounded: Tensor
    empty: Tensor


def safe_denominator(den: Tensor, total: Tensor | None) -> Denominator:
    """Keep the denominator away from zero.

    `total` is the sum of absolute weights, for signed features only: there the sign is kept and the magnitude
    bounded relative to it. The bound itself is a guard, not a part of the model: no gradient flows through it.
    Where every weight is zero (a query without features, or every key masked) the output is zero, and so is
    every gradient: `empty` says where, because 0 / floor would be zero forward but S / floor backward.
    """
    if total is None:
        floor = torch.full_like(den, DENOMINATOR_FLOOR)
        bounded, empty = den < floor, den <= 0
    else:
        floor = (SIGNED_FLOOR * total.detach()).clamp_min(DENOMINATOR_FLOOR)
        bounded, empty = den.abs() < floor, total == 0
        floor = torch.copysign(floor, den.detach())
    for count in _counts:
        count.queries += bounded.numel()
        count.bounded += int(bounded.sum())
    return Denominator(torch.where(bounded, floor, den), bounded, empty)


def normalize(sums: Sums, dtype: torch.dtype) -> Tensor:
    """The attention output of numerator and denominator, with the same bounds in every backend."""
    safe, _, empty = safe_denominator(sums.denominator, sums.magnitude)
    return cast_output((sums.numerator / safe[..., None]).masked_fill(empty[..., None], 0), dtype)


def bound_decay(decay: Tensor) -> Tensor:
    """Rates that every backend can compute with."""
    return decay.clamp(0, FASTEST_DECAY)


def clock(mask: Tensor | None, time: int, like: Tensor) -> Tensor:
    """How many tokens have counted up to each position, itself included: `[batch, time]`, or `[1, time]` without a
    mask. Forgetting goes by this clock, so that padding makes nothing older."""
    if mask is None:
        return torch.arange(1, time + 1, dtype=like.dtype, device=like.device)[None]
    return mask.cumsum(1).to(like.dtype)


def fade(decay: Tensor, elapsed: Tensor) -> Tensor:
    """What is left of each row of the state after so many tokens: `[batch, key_heads, time, feature]` for elapsed
    counts `[batch, time]`."""
    return torch.exp(-decay[None, :, None] * elapsed[:, None, :, None])


def cast_output(out: Tensor, dtype: torch.dtype) -> Tensor:
    """To the values' dtype; float16 saturates, since a signed average can exceed the values it averages."""
    if dtype == torch.float16:
        out = out.clamp(-65504.0, 65504.0)
    return out.to(dtype)


def fold_groups(x: Tensor, key_heads: int) -> Tensor:
    """`[batch, heads, time, size]` to `[batch, key_heads, group * time, size]`: the queries that share a key
    head become rows of one matrix, so that neither keys nor states are ever repeated."""
    batch, heads, time, size = x.shape
    return x.reshape(batch, key_heads, heads // key_heads * time, size)


def read(q: Tensor, state: State) -> Sums:
    """What folded queries find in a state."""
    num = q @ state.s
    den = (q @ state.z.unsqueeze(-1)).squeeze(-1)
    if state.z_abs is None:
        return Sums(num, den)
    return Sums(num, den, (q.detach().abs() @ state.z_abs.unsqueeze(-1)).squeeze(-1))


def unfold_groups(sums: Sums, heads: int) -> Sums:
    """The inverse of `fold_groups`, for what the folded queries found."""
    batch, _, _, value = sums.numerator.shape
    num = sums.numerator.reshape(batch, heads, -1, value)
    den = sums.denominator.reshape(batch, heads, -1)
    return Sums(num, den, None if sums.magnitude is None else sums.magnitude.reshape(batch, heads, -1))
