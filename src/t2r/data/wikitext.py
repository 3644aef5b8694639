"""Detokenization of WikiText. Its raw files put spaces around punctuation, unlike the training text of subword models.

    python -m t2r.data.wikitext wiki.valid.raw valid.txt
    python -m t2r.data.wikitext datasets:Salesforce/wikitext:wikitext-2-raw-v1:validation valid.txt

Perplexities on WikiText are comparable only if the text was prepared in the same way.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from t2r.data.text import whole_text
from t2r.storage import write_text

JOINED = {" @-@ ": "-", " @,@ ": ",", " @.@ ": "."}
BEFORE_SIGN = re.compile(r" (?=[,.;:!?%)\]])")
AFTER_BRACKET = re.compile(r"(?<=[(\[]) ")
ENDINGS = {" 's": "'s", " n't": "n't"}


def detokenize(text: str) -> str:
    """Undo WikiText's tokenization: join hyphens and separators, punctuation, brackets and word endings.

    Spaces around quotation marks are kept, because opening and closing marks cannot be distinguished."""
    for apart, joined in JOINED.items():
        text = text.replace(apart, joined)
    text = text.replace(" \n", "\n")
    text = AFTER_BRACKET.sub("", BEFORE_SIGN.sub("", text))
    for apart, joined in ENDINGS.items():
        text = text.replace(apart, joined)
    return text


def prepare(source: str, out: str | Path) -> None:
    """Write the detokenized text of a file, a glob, or a `datasets:` name."""
    write_text(out, detokenize(whole_text(source)))


if __name__ == "__main__":
    prepare(*sys.argv[1:3])
