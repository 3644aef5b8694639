"""What a page of vLLM's cache holds of one sequence in one recurrent layer, and which heads a process has."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from t2r.config import T2RConfig
from t2r.errors import T2RError
from t2r.feature_maps import FeatureMap, make_feature_map

ALIGNMENT = 16
"""Bytes to whose multiple each tensor of a page begins, so that kernels can read several numbers at once."""
STATE = ("s", "z", "z_abs")
"""The tensors of a recurrent state, as in `t2r.ops.State`."""


class Heads(NamedTuple):
    """The heads of a layer in one process."""

    queries: int
    keys: int
    size: int
    rank: int
    processes: int

    @classmethod
    def of(cls, config: T2RConfig, processes: int = 1, rank: int = 0) -> Heads:
        base: Any = config.get_text_config()
        queries = base.num_attention_heads
        keys = getattr(base, "num_key_value_heads", None) or queries
        size = getattr(base, "head_dim", None) or base.hidden_size // queries
        if queries % processes or (keys % processes and processes % keys):
            raise T2RError(
                f"{queries} query heads and {keys} key heads cannot be divided among {processes} processes: choose "
                "another --tensor-parallel-size"
            )
        return cls(queries // processes, max(1, keys // processes), size, rank, processes)


class Part(NamedTuple):
    """A tensor of a page."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Layout(NamedTuple):
    """The tensors of a page, which vLLM sees as one: it requires the same of all layers, and copies pages."""

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, config: T2RConfig, processes: int) -> Layout:
        with torch.device("meta"):
            made = make_map(config, Heads.of(config, processes), 0)
            state = made.empty_state(1, made.head_dim, torch.float32, "meta")
        held = ((name, x) for name, x in zip(STATE, state, strict=True) if x is not None)
        return cls(tuple(Part(name, tuple(x.shape[1:]), x.dtype) for name, x in held))

    @property
    def starts(self) -> list[int]:
        """The byte at which each tensor begins, and at which the page ends."""
        found = [0]
        for part in self.parts:
            found.append(-(-(found[-1] + part.bytes) // ALIGNMENT) * ALIGNMENT)
        return found

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.starts[-1] // 4,),)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.float32,)

    def split(self, pages: Tensor) -> dict[str, Tensor]:
        """Return the tensors of all pages `[pages, numbers]`, without copying: `[pages, ...]` each."""
        found = {}
        for part, start in zip(self.parts, self.starts, strict=False):
            numbers = pages[:, start // 4 : (start + part.bytes) // 4]
            found[part.name] = numbers.view(part.dtype).unflatten(1, part.shape)
        return found


def make_map(config: T2RConfig, heads: Heads, index: int) -> FeatureMap:
    """Create the feature map of the recurrent layer with this index, for the heads of one process."""
    options = config.map_options()
    options["seed"] += index
    return make_feature_map(
        config.feature_map,
        head_dim=heads.size,
        num_heads=heads.queries,
        num_key_value_heads=heads.keys,
        **options,
    )
