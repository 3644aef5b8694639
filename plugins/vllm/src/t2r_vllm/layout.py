"""What each layer keeps of a sequence, which heads of it a process has, and how that lies in a page of vLLM's cache."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from t2r.attention.memories import BUFFERS, Shape
from t2r.config import T2RConfig
from t2r.errors import T2RError
from t2r.feature_maps import AffineMap, FeatureMap, make_feature_map
from t2r.ops.stored import AS_THEY_ARE, rounded, stored
from t2r.plans import MemoryPlan

ALIGNMENT = 16
"""Bytes to whose multiple each tensor of a page begins, so that kernels can read several numbers at once."""
STATE = ("s", "z", "z_abs")
"""The tensors of a recurrent state, as in `t2r.ops.State`."""


class Heads(NamedTuple):
    """The heads of attention in one process."""

    queries: int
    keys: int
    size: int
    rank: int
    processes: int
    all_keys: int
    """The key heads of all processes together. If there are fewer than processes, several have the same one."""

    @classmethod
    def of(cls, config: T2RConfig, processes: int = 1, rank: int = 0) -> Heads:
        base: Any = config.get_text_config()
        queries = base.num_attention_heads
        keys = getattr(base, "num_key_value_heads", None) or queries
        size = getattr(base, "head_dim", None) or base.hidden_size // queries
        if min(queries, keys, size) < 1 or queries % keys:
            raise T2RError(
                f"{queries} query heads cannot share {keys} key heads of {size} numbers: config.json is damaged"
            )
        divisible = keys % processes == 0 or (processes % keys == 0 and config.plan is None)
        if queries % processes or not divisible:
            raise T2RError(
                f"{queries} query heads and {keys} key heads cannot be divided among {processes} processes: choose "
                "another --tensor-parallel-size"
            )
        return cls(queries // processes, max(1, keys // processes), size, rank, processes, keys)


class Share(NamedTuple):
    """The part of saved heads that a process has: the ones after `before` of `total`."""

    before: int
    total: int


class Site(NamedTuple):
    """What a process keeps of its heads in one layer."""

    number: int
    """That of the layer among those that are not softmax layers."""
    heads: Heads
    states: tuple[int, ...]
    """The key heads with a state."""
    share: Share
    """Which part of all heads with a state they are."""
    window: Shape | None = None
    """The windows of the key heads. None: there are none."""
    beside: bool = False
    """Whether any head of any process has a window. Queries then have weights."""
    sliding: int | None = None
    """The window of all heads of all processes, if vLLM's attention with a sliding window computes the layer."""
    nbits: int = AS_THEY_ARE
    """Bits of keys and values in the windows of the layer, also if those are all of other processes."""

    @property
    def slots(self) -> int:
        """The tokens of all windows together."""
        return 0 if self.window is None else self.window.slots

    def rounded(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as the states read them. Windows round their own, also those of heads without one: a
        process that has only such heads must do the same, or answers depend on the number of processes."""
        if self.window is not None or not self.beside:
            return k, v
        return rounded(k, self.nbits), rounded(v, self.nbits)

    def make_map(self, config: T2RConfig) -> FeatureMap | None:
        """Create the feature map. None: no head has a state."""
        if not self.states:
            return None
        options = config.map_options() | {"query_weights": self.beside}
        options["seed"] += self.number
        count = len(self.states)
        made = make_feature_map(
            config.feature_map,
            head_dim=self.heads.size,
            num_heads=count * (self.heads.queries // self.heads.keys),
            num_key_value_heads=count,
            **options,
        )
        if config.merged:
            assert isinstance(made, AffineMap)
            made.drop_affine()
        return made


def sites(config: T2RConfig, processes: int = 1, rank: int = 0) -> dict[int, Site]:
    """Return what a process keeps in each layer that is not a softmax layer."""
    heads, count = Heads.of(config, processes, rank), config.get_text_config().num_hidden_layers
    kept = config.kept_layers(count)
    chosen = [layer for layer in range(count) if layer not in kept]
    plan = config.memory_plan
    if plan is None:
        every, share = tuple(range(heads.keys)), Share(rank, processes)
        return {layer: Site(i, heads, every, share) for i, layer in enumerate(chosen)}
    plan.check([heads.all_keys] * count)
    return {layer: planned(plan, layer, i, heads) for i, layer in enumerate(chosen)}


def planned(plan: MemoryPlan, layer: int, index: int, heads: Heads) -> Site:
    """Return what a process keeps in a layer by a memory plan."""
    every, states = plan.windows[layer], plan.stateful(layer)
    first, last = heads.rank * heads.keys, (heads.rank + 1) * heads.keys
    share = Share(sum(head < first for head in states), len(states))
    own = tuple(head - first for head in states if first <= head < last)
    if not states and not plan.sinks and len(set(every)) == 1 and plan.nbits == AS_THEY_ARE:
        return Site(index, heads, (), share, beside=True, sliding=every[0])
    window = Shape(every[first:last], plan.sinks, plan.nbits) if any(every[first:last]) else None
    return Site(index, heads, own, share, window, beside=any(every), nbits=plan.nbits)


def layer_types(config: T2RConfig) -> list[str]:
    """Return the type of each layer, in the words of transformers and vLLM."""
    found = sites(config)

    def type_of(layer: int) -> str:
        if layer not in found:
            return "full_attention"
        return "linear_attention" if found[layer].sliding is None else "sliding_attention"

    return [type_of(layer) for layer in range(config.get_text_config().num_hidden_layers)]


# --- Pages --------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A tensor of a page."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Layout(NamedTuple):
    """The tensors of a page, which vLLM sees as one tensor and copies.

    vLLM requires pages of one size, so it is that of the layer that needs most of each tensor."""

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, config: T2RConfig, processes: int, dtype: torch.dtype) -> Layout:
        """Return the layout for a model whose weights have this dtype."""
        every = [s for rank in range(processes) for s in sites(config, processes, rank).values() if s.sliding is None]
        if not every:
            return cls(())
        parts = []
        most = max(every, key=lambda site: len(site.states))
        with torch.device("meta"):
            if (made := most.make_map(config)) is not None:
                if made.signed and config.plan is not None:
                    raise T2RError(
                        f"feature map {config.feature_map!r} has negative features: it cannot be used beside a window"
                    )
                state = made.empty_state(1, made.head_dim, torch.float32, "meta")
                held = [(name, x) for name, x in zip(STATE, state, strict=True) if x is not None]
                parts = [Part(name, tuple(x.shape[1:]), x.dtype) for name, x in held]
        if slots := max(site.slots for site in every):
            token = torch.zeros(1, 1, most.heads.size, dtype=dtype)
            assert config.memory_plan is not None
            window = stored(token, token, config.memory_plan.nbits)
            parts += [Part(name, (slots, x.shape[2]), x.dtype) for name, x in zip(BUFFERS, window, strict=False)]
        return cls(tuple(parts))

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
            numbers = pages[:, start // 4 : self.starts[-1] // 4].view(part.dtype)[:, : prod(part.shape)]
            found[part.name] = numbers.unflatten(1, part.shape)
        return found
