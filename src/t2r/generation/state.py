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
from t2r.generation.turns import Transcript, opened, refuse_no_template, transcript_of
from t2r.model.logits import last_only
from t2r.model.modeling import T2RModel
from t2r.options.entrance import entrance
from t2r.surgery.adapters import family_of

PIECE = 2048
"""Tokens read at a time, which bounds the memory for activations."""


@torch.no_grad()
@entrance()
def read_document(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    state: T2RCache | None = None,
    on_tokens: Callable[[int, int], None] | None = None,
    *,
    chat: bool = False,
) -> T2RCache:
    """Return the state of a swapped model after reading a text.

        state = t2r.read_document(model, tokenizer, book)
        t2r.generate(model, "The end is", tokenizer=tokenizer, state=state)

    Args:
        model: a swapped language model.
        tokenizer: its tokenizer.
        text: the text to read.
        state: a state to continue from. It is not modified.
        on_tokens: called with the number of tokens read and the total.
        chat: whether the text is the beginning of a chat message, formatted with the tokenizer's chat template. The
            first question then completes this message. After a state inside such a message, the text goes on in it.
    """
    refuse_stateless(model)
    if not isinstance(text, str):
        raise T2RError(f"the text must be a str; got a {type(text).__name__}")
    if state is not None:
        state.checked(model)
    said = None
    if chat or is_inside(tokenizer, state):
        said, text = in_message(tokenizer, text, state)
    begins = state is None and said is None
    ids = torch.tensor([tokenizer(text, add_special_tokens=begins, verbose=False).input_ids]).to(model.device)
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
    options = last_only(model)  # the logits of a piece would be gigabytes
    for start in range(0, ids.shape[1], PIECE):
        model(input_ids=ids[:, start : start + PIECE], past_key_values=cache, use_cache=True, **options)
        if on_tokens is not None:
            on_tokens(min(start + PIECE, ids.shape[1]), ids.shape[1])
    cache.chat = None if said is None else said.of_state(cache.get_seq_length())
    return cache


def in_message(tokenizer: PreTrainedTokenizerBase, text: str, state: T2RCache | None) -> tuple[Transcript, str]:
    """Return what was said after a document that begins a message of the user, and the text to read after the state."""
    refuse_no_template(tokenizer)
    said = transcript_of(state, tokenizer)
    head = opened(tokenizer, said.messages)
    if not head.startswith(said.text):
        raise T2RError("the chat template changes earlier messages: it cannot read a document after them")
    new = head[len(said.text) :] + text.rstrip() + "\n\n"
    return Transcript(said.messages, head, document=True), new


def is_inside(tokenizer: PreTrainedTokenizerBase, state: T2RCache | None) -> bool:
    """Return whether a state is inside a message of the user, after the beginning of a document."""
    if state is None or state.chat is None or not tokenizer.chat_template:
        return False
    said = transcript_of(state, tokenizer)
    return said.document and said.text == opened(tokenizer, said.messages)


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
    } | ({} if header.get("chat") is None else {"messages": len(header["chat"]["messages"])})
