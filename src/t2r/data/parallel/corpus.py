"""The tokens of parallel text.

In training, a pair that cannot be learned from is skipped, with a notice that has its line: a side is empty, or has
more tokens than the model has positions. Nothing is skipped where translations are scored.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from t2r.compat import encode
from t2r.data import fingerprint
from t2r.data.corpus import FORMAT, CorpusWriter, TokenCorpus, read_header
from t2r.data.parallel.lines import LineSource, find_file, read_pairs
from t2r.data.progress import progress_bar
from t2r.errors import T2RError
from t2r.words import counted

logger = logging.getLogger(__name__)

LINES = 4096
"""Lines per tokenization batch."""
SHOWN = 3
"""Line numbers shown in a notice."""


def encode_sources(tokenizer: PreTrainedTokenizerBase, lines: list[str]) -> list[list[int]]:
    """Tokenize sources."""
    return encode(tokenizer, text=lines)


def read_tokens(lines: list[str]) -> list[list[int]]:
    """Parse targets that are written as token ids separated by spaces."""
    return [[int(token) for token in line.split()] for line in lines]


def encode_targets(tokenizer: PreTrainedTokenizerBase, lines: list[str]) -> list[list[int]]:
    """Tokenize targets."""
    return encode(tokenizer, text_target=lines)


class ParallelCorpus:
    """The tokens of a pair of files: a corpus of sources and one of targets, with one document per pair."""

    def __init__(self, name: str, source: TokenCorpus, target: TokenCorpus) -> None:
        self.name, self.source, self.target = name, source, target
        assert source.header is not None
        self.skipped: list[int] = source.header["skipped"]
        """Numbers of lines with an empty side."""
        ends = [np.append(side.starts, len(side)) for side in (source, target)]
        self.source_lengths, self.target_lengths = (np.diff(x) for x in ends)
        self.lengths: NDArray[np.int64] = np.maximum(self.source_lengths, self.target_lengths)
        """The tokens of each pair: of the longer side."""

    def __len__(self) -> int:
        """How many pairs."""
        return len(self.source_lengths)

    @property
    def key(self) -> str:
        return self.source.key

    def line(self, pair: int) -> int:
        """The number of the line in its files, from 1."""
        number = pair + 1
        for skipped in self.skipped:
            if skipped > number:
                break
            number += 1
        return number

    def __getitem__(self, pair: int) -> Pair:
        return self.take(np.array([pair]))[0]

    def take(self, pairs: NDArray[np.int64]) -> list[Pair]:
        """Return several pairs. All their tokens are read at once: one by one takes longer than a training step."""
        sides = []
        for corpus, lengths in ((self.source, self.source_lengths), (self.target, self.target_lengths)):
            ends = np.cumsum(lengths[pairs])
            shifts = np.repeat(np.asarray(corpus.starts)[pairs] - ends + lengths[pairs], lengths[pairs])
            tokens = np.asarray(corpus.tokens)[shifts + np.arange(ends[-1])].astype(np.int64)
            sides.append(np.split(tokens, ends[:-1]))
        return [Pair(*sides_) for sides_ in zip(*sides, strict=True)]


class Pair(NamedTuple):
    """Token ids of both sides."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]


def tokenize_pairs(
    source: str | LineSource,
    target: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str | None = None,
    as_tokens: bool = False,
    cache_dir: str | Path | None = None,
    progress: bool = True,
    tokenizer_key: str | None = None,
) -> ParallelCorpus:
    """Tokenize a pair of files, or take them from the cache if the files and the tokenizer are unchanged. Pairs with an
    empty side are skipped, with a notice.

    Args:
        source: file of sources, or its lines.
        target: file of targets.
        tokenizer: the tokenizer.
        name: name of the pair in notices.
        as_tokens: the targets are token ids separated by spaces.
        cache_dir: cache folder. None: `pairs` in `T2R_CACHE` or in `~/.cache/t2r`.
        progress: whether to show a progress bar.
        tokenizer_key: the tokenizer's fingerprint, if known.
    """
    files = find_file(source) if isinstance(source, str) else source, find_file(target)
    source = str(files[0].path)
    tokenizer_key = tokenizer_key or fingerprint.of_tokenizer(tokenizer)
    root = Path(cache_dir or fingerprint.cache_folder("pairs")).expanduser()

    def folders() -> list[Path]:
        made = [FORMAT, tokenizer_key, languages(tokenizer), as_tokens, [file.fingerprint() for file in files]]
        return [root / fingerprint.digest([*made, side]) for side in ("source", "target")]

    places = folders()
    if any(read_header(place) is None for place in places):
        write_pairs(files, places, tokenizer, as_tokens, progress)
        if folders() != places:
            raise T2RError(f"{source} or {target} changed while it was read: try again when it is complete")
    corpus = ParallelCorpus(name or source, *map(TokenCorpus, places))
    if corpus.skipped:
        what = "with an empty source or no translation that fits and ends" if as_tokens else "with an empty side"
        notice(corpus.skipped, name or f"{source}, {target}", what)
    if not len(corpus):
        raise T2RError(f"{name}: there are no pairs" if name else f"there are no pairs in {source} and {target}")
    return corpus


def languages(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Return the source and target languages of a multilingual tokenizer."""
    return [getattr(tokenizer, name, None) for name in ("src_lang", "tgt_lang")]


def write_pairs(
    files: tuple[LineSource, LineSource],
    places: list[Path],
    tokenizer: PreTrainedTokenizerBase,
    as_tokens: bool,
    progress: bool,
) -> None:
    highest = max(*tokenizer.get_vocab().values(), *getattr(tokenizer, "target_encoder", {}).values())
    dtype = np.dtype(np.uint16 if highest <= np.iinfo(np.uint16).max else np.uint32)
    skipped: list[int] = []
    number = 0
    with (
        CorpusWriter(places[0], dtype) as sources,
        CorpusWriter(places[1], dtype) as targets,
        progress_bar("tokenizing pairs", files[0].size, "bytes", shown=progress) as report,
    ):
        pairs = read_pairs(*files, report)
        while batch := list(islice(pairs, LINES)):
            ours, theirs = zip(*batch, strict=True)
            targets_ids = read_tokens(list(theirs)) if as_tokens else encode_targets(tokenizer, list(theirs))
            encoded = encode_sources(tokenizer, list(ours)), targets_ids
            for texts, *ids in zip(batch, *encoded, strict=True):
                number += 1
                if all(text.strip() for text in texts) and all(ids):
                    for writer, side in zip((sources, targets), ids, strict=True):
                        writer.add(side)
                        writer.end_document(None, True)
                else:
                    skipped.append(number)
        about = {"sources": [str(file.path) for file in files], "lines": number, "skipped": skipped}
        for writer in (targets, sources):
            writer.commit(about)


def notice(lines: Sequence[int], where: str, what: str) -> None:
    """Log the number of skipped pairs, what they have in common, and their first line numbers."""
    numbers = ", ".join(map(str, lines[:SHOWN])) + (", ..." if len(lines) > SHOWN else "")
    verb = "is" if len(lines) == 1 else "are"
    logger.warning("%s: %s %s %s skipped (line %s)", where, counted(len(lines), "pair"), what, verb, numbers)
