"""Reading and tokenizing texts for evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from t2r.data.beginning import bos_of
from t2r.data.text import find_sources
from t2r.errors import T2RError
from t2r.surgery.adapters import FAMILIES, family


def read_text(names: str | Path | Sequence[str], tokenizer: Tokenizer) -> str:
    """Return the concatenated text of files, globs or `datasets:` names, as for training."""
    names = str(names) if isinstance(names, Path) else names
    pieces: list[str] = []
    for source in find_sources(names):
        if pieces and not pieces[-1].endswith("\n"):  # the last line of the previous file
            pieces.append("\n")
        parts = source.read(tokenizer, False, lambda _: None)
        pieces += [f"{part.text}\n" if part.ends else part.text for part in parts if part.text]
    text = "".join(pieces)
    if not text.strip():
        raise T2RError(f"{names} is empty")
    return text


@dataclass(frozen=True)
class Text:
    """A text and its tokens."""

    string: str
    token_ids: Tensor
    ends: list[int] | None
    """The end of each token in the string; None if the tokenizer does not provide offsets."""
    bos: int | None = None
    """The token that begins each window, in place of its own first (see `t2r.data.beginning`). None: its own."""

    @property
    def read(self) -> list[int]:
        """The tokens that a model reads, each once."""
        return [*self.token_ids.unique().tolist(), *([] if self.bos is None else [self.bos])]

    def between(self, first: int, last: int) -> str | None:
        """Return the text of the tokens from `first` to `last` (exclusive)."""
        if self.ends is None:
            return None
        return self.string[self.ends[first - 1] if first else 0 : self.ends[last - 1]]


def encode(tokenizer: Tokenizer, string: str) -> Text:
    """Tokenize a whole text, without special tokens: they belong to windows of it."""
    fast = bool(tokenizer.is_fast)
    # verbose=False suppresses the warning that the text is longer than the model's context.
    coded = tokenizer(string, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
    ends = [end for _, end in coded["offset_mapping"]] if fast else None
    return Text(string, torch.tensor(coded["input_ids"], dtype=torch.long), ends, bos_of(tokenizer))


def refuse_seq2seq(config: Any, name: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise T2RError(
            f"{name} is an encoder-decoder, which requires source texts; only causal language models can be evaluated "
            "on plain text"
        )


def positions_of(config: Any) -> int | None:
    """Return the number of positions of a model, or None if its configuration does not state it.

    Beyond them, learned positions are an index error, and the results of rotary positions are meaningless."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def has_position_table(config: Any) -> bool:
    """Return whether positions are learned, so that a model cannot read beyond them. For a model type without an
    adapter, this is assumed if its configuration has no rotary positions."""
    text = config.get_text_config()
    if text.model_type in FAMILIES:
        return family(text.model_type).positions == "learned"
    return not any(getattr(text, name, None) for name in ("rope_parameters", "rope_scaling", "rope_theta"))
