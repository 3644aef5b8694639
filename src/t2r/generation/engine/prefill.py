"""Prefill: prompts are read in pieces, and encoder-decoders read the first tokens of the decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from t2r.generation.engine.request import Request
from t2r.generation.state import PIECE


def whole_mask(request: Request, state: Any) -> Tensor | None:
    """Return the padding mask of prompts, after that of the state from which they continue. None: no padding."""
    ids, mask = request.new_ids, request.inputs.get("attention_mask")
    if state is not None:
        mask = None if mask is None else mask[:, request.read :]
        read = state.attention_mask().to(ids.device).repeat_interleave(ids.shape[0] // state.rows, dim=0)
        mask = torch.cat([read, torch.ones_like(ids) if mask is None else mask.to(read)], dim=1)
    return None if mask is None or bool(mask.all()) else mask


class Prefill:
    """The reading of the prompts of one call, at most `piece` tokens of each at a time.

    The pieces of a prompt depend on its length only, so that what is computed does not depend on other calls."""

    def __init__(self, model: Any, request: Request, state: Any, piece: int) -> None:
        self.model, self.request, self.state = model, request, state
        self.inputs, self.ids = dict(request.inputs), request.new_ids
        self.total = self.ids.shape[1]
        # The first tokens of a decoder are few, and belong to a source that was read at once.
        self.piece = self.total if model.config.is_encoder_decoder else piece
        self.read_so_far = 0
        self.cache: Any = None
        self.logits: Tensor | None = None
        """After the last piece, the logits of the next token of each prompt, in float32."""

    @property
    def tokens(self) -> int:
        """The number of tokens of the next piece, of all prompts."""
        return self.ids.shape[0] * min(self.piece, self.total - self.read_so_far)

    @property
    def done(self) -> bool:
        return self.read_so_far == self.total

    def begin(self) -> None:
        ids, inputs, state = self.ids, self.inputs, self.state
        self.cache, self.past = inputs["past_key_values"], 0
        self.mask = whole_mask(self.request, state)
        if state is not None:
            self.cache, self.past = state.fork(ids.shape[0] // state.rows), state.get_seq_length()
        mask = self.mask
        real = torch.ones(ids.shape[0], self.past + self.total, device=ids.device) if mask is None else mask
        self.positions = (real.cumsum(1).long() - 1).clamp_min(0)[:, self.past :]

    def read(self) -> None:
        """Read the next piece."""
        ids, inputs = self.ids, self.inputs
        if self.model.config.is_encoder_decoder:
            self.cache, self.read_so_far = inputs["past_key_values"], self.total
            given = self.model.prepare_inputs_for_generation(ids, is_first_iteration=True, **inputs)
            self.logits = self.model(**given).logits[:, -1].to(torch.float32, copy=True)
            return
        if self.cache is None:
            self.begin()
        start, end = self.read_so_far, min(self.read_so_far + self.piece, self.total)
        part: dict[str, Any] = {"input_ids": ids[:, start:end], "past_key_values": self.cache, "use_cache": True}
        if self.mask is not None:
            part["attention_mask"] = self.mask[:, : self.past + end]
        if "position_ids" in inputs:
            part["position_ids"] = self.positions[:, start:end]
        if "logits_to_keep" in inputs:
            part["logits_to_keep"] = 1
        logits = self.model(**part).logits
        self.read_so_far = end
        if self.done:
            self.logits = logits[:, -1].to(torch.float32, copy=True)


def prefill(model: Any, request: Request, state: Any) -> tuple[Any, Tensor]:
    """Read the prompts of a call to their end. Returns the cache, and the logits of the next token."""
    reading = Prefill(model, request, state, PIECE)
    while not reading.done:
        reading.read()
    assert reading.logits is not None
    return reading.cache, reading.logits
