"""Prefill: prompts are read in pieces, and encoder-decoders read the first tokens of the decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from t2r.generation.engine.request import Request
from t2r.generation.state import PIECE


def whole_mask(request: Request, state: Any) -> Tensor | None:
    """Return the padding mask of prompts, after that of the state from which they continue. None: no padding."""
    ids, mask = request.ids, request.inputs.get("attention_mask")
    if state is not None:
        read = state.attention_mask().to(ids.device).repeat_interleave(ids.shape[0] // state.rows, dim=0)
        mask = torch.cat([read, torch.ones_like(ids) if mask is None else mask.to(read)], dim=1)
    return None if mask is None or bool(mask.all()) else mask


def prefill(model: Any, request: Request, state: Any) -> tuple[Any, Tensor]:
    """Read the prompts in chunks. Returns the cache, and the logits of the next token."""
    ids, inputs, past = request.ids, dict(request.inputs), 0
    if model.config.is_encoder_decoder:
        out = model(**model.prepare_inputs_for_generation(ids, is_first_iteration=True, **inputs))
        return inputs["past_key_values"], out.logits[:, -1].to(torch.float32, copy=True)
    cache, mask = inputs["past_key_values"], whole_mask(request, state)
    if state is not None:
        cache, past = state.fork(ids.shape[0] // state.rows), state.get_seq_length()
    read_so_far = torch.ones(ids.shape[0], past + ids.shape[1], device=ids.device) if mask is None else mask
    positions = (read_so_far.cumsum(1).long() - 1).clamp_min(0)[:, past:]
    for start in range(0, ids.shape[1], PIECE):
        end = min(start + PIECE, ids.shape[1])
        part: dict[str, Any] = {"input_ids": ids[:, start:end], "past_key_values": cache, "use_cache": True}
        if mask is not None:
            part["attention_mask"] = mask[:, : past + end]
        if "position_ids" in inputs:
            part["position_ids"] = positions[:, start:end]
        if "logits_to_keep" in inputs:
            part["logits_to_keep"] = 1
        logits = model(**part).logits
    return cache, logits[:, -1].to(torch.float32, copy=True)
