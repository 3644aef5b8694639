"""How a state in half precision is rounded: up or down at random, so that the expected value is exact.

A state is a long sum. Rounded to the nearest number after every token, it stops growing where what a token adds is less
than half of the distance between two numbers, and stops decaying where a token takes away less. Both add up, always in
the same direction. Rounded at random, the errors have a mean of zero and nearly cancel (docs/log/2026-11.md).

The random numbers are a function of the row's own count of tokens, of the layer and of the place in the state. So a
sequence has the same ones whatever else is in its batch and whenever it is continued, and a CUDA graph, which reads the
counts from the memory of the device, has new ones at each replay. `t2r.ops.triton.decode_kernel` computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from t2r.ops.common import State

FIRST, SECOND, STRIDE = 0x7FEB352D, 0x846CA68B, 0x9E3779B9
"""Of a hash of 32 bits in which each bit of the input changes half of the others (`lowbias32` of C. Wellons)."""
MISSING = {torch.bfloat16: 16, torch.float16: 13}
"""How many bits of a float32 a dtype lacks."""
SMALLEST = 2.0**-14
"""Smaller numbers of float16 are multiples of 2^-24."""


class Draws(NamedTuple):
    """What the random numbers of a step depend on, beside the place in the state."""

    counts: Tensor
    """The tokens that each row has read before, `[batch]`, in int64."""
    seed: int
    """The number of the layer."""


def as_int32(x: int) -> int:
    """Return the int32 with the bits of an unsigned one, which torch cannot multiply."""
    return x - (1 << 32) if x >= 1 << 31 else x


def hashed(x: Tensor) -> Tensor:
    """Hash int32 numbers."""
    x = (x ^ (x >> 16 & 0xFFFF)) * FIRST
    x = (x ^ (x >> 15 & 0x1FFFF)) * as_int32(SECOND)
    return x ^ (x >> 16 & 0xFFFF)


def random_bits(draws: Draws, state: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return random int32 numbers for each tensor of a state, by their places in the state of a row."""
    counts, sizes = draws.counts.to(torch.int32), [0 if x is None else x[0].numel() for x in state]
    key = hashed(counts * as_int32(STRIDE) + hashed(torch.full_like(counts, draws.seed)))
    places = torch.arange(sum(sizes), dtype=torch.int32, device=key.device)
    parts = hashed(places ^ key[:, None]).split(sizes, dim=1)
    return [None if x is None else part.view(x.shape) for x, part in zip(state, parts, strict=True)]


def rounded_by(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Round to bfloat16 or float16 by random bits. Numbers of that dtype do not change."""
    x, missing = x.float(), MISSING[dtype]
    noise = bits >> 32 - missing & (1 << missing) - 1
    found = (x.view(torch.int32) + noise & -(1 << missing)).view(torch.float32)
    if dtype == torch.float16:
        small = (x * 2.0**24 + noise * 2.0**-missing).floor() * 2.0**-24
        found = torch.where(x.abs() < SMALLEST, small, found)
    return torch.where(x.isnan(), x, found).to(dtype)


def rounded(state: State, dtype: torch.dtype, draws: Draws) -> State:
    """Return a state in half precision."""
    bits = random_bits(draws, state)
    pairs = zip(state, bits, strict=True)
    return type(state)(*(None if x is None or by is None else rounded_by(x, dtype, by) for x, by in pairs))  # type: ignore[arg-type]


def store(own: State, new: State, draws: Draws | None = None) -> None:
    """Copy a state to another one in place. One in half precision is rounded by `draws`. None: to the nearest."""
    dtype = own[0].dtype
    for held, x in zip(own, new if draws is None else rounded(new, dtype, draws), strict=True):
        if held is not None and x is not None:
            held.copy_(x)
