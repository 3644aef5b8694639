"""Variants of a model with less memory, for fair comparisons in an evaluation.

A recurrent state should be compared with softmax attention of the same memory. A variant keeps a window of the last
tokens and a few initial tokens (sinks) in place of all keys and values, or rounds the recurrent state to half
precision, as a decoder that stores it in that dtype would do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from t2r.attention.memories import StateMemory
from t2r.config import T2RConfig
from t2r.errors import T2RError
from t2r.model.logits import Readout
from t2r.model.modeling import T2RModel
from t2r.model.windows import with_windows
from t2r.ops import Draws, Rule, Sums
from t2r.ops.common import HALF
from t2r.ops.rounding import rounded
from t2r.plans import check_nbits

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Variant:
    """A restriction of a model's memory: either a window or a rounded state.

    Args:
        window: number of last tokens that softmax attention attends to, including the current one. None: all.
        sinks: number of initial tokens that it also attends to. Positions are those of the full text.
        nbits: 8 if the keys and values of a window are rounded to 8 bits.
        state: the dtype to which the recurrent state is rounded. None: it is not rounded.
        every: tokens between roundings of the state. 1 corresponds to decoding. A larger number is faster, and
            corresponds to reading a prompt in chunks of that length.
    """

    window: int | None = None
    sinks: int = 0
    state: str | None = None
    every: int = 1
    nbits: int = 16

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise T2RError(f"variant: window must be at least 1; got {self.window}")
        if self.sinks < 0 or (self.sinks and self.window is None):
            raise T2RError("variant: sinks must be at least 0 and require a window")
        if self.state is not None and self.state not in DTYPES:
            raise T2RError(f"variant: state must be one of {', '.join(DTYPES)}; got {self.state}")
        check_nbits(self.nbits, "variant: ")
        if self.nbits != 16 and self.window is None:
            raise T2RError("variant: nbits requires a window")
        if self.every < 1:
            raise T2RError(f"variant: every must be at least 1; got {self.every}")
        if self.window is None and self.state is None:
            raise T2RError("variant: give window or state; the unmodified model is always evaluated")
        if self.window is not None and self.state is not None:
            raise T2RError("variant: give window or state, not both")

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Parse `window=386,sinks=4` or `state=bfloat16,every=1`."""
        given: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, value = (x.strip() for x in part.partition("="))
            if name not in cls.__dataclass_fields__ or not equals or name in given:
                raise T2RError(
                    f"variant {text!r}: write window=TOKENS,sinks=TOKENS,nbits=BITS or state=DTYPE,every=TOKENS"
                )
            if name != "state" and not re.fullmatch(r"\d{1,9}", value):
                raise T2RError(f"variant {text!r}: {name} must be a whole number; got {value!r}")
            given[name] = value if name == "state" else int(value)
        return cls(**given)

    def __str__(self) -> str:
        if self.window is not None:
            bits = "" if self.nbits == 16 else f" of {self.nbits} bits"
            return f"window {self.window:,}" + (f" + {self.sinks} sinks" if self.sinks else "") + bits
        return f"state in {self.state}" + ("" if self.every == 1 else f" every {self.every} tokens")

    def check(self, config: Any, swap: T2RConfig | None) -> None:
        """Raise T2RError if the variant does not apply to a model with this configuration. `swap` is that of its swap,
        or None if the model is not swapped."""
        if self.window is not None:
            if swap is not None and not swap.keeps_some():
                raise T2RError(f"{self}: this model has no softmax attention to limit")
            text = config.get_text_config()
            own = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
            if swap is None and own and self.window > own:
                raise T2RError(
                    f"{self}: this {text.model_type} model already has a sliding window of {own:,} tokens: give a "
                    "smaller one"
                )
        elif swap is None:
            raise T2RError(f"{self}: this model has no recurrent state")

    def readout(self, model: PreTrainedModel, example: Mapping[str, Tensor]) -> Readout:
        self.check(model.config, swap_of(model))
        if self.window is not None:
            return Readout(with_windows(model, self.window, self.sinks, self.nbits), example)
        assert self.state is not None
        return RoundedReadout(model, example, DTYPES[self.state], self.every)


