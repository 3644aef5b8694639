"""A long document read once, then asked many times: its state, made, kept and shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from t2r.attention.cache import T2RCache, read_header
from t2r.errors import T2RError
from t2r.model.modeling import T2RModel

PIECE = 2048
"""Tokens read at a time: what is not the state is bounded by this, however long the document."""


@torch.no_grad()
def read_document(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    state: T2RCache | None = None,
    on_tokens: Callable[[int, int], None] | None = None,
) -> T2RCache:
    """The state after a text, or after one more text if a state is given, which is left as it is."""
    refuse_stateless(model)
    ids = torch.tensor([tokenizer(text, add_special_tokens=state is None, verbose=False).input_ids]).to(model.device)
    if ids.shape[1] == 0:
        raise T2RError("there is nothing to read")
    cache: Any = model.make_cache() if state is None else state.fork()
    for start in range(0, ids.shape[1], PIECE):
        model(input_ids=ids[:, start : start + PIECE], past_key_values=cache, use_cache=True)
        if on_tokens is not None:
            on_tokens(min(start + PIECE, ids.shape[1]), ids.shape[1])
    return cache


def refuse_stateless(model: Any) -> None:
    if not isinstance(model, T2RModel):
        raise T2RError("only a swapped model has a state: this one keeps every token it has read")
    if model.config.is_encoder_decoder:
        raise T2RError("states of documents are for language models: an encoder-decoder reads its source at once")


def describe_state(path: str | Path) -> dict[str, Any]:
    """What a state file holds, without the model that made it."""
    header = read_header(path)
    lengths = header["lengths"]
    return {
        "format": header["format"],
        "sequences": header["rows"],
        "tokens": max(lengths.values(), default=0),
        "layers": len(lengths),
        "bytes": Path(path).stat().st_size,
        "fingerprint": header["fingerprint"],
    }
