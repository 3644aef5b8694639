"""The texts that experiments use: their names, files, sources and preparation."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from t2r.errors import T2RError
from t2r.storage import kind_of, whole_file

PACKED = ("", ".xz", ".gz")
"""Suffixes of plain and compressed files."""


@dataclass(frozen=True)
class Text:
    """A text of an experiment."""

    files: tuple[str, ...]
    """Possible paths in the user's folder, without the suffix of a compressed file."""
    source: str
    """A description of the text and its source."""
    raw: tuple[str, ...] = ()
    """Possible paths of the tokenized text, which is detokenized first (see `t2r.data.wikitext`)."""
    lines: int | None = None
    """Number of lines to use, from the beginning. None: all."""


def wikitext(split: str) -> Text:
    return Text(
        files=(f"wikitext/{split}.txt",),
        raw=(f"wikitext/{split}.raw.txt", f"wikitext/wiki.{split}.raw"),
        source="WikiText-2 raw (Salesforce/wikitext, wikitext-2-raw-v1, on the Hugging Face hub)",
    )


TEXTS = {f"wikitext/{split}": wikitext(split) for split in ("train", "valid", "test")} | {
    f"novels/{split}": Text(
        files=(f"novels/{split}.txt",),
        source="English novels in the public domain (Project Gutenberg), one paragraph per line; train, valid and test "
        "are different books",
    )
    for split in ("train", "valid", "test")
}
TEXTS |= {
    f"wikitext103/{split}": Text(
        files=(f"wikitext103/wiki.{split}.tokens", f"wikitext/{split}.wt103.tokens.txt"),
        source="WikiText-103, the token files (Salesforce/wikitext, wikitext-103-v1, on the Hugging Face hub)",
    )
    for split in ("train", "valid", "test")
}
WIKI = (
    "English Wikipedia, without the articles of WikiText valid and test and without paragraphs that share a run of 13 \
words with them"
)
TEXTS |= {
    "wiki/enwiki2018-core": Text(("wiki/enwiki2018-core.txt",), f"{WIKI}: 4,835 long articles, 15.6M words"),
    "wiki/enwiki2014-later": Text(("wiki/enwiki2014-later.txt",), f"{WIKI}: 8,577 later articles, 14.0M words"),
    "speeches": Text(
        ("speeches.txt", "mt/en-de/more/europarl3.en"),
        source="the English side of Europarl (statmt.org/europarl), one sentence per line",
        lines=8000,
    ),
}

PAIRS = {
    "en-de": ("newstest2013", "newstest2014", ("europarl3", "suttacentral", "games")),
    "en-fr": ("newstest2013", "newstest2014", ("suttacentral", "games")),
    "zh-en": (
        "newstest2018",
        "newstest2017",
        ("msdocs-ht", "softdocs-po", "lctt-opensource", "kubernetes", "games", "mdn"),
    ),
}
"""Language pairs: news for validation, news for the test, and further training text."""


def parallel(pair: str, name: str, file: str, source: str) -> dict[str, Text]:
    """Return both sides of a parallel text."""
    return {
        f"mt/{pair}/{name}.{language}": Text((f"mt/{pair}/{file}.{language}",), source) for language in pair.split("-")
    }


for pair, (valid, test, more) in PAIRS.items():
    TEXTS |= parallel(pair, "train", "train", f"{pair}: Tatoeba, software and news, one sentence per line")
    TEXTS |= parallel(pair, "valid", f"valid.{valid}", f"{pair}: {valid} (WMT)")
    TEXTS |= parallel(pair, "test", f"test.{test}", f"{pair}: {test} (WMT), the paper's test set")
    for file in more:
        TEXTS |= parallel(pair, file, f"more/{file}", f"{pair}: further training text, {file}")
# The English side of Europarl is stored once.
TEXTS |= {
    f"mt/en-fr/europarl3.{language}": Text((f"mt/{folder}/more/europarl3.{language}",), "en-fr: Europarl, release 3")
    for language, folder in (("en", "en-de"), ("fr", "en-fr"))
}


def missing(names: Sequence[str], folder: Path | None) -> list[str]:
    """Return the files of the texts that are missing from the folder."""
    return [
        TEXTS[name].files[0]
        for name in names
        if folder is None or not (_find(folder, TEXTS[name].files) or _find(folder, TEXTS[name].raw))
    ]


def check_names(names: Sequence[str], where: str) -> None:
    if unknown := sorted(set(names) - set(TEXTS)):
        raise T2RError(f"{where}: no text {', '.join(unknown)}; the texts are {', '.join(TEXTS)}")


def prepared(name: str, folder: Path, work: Path) -> Path:
    """Return the file of a text: the user's own, or one prepared from it in the folder `work`."""
    text = TEXTS[name]
    found, raw = _find(folder, text.files), None
    if found is None:
        raw = _find(folder, text.raw)
    elif text.lines is None:
        return found
    out = work / f"{name}.txt"
    if out.is_file():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    if found is not None:
        opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(found.suffix, open)
        with whole_file(out) as temporary, opener(found, "rt", encoding="utf-8") as lines:
            temporary.write_text("".join(islice(lines, text.lines)), encoding="utf-8")
    elif raw is not None:
        from t2r.data.wikitext import prepare

        prepare(str(raw), out)
    else:
        raise T2RError(f"text {name} was not found in {folder}")
    return out


def _find(folder: Path, files: Sequence[str]) -> Path | None:
    paths = (folder / f"{name}{suffix}" for name in files for suffix in PACKED)
    return next((path for path in paths if kind_of(path) == "file"), None)
