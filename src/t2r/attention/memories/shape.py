"""The shape of the windows of a layer: how wide they are, and where each lies in the buffers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from t2r.ops.stored import AS_THEY_ARE, rounded, stored


class Shape(NamedTuple):
    """The buffers of a window memory: heads of equal windows lie together, so that each kind is a ring."""

    sizes: tuple[int, ...]
    """The window of each key head."""
    sinks: int
    nbits: int = AS_THEY_ARE
    """Bits of the numbers of keys and values (`t2r.ops.stored`)."""

    @property
    def rings(self) -> list[tuple[int, tuple[int, ...]]]:
        """Windows, from the smallest to the largest, and their heads. Heads without a window have none."""
        return [
            (size, tuple(h for h, own in enumerate(self.sizes) if own == size))
            for size in sorted(set(self.sizes))
            if size
        ]

    @property
    def firsts(self) -> list[int]:
        """Return the first slot of the ring of each key head."""
        firsts, start = [0] * len(self.sizes), 0
        for size, heads in self.rings:
            for i, head in enumerate(heads):
                firsts[head] = start + i * (size + self.sinks)
            start += len(heads) * (size + self.sinks)
        return firsts

    def programs(self, block: int, device: torch.device) -> Tensor:
        """Return the programs of a step in one kernel, `[programs, 4]`: the key head of each, the number of its part,
        the first slot of the ring, and the window. Part 0 of a head has the token, the others have `block` slots."""
        rings = [(h, first, size) for h, (first, size) in enumerate(zip(self.firsts, self.sizes, strict=True))]
        found = [(h, 0, first, size) for h, first, size in rings]
        for h, first, size in rings:
            blocks = -(-(size + self.sinks) // block) if size else 0
            found += [(h, 1 + part, first, size) for part in range(blocks)]
        return torch.tensor(found, dtype=torch.int32, device=device)

    @property
    def slots(self) -> int:
        """Tokens of all heads together."""
        return sum(len(heads) * (size + self.sinks) for size, heads in self.rings)

    def rounded(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as they will be read again."""
        return rounded(k, self.nbits), rounded(v, self.nbits)

    def empty(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return empty buffers for keys and values `[rows, heads, time, dim]`."""
        one_k, one_v = (x.new_zeros(x.shape[0], 1, x.shape[3]) for x in (k, v))
        return tuple(x.new_zeros(x.shape[0], self.slots, x.shape[2]) for x in stored(one_k, one_v, self.nbits))
