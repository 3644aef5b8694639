"""WikiText as ordinary text: its raw files separate every sign by spaces, which a subword model has never seen.

    python -m t2r.data.wikitext wiki.valid.raw valid.txt
    python -m t2r.data.wikitext datasets:Salesforce/wikitext:wikitext-2-raw-v1:validation valid.txt

Perplexities on WikiText compare only where the text was prepared alike.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from t2r.data.text import find_sources
from t2r.storage import write_text

JOINED = {" @-@ ": "-", " @,@ ": ",", " @.@ ": "."}
BEFORE_SIGN = re.compile(r" (?=[,.;:!?%)\]])")
AFTER_BRACKET = re.compile(r"(?<=[(\[]) ")
ENDINGS = {" 's": "'s", " n't": "n't"}


def detokenize(text: str) -> str:
    """Join what WikiText's tokenizer took apart: signs inside numbers and words, punctuation, brackets, and endings.
    Quotation marks stay apart: nothing says which of a pair opens."""
    for apart, joined in JOINED.items():
        text = text.replace(apart, joined)
    text = text.replace(" \n", "\n")
    text = AFTER_BRACKET.sub("", BEFORE_SIGN.sub("", text))
    for apart, joined in ENDINGS.items():
        text = text.replace(apart, joined)
    return text


def prepare(source: str, out: str | Path) -> None:
    """Write the detokenized text of a file, of a glob, or of a `datasets:` name."""
    parts = (
        part.text
        for found in find_sources(source)
        for part in found.read(None, False, lambda _: None)  # type: ignore[arg-type]
    )
    write_text(out, detokenize("".join(parts)))


if __name__ == "__main__":
    prepare(*sys.argv[1:3])
