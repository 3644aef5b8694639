"""A model that remembers less, as a further row of an evaluation.

A recurrent state is compared fairly only with softmax attention that keeps as many bytes. So a model can be read with
its softmax attention limited to a window of the last tokens and a few first ones (sinks), or with its recurrent state
rounded to half precision, as a decoder that stores it so would have it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from t2r.attention.layers import RecurrentLayer, layer_tensors
from t2r.attention.softmax import SoftmaxWindow
from t2r.errors import T2RError
from t2r.model.logits import Readout, accepts, evaluating
from t2r.model.modeling import T2RModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KEY_BYTES = 2
"""Keys and values are counted in bfloat16, whatever the dtype of the evaluation."""


@dataclass(frozen=True)
class Variant:
    """How a model is read. The default is the model as it is.

    Args:
        window: softmax attention sees so many of the last tokens, itself included. None: all of them.
        sinks: it sees so many of the first tokens, too. Positions stay those of the full text.
        state: the dtype to which the recurrent state is rounded. None: it is not rounded.
        every: tokens after which the state is rounded. 1 is what a decoder does; a larger number is faster, and is what
            reading a prompt in pieces of that length does.
    """

    window: int | None = None
    sinks: int = 0
    state: str | None = None
    every: int = 1

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise T2RError(f"a variant's window is at least 1 token; got {self.window}")
        if self.sinks < 0 or (self.sinks and self.window is None):
            raise T2RError("a variant's sinks are 0 or more, beside a window")
        if self.state is not None and self.state not in DTYPES:
            raise T2RError(f"a variant's state is one of {', '.join(DTYPES)}; got {self.state}")
        if self.every < 1:
            raise T2RError(f"a variant's state is rounded every 1 token or more; got every={self.every}")
        if self.window is None and self.state is None:
            raise T2RError("a variant has a window or a state: the model as it is has a row anyway")
        if self.window is not None and self.state is not None:
            raise T2RError("a variant has a window or a state, not both")

    @classmethod
    def parse(cls, text: str) -> Variant:
        """From `window=386,sinks=4` or `state=bfloat16,every=1`."""
        given: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, value = (x.strip() for x in part.partition("="))
            if name not in cls.__dataclass_fields__ or not equals or name in given:
                raise T2RError(f"variant {text!r}: write window=TOKENS,sinks=TOKENS or state=DTYPE,every=TOKENS")
            if name != "state" and not re.fullmatch(r"\d{1,9}", value):
                raise T2RError(f"variant {text!r}: {name} is a whole number; got {value!r}")
            given[name] = value if name == "state" else int(value)
        return cls(**given)

    def __str__(self) -> str:
        if self.window is not None:
            return f"window {self.window:,}" + (f" + {self.sinks} sinks" if self.sinks else "")
        return f"state in {self.state}" + ("" if self.every == 1 else f" every {self.every} tokens")

    def check(self, model: PreTrainedModel) -> None:
        """Refuse a model without what the variant changes."""
        reader: Any = model
        swapped = isinstance(model, T2RModel)
        if self.window is not None:
            if swapped and not reader.kept_layers():
                raise T2RError(f"{self}: this model has no softmax attention to limit")
            config = model.config.get_text_config()
            if not swapped and getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
                raise T2RError(f"{self}: this {config.model_type} model has a sliding window of its own")
        elif not swapped:
            raise T2RError(f"{self}: this model has no recurrent state")

    def readout(self, model: PreTrainedModel, example: Mapping[str, Tensor]) -> Readout:
        self.check(model)
        if self.window is not None:
            return WindowedReadout(model, example, SoftmaxWindow(self.window, self.sinks))
        assert self.state is not None
        return RoundedReadout(model, example, DTYPES[self.state], self.every)


def readout_of(model: PreTrainedModel, example: Mapping[str, Tensor], variant: Variant | None) -> Readout:
    return Readout(model, example) if variant is None else variant.readout(model, example)


class WindowedReadout(Readout):
    """Softmax attention limited to a window and sinks.

    A stock model gets a four-dimensional mask, which transformers hands to every layer as it is. A swapped model takes
    the window as a keyword argument that reaches the layers that kept softmax attention."""

    def __init__(self, model: PreTrainedModel, example: Mapping[str, Tensor], window: SoftmaxWindow) -> None:
        self.window = window
        self.swapped = isinstance(model, T2RModel)
        super().__init__(model, example)
        self._check_effect(example)

    def _body(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return super()._body(self._limited(inputs, self.window))

    def _whole(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return super()._whole(self._limited(inputs, self.window))

    def _limited(self, inputs: Mapping[str, Tensor], window: SoftmaxWindow) -> dict[str, Any]:
        if self.swapped:
            return {**inputs, "t2r_window": window}
        ids = inputs["input_ids"]
        position = torch.arange(ids.shape[1], device=ids.device)
        allowed = window.allowed(position[:, None] - position, position)
        # Added to the scores, so that it means the same to every attention implementation.
        mask = torch.zeros(allowed.shape, dtype=self.model.dtype, device=ids.device).masked_fill(~allowed, -torch.inf)
        limited = {**inputs, "attention_mask": mask[None, None]}
        if accepts(self.model.forward, "position_ids"):  # OPT would count them in a mask of two dimensions
            limited["position_ids"] = position.expand(len(ids), -1)
        return limited

    def _check_effect(self, example: Mapping[str, Tensor]) -> None:
        """Raise unless the model obeys: a family may drop what it does not know."""
        if self.swapped:
            obeys = self.window.applied
        else:  # where a position sees itself alone, the first token cannot matter to the second
            ids = example["input_ids"][:1, :2]
            other = torch.stack([(ids[:, 0] + 1) % self.out_features, ids[:, 1]], dim=1)
            alone = SoftmaxWindow(1)
            with evaluating(self.model):
                first, second = (super(WindowedReadout, self)._whole(self._limited({"input_ids": x}, alone))[:, -1]
                                 for x in (ids, other))  # fmt: skip
            obeys = torch.equal(first, second)
        if not obeys:
            raise T2RError(f"a {self.model.config.model_type} model does not take a window: it ignores the mask")


class RoundedReadout(Readout):
    """The text is read a piece at a time, and the recurrent state is rounded after each."""

    def __init__(self, model: PreTrainedModel, example: Mapping[str, Tensor], dtype: torch.dtype, every: int) -> None:
        self.dtype, self.every = dtype, every
        super().__init__(model, example)

    def _body(self, inputs: Mapping[str, Tensor]) -> Tensor:
        assert self.body is not None
        return self._in_pieces(inputs, lambda **given: self.body(**given).last_hidden_state)

    def _whole(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self._in_pieces(inputs, lambda **given: self.model(**given).logits)

    def _in_pieces(self, inputs: Mapping[str, Tensor], read: Any) -> Tensor:
        cache = self.model.make_cache()
        found = []
        for piece in inputs["input_ids"].split(self.every, dim=1):
            found.append(read(input_ids=piece, past_key_values=cache, use_cache=True))
            for layer in cache.layers:
                if isinstance(layer, RecurrentLayer) and layer.state is not None:
                    layer.state = layer.state.map(lambda x: x.to(self.dtype).to(x.dtype))
        return torch.cat(found, dim=1)


class Memory(NamedTuple):
    """What a model keeps of one sequence: the bytes of its recurrent states, those of a token's keys and values in
    bfloat16, and the most tokens whose keys and values are kept (None: all)."""

    state: int
    token: int
    tokens: int | None = None

    def at(self, context: int) -> int:
        """Bytes after so many tokens."""
        return self.state + self.token * (context if self.tokens is None else min(context, self.tokens))


def memory_of(model: PreTrainedModel, variant: Variant | None = None) -> Memory | None:
    """Measured on a cache that has read two tokens. None for a model whose cache is of another kind."""
    with evaluating(model):
        ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
        cache = getattr(model(input_ids=ids, use_cache=True), "past_key_values", None)
    state = token = 0
    for layer in getattr(cache, "layers", None) or ():
        held = layer_tensors(layer)
        numbers = sum(x.numel() for x in held.values())
        if isinstance(layer, RecurrentLayer):
            stored = None if variant is None or variant.state is None else DTYPES[variant.state].itemsize
            state += sum(x.numel() * (stored or x.element_size()) for x in held.values())
        elif not held or getattr(layer, "is_sliding", False):
            return None
        else:
            token += numbers // ids.shape[1] * KEY_BYTES
    if not state and not token:
        return None
    return Memory(state, token, None if variant is None or variant.window is None else variant.window + variant.sinks)