def swap_of(model: PreTrainedModel) -> T2RConfig | None:
    """Return the configuration of the swap of a model, or None if it is not swapped."""
    return model.t2r_config if isinstance(model, T2RModel) else None


def readout_of(model: PreTrainedModel, example: Mapping[str, Tensor], variant: Variant | None) -> Readout:
    return Readout(model, example) if variant is None else variant.readout(model, example)


class RoundedMemory(StateMemory):
    """A state that is rounded every `every` tokens, as a static cache rounds what it stores.

    Only the sums of a layer depend on the order of rounding. Everything else is computed for all tokens at once, so a
    text takes one forward pass."""

    def __init__(self, dtype: torch.dtype, every: int, seed: int = 0) -> None:
        super().__init__()
        self.dtype, self.every, self.seed = dtype, every, seed
        self.counts = torch.zeros(1, dtype=torch.long)
        """The tokens that each row has read."""

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, rule: Rule, *, mask: Tensor | None = None, **how: Any
    ) -> Tensor | Sums:
        self.counts = self.counts.to(k.device).expand(k.shape[0])
        if self.every == 1 and self.dtype in HALF and not torch.is_grad_enabled():
            return self.stepwise(q, k, v, rule, mask, how.get("normalized", True))
        found = []
        for start in range(0, k.shape[2], self.every):
            part = slice(start, start + self.every)
            own = None if mask is None else mask[:, part]
            found.append(super().advance(q[:, :, part], k[:, :, part], v[:, :, part], rule, mask=own, **how))
            assert self.state is not None
            if self.dtype in HALF:
                half = rounded(self.state, self.dtype, Draws(self.counts, self.seed))
                self.state = half.map(torch.Tensor.double if v.dtype == torch.float64 else torch.Tensor.float)
            self.counts = self.counts + (k[:, :, part].shape[2] if own is None else own.sum(1))
        return joined(found)

    def can_step(self) -> bool:
        return False  # `advance` takes features, also of a single token

    def stepwise(
        self, q: Tensor, k: Tensor, v: Tensor, rule: Rule, mask: Tensor | None, normalized: bool
    ) -> Tensor | Sums:
        """Advance a state that is stored in half precision, as the engine does."""
        if self.state is None:
            self.state = rule.empty(q.shape[0], v.shape[3], v.dtype, v.device).map(lambda x: x.to(self.dtype))
        found = []
        for i in range(k.shape[2]):
            now = slice(i, i + 1)
            own = None if mask is None else mask[:, now]
            how: dict[str, Any] = {"mask": own, "inplace": True, "normalized": normalized}
            how["draws"] = Draws(self.counts, self.seed)
            out, _ = rule.step(q[:, :, now], k[:, :, now], v[:, :, now], self.state, **how)
            self.counts = self.counts + (1 if own is None else own[:, 0])
            found.append(out)
        return joined(found)


def joined(parts: list[Any]) -> Tensor | Sums:
    """Join outputs, or sums, of consecutive tokens."""
    if isinstance(parts[0], Sums):
        return Sums(*(None if xs[0] is None else torch.cat(xs, dim=2) for xs in zip(*parts, strict=True)))  # type: ignore[arg-type]
    return torch.cat(parts, dim=2)


class RoundedReadout(Readout):
    """Rounds the recurrent state after every token, or every few."""

    def __init__(self, model: PreTrainedModel, example: Mapping[str, Tensor], dtype: torch.dtype, every: int) -> None:
        self.dtype, self.every = dtype, every
        super().__init__(model, example)

    def _body(self, inputs: Mapping[str, Tensor]) -> Tensor:
        assert self.body is not None
        states: Tensor = self.body(**inputs, past_key_values=self._cache(), use_cache=True).last_hidden_state
        return states

    def _whole(self, inputs: Mapping[str, Tensor]) -> Tensor:
        logits: Tensor = self.model(**inputs, past_key_values=self._cache(), use_cache=True).logits
        return logits

    def _cache(self) -> Any:
        cache = self.model.make_cache()
        for number, layer in enumerate(cache.layers):
            layer.memories = tuple(
                RoundedMemory(self.dtype, self.every, number) if isinstance(memory, StateMemory) else memory
                for memory in layer.memories
            )
        return cache
