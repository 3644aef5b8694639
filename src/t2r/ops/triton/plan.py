"""How a call is divided into programs: chunks of tokens, segments of chunks, and blocks of features and values."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from t2r.ops.triton.blocks import block, precision
from t2r.ops.triton.presence import INTERPRETED

CHUNK = 16 if INTERPRETED else 64
"""Tokens per chunk, at most 128. With the fastest decay, scale factors then reach exp(64) at the ends of a chunk."""
WARPS = 4
MANY_WARPS = 8
"""Warps of programs that hold many tiles. With fewer warps, registers spill. Chunks of 128 need 8 warps everywhere."""
MANY = 128
"""Sequences times heads that fill a GPU. With at least as many, a sweep goes through whole sequences."""
FILL = 256
"""Programs of a sweep over segments, if there are fewer sequences and heads."""
SWEPT = 8192
"""Elements of the largest state that a sweep keeps in registers."""
SWEPT_VALUES = 64
"""Values of a program of a sweep whose outputs are values. With 128, there are half as many programs."""


class Plan(NamedTuple):
    """The sizes and flags of one call."""

    batch: int
    heads: int
    key_heads: int
    time: int
    feature: int
    value: int
    signed: bool
    how: str
    flags: dict[str, Any]

    @property
    def group(self) -> int:
        return self.heads // self.key_heads

    @property
    def chunks(self) -> int:
        return -(-self.time // self.size)

    @property
    def swept(self) -> bool:
        """Whether programs go through segments of several chunks. Otherwise all chunks run in parallel."""
        fits = max(self.feature, self.value) <= 128 and block(self.feature, 128) * block(self.value, 128) <= SWEPT
        return fits and self.how.startswith("bf16") and self.group == 1 and self.time > 0

    @property
    def scaled(self) -> bool:
        """Whether queries and keys are multiplied with their decay factors before the sweeps (`sweep.scale`)."""
        return self.swept and bool(self.flags["DECAY"])

    @property
    def per(self) -> int:
        """Chunks per segment."""
        sequences = self.batch * self.key_heads
        if not self.swept:
            return 1
        return self.chunks if sequences >= MANY else -(-self.chunks * sequences // FILL)

    @property
    def segments(self) -> int:
        return -(-self.chunks // self.per)

    @property
    def size(self) -> int:
        return block(self.time, CHUNK)

    @property
    def rows(self) -> int:
        return block(self.feature, 64)

    @property
    def columns(self) -> int:
        return block(self.value, 64 if self.how == "tf32x3" else 128)

    @property
    def align(self) -> int:
        """A common divisor of both sizes. Kernels receive sizes in this unit, which gives the alignment of loads."""
        return math.gcd(self.feature, self.value, 16)

    @property
    def units(self) -> tuple[int, int]:
        return self.feature // self.align, self.value // self.align

    @property
    def slot(self) -> int:
        return self.feature * (self.value + 1)

    @property
    def state_slot(self) -> int:
        return self.slot + (self.feature if self.signed else 0)

    @property
    def blocks(self) -> dict[str, Any]:
        # One stage, because loops over blocks are short and more stages take shared memory from other programs.
        return {
            "HOW": self.how,
            "BT": self.size,
            "BF": self.rows,
            "BV": self.columns,
            "ALIGN": self.align,
            "num_warps": MANY_WARPS if self.how == "tf32x3" else WARPS,
            "num_stages": 1,
        }

    @property
    def sweep_blocks(self) -> dict[str, Any]:
        """The state of a sweep is one tile."""
        # Measured on an H200, also with decay: more stages and more warps are slower.
        rows, columns = block(self.feature, 128), block(self.value, 128)
        return self.blocks | {"BF": rows, "BV": columns, "num_stages": 2}

    @property
    def swept_columns(self) -> int:
        return block(self.value, SWEPT_VALUES)

    @property
    def swept_column_blocks(self) -> int:
        return -(-self.value // self.swept_columns)

    @property
    def row_blocks(self) -> int:
        return -(-self.feature // self.rows)

    @property
    def column_blocks(self) -> int:
        return -(-self.value // self.columns)

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        mask: Tensor | None,
        starts: Tensor | None,
        signed: bool,
    ) -> Plan:
        flags = {"DECAY": decay is not None, "HAS_MASK": mask is not None, "PACKED": starts is not None}
        shape = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], q.shape[3], v.shape[3])
        return cls(*shape, signed, precision(q, k, v, signed=signed), flags)
