"""The token that begins every text of a model.

Blocks and windows are cut out of a text that is tokenized without special tokens. A model that has seen BOS before
everything that it read, such as Gemma 3, needs it there too: without it, its perplexity is far higher. The token takes
the place of the first one, so lengths and scored tokens are those of a model without it.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase


def bos_of(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the BOS token if the tokenizer puts it before every text by itself, otherwise None."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return None
    own, plain = (tokenizer("a", add_special_tokens=special).input_ids[:1] for special in (True, False))
    return bos if own == [bos] != plain else None
