"""States of documents, which are read once and continued many times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from t2r.attention.cache import T2RCache
from t2r.attention.state_file import read_header
from t2r.errors import T2RError
from t2r.model.modeling import T2RModel
from t2r.surgery.adapters import family_of

PIECE = 2048
"""Tokens read at a time, which bounds the memory for activations."""


@torch.no_grad()
def read_document(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    state: T2RCache | None = None,
    on_tokens: Callable[[int, int], None] | None = None,
) -> T2RCache:
    """Return the state of a swapped model after reading a text.

    Args:
        model: a swapped language model.
        tokenizer: its tokenizer.
        text: the text to read.
        state: a state to continue from. It is not modified.
        on_tokens: called with the number of tokens read and the total.
    """
    refuse_stateless(model)
    ids = torch.tensor([tokenizer(text, add_special_tokens=state is None, verbose=False).input_ids]).to(model.device)
    if ids.shape[1] == 0:
        raise T2RError("the text has no tokens")
    check_vocabulary(model, ids[0].tolist())
    before = 0 if state is None else state.get_seq_length()
    limit = family_of(model).max_positions(model)
    if limit is not None and before + ids.shape[1] > limit:
        raise T2RError(
            f"a document of {ids.shape[1]:,} tokens{f' after {before:,}' if before else ''} is beyond the {limit:,} "
            "positions of this model: use a model with rotary or computed positions"
        )
    cache: Any = model.make_cache() if state is None else state.fork()
    for start in range(0, ids.shape[1], PIECE):
        model(input_ids=ids[:, start : start + PIECE], past_key_values=cache, use_cache=True)
        if on_tokens is not None:
            on_tokens(min(start + PIECE, ids.shape[1]), ids.shape[1])
    return cache


def check_vocabulary(model: Any, ids: Sequence[int], *, targets: bool = False) -> None:
    """Raise T2RError for tokens outside the vocabulary of the model, which would be an index error.

    The sources of an encoder-decoder may have another vocabulary than its `targets`."""
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    if model.config.is_encoder_decoder and not targets:
        size = model.get_input_embeddings().weight.shape[0]
    if size is not None and ids and max(ids) >= size:
        raise T2RError(
            f"the text has token {max(ids)}, but the model's vocabulary ends at {size - 1}: the tokenizer does not "
            "belong to the model"
        )


def check_source_length(model: Any, length: int) -> None:
    """Raise T2RError if the encoder of an encoder-decoder has too few positions, which would be an index error."""
    if not model.config.is_encoder_decoder:
        return
    table = getattr(model.get_encoder(), "embed_positions", None)
    limit = model.config.max_position_embeddings if isinstance(table, nn.Embedding) else None
    if limit is not None and length > limit:
        raise T2RError(f"a prompt of {length} tokens is beyond the {limit} positions of the encoder: split it")


def refuse_stateless(model: Any) -> None:
    if not isinstance(model, T2RModel):
        raise T2RError("only a swapped model has a state: swap or convert this model first")
    if model.config.is_encoder_decoder:
        raise T2RError("states of documents require a language model, not an encoder-decoder")


def describe_state(path: str | Path) -> dict[str, Any]:
    """Return a description of a saved state. The model is not needed."""
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
