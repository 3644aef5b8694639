"""What an evaluation starts from: a text, as a tokenizer sees it, for models that can read it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from t2r.data.text import find_sources
from t2r.errors import T2RError


def read_text(names: str | Path | Sequence[str], tokenizer: Tokenizer) -> str:
    """Everything that the names stand for, as one text: files or globs, as for training."""
    names = str(names) if isinstance(names, Path) else names
    parts = (part for source in find_sources(names) for part in source.read(tokenizer, False, lambda _: None))
    text = "".join(f"{part.text}\n" if part.ends and part.text else part.text for part in parts)
    if not text.strip():
        raise T2RError(f"{names} is empty")
    return text


@dataclass(frozen=True)
class Text:
    """A text as one tokenizer sees it."""

    string: str
    token_ids: Tensor
    ends: list[int] | None
    """Where in the string each token ends; None where the tokenizer does not say."""

    def between(self, first: int, last: int) -> str | None:
        """What the tokens from `first` up to, but without, `last` say."""
        if self.ends is None:
            return None
        return self.string[self.ends[first - 1] if first else 0 : self.ends[last - 1]]


def encode(tokenizer: Tokenizer, string: str) -> Text:
    """The whole text at once, without special tokens: a window somewhere inside it would have none either."""
    fast = bool(tokenizer.is_fast)
    # verbose: a text is longer than any model's context, and needs no warning that it is
    coded = tokenizer(string, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
    ends = [end for _, end in coded["offset_mapping"]] if fast else None
    return Text(string, torch.tensor(coded["input_ids"], dtype=torch.long), ends)


def refuse_seq2seq(config: Any, name: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise T2RError(
            f"{name} is an encoder-decoder: it translates a source, and plain text gives it none; "
            "only language models (causal ones) can be evaluated on a text"
        )


def positions_of(config: Any) -> int | None:
    """How many positions a model was made for; None where its configuration does not say.

    Beyond them a table of learned positions ends, and with rotary positions a model that never saw any further gives
    nonsense without a word."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None
