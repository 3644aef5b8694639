"""What memory costs: the bytes of a window and of a state, for each layer of a model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from t2r.attention.softmax import sliding_window_of
from t2r.capacity import human
from t2r.errors import T2RError
from t2r.ops.stored import AS_THEY_ARE, token_bytes
from t2r.plans import MemoryPlan
from t2r.surgery.adapters import family_of

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
LARGEST = 2**100
"""The limit of a number in a budget, far beyond any memory."""
KEY_BYTES = 2
"""Keys and values are counted in bfloat16, whatever the dtype of the model on this machine, or in 8 bits."""
STATE_BYTES = 4
"""States are float32."""
SINKS = 4
SMALLEST = 16
"""The smallest window of a head, in tokens."""
BEYOND = 16
"""Windows that hold the whole context are longer by this fraction of it: 1/16."""
FEATURES = (32, 16, 8, 4)
"""Features of a state, if none are given: the first number whose states need at most a fifth of the memory."""
SHARE = 5


def parse_memory(given: str | int | float) -> int:
    """Return the number of bytes that is meant by a number, or by text such as `8MiB`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(given).lower())
    if isinstance(given, bool) or found is None or found[2] not in UNITS or not 0 < float(found[1]) < LARGEST:
        raise T2RError(f"memory must be a number of bytes above 0, for example 8MiB; got {given!r}")
    return int(float(found[1]) * UNITS[found[2]])


def in_mib(count: float) -> str:
    return f"{count / 2**20:.2f} MiB"


class LayerCost(NamedTuple):
    heads: int
    """Key-value heads."""
    token: int
    """Bytes of the key and the value of a token, for each of them."""
    state: int
    """Bytes of a state, for each of them. 0: there are no states."""
    longest: int
    """The longest window that makes sense: that of the base model, or one with more than the context."""

    def of(self, window: int) -> int:
        """Return the bytes of a head with this window, and its state."""
        return (window + SINKS) * self.token + self.state


class Source(NamedTuple):
    """What the cross attention of an encoder-decoder keeps of a source."""

    tokens: int
    """The longest source that is planned for."""
    features: int = 0
    """Features of its states. 0: it keeps the keys and values of all tokens."""


class Costs(NamedTuple):
    """The costs of all layers, for texts of `context` tokens: of an encoder-decoder, of target tokens."""

    layers: tuple[LayerCost, ...]
    context: int
    source: Source | None = None
    cross: int = 0
    """Bytes of cross attention, which do not depend on the plan."""
    nbits: int = AS_THEY_ARE
    """Bits of the numbers of keys and values in windows."""

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        context: int,
        features: int = 0,
        source: Source | None = None,
        nbits: int = AS_THEY_ARE,
    ) -> Costs:
        """Return those of a base model, with states of `features` features. 0: none, windows only. An encoder-decoder
        requires a `source`."""
        family, config = family_of(model), model.config.get_text_config(decoder=True)
        if family.positions == "relative":
            raise T2RError(f"{family.model_type} models cannot have windows: their positions are a bias on the scores")
        found: list[LayerCost] = []
        cross = 0
        for site in family.sites(model):
            shape, own = family.shape(site.module), sliding_window_of(config, site.layer)
            if site.cross:
                if source is None:
                    raise T2RError(f"a memory budget for {family.model_type} with cross attention is not possible")
                state = STATE_BYTES * source.features * (shape.head_dim + 1)
                cross += shape.num_key_value_heads * (state or 2 * KEY_BYTES * shape.head_dim * source.tokens)
                continue
            longest = context + context // BEYOND
            found.append(
                LayerCost(
                    shape.num_key_value_heads,
                    token_bytes(shape.head_dim, shape.head_dim, nbits),
                    STATE_BYTES * features * (shape.head_dim + 1),
                    longest if own is None else min(own, longest),
                )
            )
        return cls(tuple(found), context, source, cross, nbits)

    @property
    def least(self) -> int:
        """The bytes of the smallest plan."""
        return self.cross + sum(layer.heads * layer.of(min(SMALLEST, layer.longest)) for layer in self.layers)

    @property
    def whole(self) -> int:
        """The bytes of all keys and values of a context, and of cross attention."""
        return self.cross + sum(layer.heads * layer.token * min(self.context, layer.longest) for layer in self.layers)

    def check(self, memory: int) -> None:
        """Raise T2RError for a budget that is too small, or larger than the whole cache."""
        if self.least <= memory <= self.whole:
            return
        if self.least > self.whole:
            raise T2RError(
                f"this model keeps only {human(self.whole)} of a sequence, and the smallest plan {human(self.least)}: "
                "it needs no budget"
            )
        wrong = f"a memory of {human(memory)} is not possible: the smallest plan of this model needs"
        eight = self.nbits != AS_THEY_ARE
        whole = f"{human(self.whole)}{f' in {self.nbits} bits' if eight else ''}"
        if eight and memory > self.whole:
            whole += f"; --nbits {AS_THEY_ARE} stores them as they are"
        if self.source is None:
            raise T2RError(f"{wrong} {human(self.least)}, and all keys and values of {self.context:,} tokens {whole}")
        exact = not self.source.features
        kept = f"the keys and values of {self.source.tokens:,} source tokens" if exact else "the states of the source"
        less = (
            "; fewer --source-tokens, or --recurrent both, which keeps states of the source, need less"
            if exact and memory < self.least
            else ""
        )
        raise T2RError(
            f"{wrong} {human(self.least)}, of which {kept} are {human(self.cross)}; with all keys and values of "
            f"{self.context:,} target tokens it is {whole}{less}"
        )

    def of_windows(self, windows: Sequence[Sequence[int]]) -> int:
        """The bytes of a plan with these windows, and of cross attention."""
        return self.cross + sum(layer.of(size) for layer, row in zip(self.layers, windows, strict=True) for size in row)

    def one_window(self, memory: int) -> list[list[int]]:
        """Return one window for all heads within a number of bytes, without states."""
        token = sum(layer.heads * layer.token for layer in self.layers)
        size = max(1, (memory - self.cross) // token - SINKS)
        return [[min(size, layer.longest)] * layer.heads for layer in self.layers]

    def plan(self, windows: Sequence[Sequence[int]]) -> MemoryPlan:
        """Return the plan with these windows, and states of what leaves them if there are states at all."""
        states: Any = None if self.layers[0].state else tuple((False,) * len(row) for row in windows)
        return MemoryPlan(tuple(map(tuple, windows)), SINKS, states, self.nbits)


def features_for(model: PreTrainedModel, context: int, memory: int, source: Source | None = None) -> int:
    """Return how many features a state has if the user does not say: the more memory, the more."""
    for features in FEATURES:
        costs = Costs.of(model, context, features, source)
        if SHARE * sum(layer.heads * layer.state for layer in costs.layers) <= memory - costs.cross:
            return features
    return FEATURES[-1]
