"""A model that is served: its engine, its tokenizer, and what they can do."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from t2r.attention.state_file import fingerprint
from t2r.errors import T2RError
from t2r.generation.engine import Engine
from t2r.generation.text import special_tokens
from t2r.serving.tokens import TokenTexts
from t2r.surgery.adapters import family_of


class ServedModel:
    """A model with its engine and its tokenizer. Raises T2RError if the engine does not support the model.

    Args:
        name: the name by which clients choose it.
        model: a swapped model, or another one that the engine supports.
        tokenizer: its tokenizer.
        rows: the maximum number of sequences that run at the same time. None: that of the engine.
    """

    def __init__(self, name: str, model: Any, tokenizer: PreTrainedTokenizerBase, rows: int | None = None) -> None:
        self.name, self.tokenizer = name, tokenizer
        self.engine = Engine(model, rows=rows)
        if self.engine.obstacle is not None:
            raise T2RError(f"{name} cannot be served: {self.engine.obstacle}")
        self.model = self.engine.model
        self.defaults = model.generation_config
        self.translates = bool(model.config.is_encoder_decoder)
        self.templated = bool(tokenizer.chat_template) and not self.translates
        self.stops, self.pad = special_tokens(model, tokenizer)
        self.fingerprint = fingerprint(self.model)
        """Identifies the weights, and with them the states of this model."""
        self.created = int(time.time())
        size = getattr(self.model.config.get_text_config(), "vocab_size", None)
        self.vocabulary = int(size or len(tokenizer))
        self.positions = family_of(self.model).max_positions(self.model)
        """The number of tokens that a sequence may have. None: as many as one likes."""

    @functools.cached_property
    @torch.no_grad()
    def facts(self) -> dict[str, Any]:
        """Return what a client may want to know beyond OpenAI's description of a model."""
        model = self.model
        if self.translates:
            what = {"kind": "encoder-decoder"}
        else:
            kept, layers = len(model.kept_layers()), model.count_layers()
            one, two = (model.make_static_cache(1, length if kept else None).nbytes for length in (1, 2))
            kind = "rnn" if not kept else "transformer" if kept == layers else "hybrid"
            what = {"kind": kind, "state_bytes": 2 * one - two, "bytes_per_token": two - one}
        dtype = str(model.dtype).removeprefix("torch.")
        more = {"chat_template": self.templated, "vocabulary": self.vocabulary, "fingerprint": self.fingerprint}
        return {**what, **more, "dtype": dtype, "device": str(model.device)}

    @functools.cached_property
    def words(self) -> TokenTexts:
        """The texts of single tokens."""
        return TokenTexts(self.tokenizer)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the tokens of a text. With `special`, those with which a text begins are added."""
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False).input_ids)


def name_of(source: str | Path) -> str:
    """Return the name of a model by which clients choose it: the last part of its folder or hub name."""
    text = str(source)
    return (Path(text).resolve() if Path(text).exists() else Path(text)).name or "model"
