"""Parallel text from pairs of files or columns of a dataset, and blocks of pairs of similar length.

A block holds as many pairs as fit into `block_size` tokens: the number of pairs times the length of the longest, where
the length of a pair is that of its longer side (as fairseq's `max-tokens`). Pairs are sorted by length, which reduces
padding. The blocks are the same in every epoch; `t2r.training.order` permutes them.

Files that do not fit together are refused: one is missing, or has another number of lines. In training, a pair that
cannot be learned from is skipped, with a notice that has its line: a side is empty, or has more tokens than the model
has positions. Nothing is skipped where translations are scored.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, islice, pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from t2r.data import fingerprint
from t2r.data.corpus import FORMAT, CorpusWriter, TokenCorpus, read_header
from t2r.data.mixture import (
    Sources,
    WeightedSource,
    check_shares,
    exact,
    join_equal,
    parse_source,
    readings_of_shares,
)
from t2r.data.progress import progress_bar
from t2r.data.text import DatasetSource, FileSource, check_unicode, find_sources
from t2r.errors import T2RError

logger = logging.getLogger(__name__)

LINES = 4096
"""Lines per tokenization batch."""
NARROWEST = 8
"""The smallest width of a block."""
SHOWN = 3
"""Line numbers shown in a notice."""


# --- What is asked for --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairedSource:
    """A file of sources with its weight, and the file of its targets."""

    weighted: WeightedSource
    target: str

    @property
    def source(self) -> str:
        return self.weighted.source

    def __str__(self) -> str:
        return f"{self.weighted} -> {self.target}"


def parse_pairs(source: Sources | None, target: Sources | None, for_all: Sequence[str] = ()) -> list[PairedSource]:
    """Pair source files with target files, in order. Sources may have weights. A single target that is in `for_all`
    applies to every source."""
    sources = [parse_source(entry) for entry in as_list(source)]
    targets = [str(entry) for entry in as_list(target)]
    if len(targets) == 1 and targets[0] in for_all:
        targets *= len(sources)
    if len(sources) != len(targets):
        raise T2RError(
            f"there are {len(sources)} files of sources and {len(targets)} of targets: give each source its target"
        )
    check_shares(sources)
    return [PairedSource(*pair) for pair in zip(sources, targets, strict=True)]


def as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    if isinstance(given, dict):
        return list(given.items())
    return [given] if isinstance(given, str | Path) else list(given)


class LineSource(Protocol):
    """One side of parallel text: lines in order."""

    @property
    def path(self) -> Path | str:
        """The name in messages."""

    @property
    def size(self) -> int:
        """The number of bytes to read, in the same units as reported by `read_lines`."""

    def fingerprint(self) -> Any:
        """Return a value that changes when the text changes."""

    def read_lines(self, report: Any = lambda _: None) -> Iterator[str]:
        """Yield every line, also empty ones."""


@dataclass(frozen=True)
class DatasetColumn:
    """`datasets:NAME[:CONFIG][:SPLIT]@LANGUAGE`: one language of a dataset whose rows have a `translation`, such as
    `{"translation": {"en": ..., "de": ...}}`, or a column with this name."""

    name: str

    @cached_property
    def dataset(self) -> DatasetSource:
        return DatasetSource(self.name.rpartition("@")[0])

    @property
    def path(self) -> str:
        return self.name

    @property
    def size(self) -> int:
        return self.dataset.size

    def fingerprint(self) -> Any:
        return [self.name, self.dataset.fingerprint()]

    def read_lines(self, report: Any = lambda _: None) -> Iterator[str]:
        language = self.name.rpartition("@")[2]
        size, count = self.size, len(self.dataset.rows)
        for index, row in enumerate(self.dataset.rows):
            report(size * index // count)
            text = (row.get("translation") or row).get(language)
            if not isinstance(text, str):
                raise T2RError(f"{self.name}, row {index}: there is no text in {language!r}")
            check_unicode(text, f"{self.name}, row {index}")
            yield " ".join(text.split())  # a sentence is one line


def find_file(name: str) -> LineSource:
    """Return the file or the column of a dataset with this name. Globs are refused."""
    if name.startswith("datasets:"):
        if not re.fullmatch(r"datasets:.+@[\w-]+", name):
            raise T2RError(f"{name}: name the language of this side, such as {name}@en")
        return DatasetColumn(name)
    found = find_sources(name)
    if len(found) != 1 or not isinstance(found[0], FileSource):
        raise T2RError(f"{name}: parallel text is read from pairs of files: name one file for each side")
    return found[0]


# --- Tokens -------------------------------------------------------------------------------------------------


def read_pairs(source: LineSource, target: LineSource, report: Any = lambda _: None) -> Iterator[tuple[str, str]]:
    """Yield the lines of both files in pairs. Raises T2RError if the numbers of lines differ."""
    lines = zip_longest(source.read_lines(report), target.read_lines())
    for number, (ours, theirs) in enumerate(lines, 1):
        if ours is None or theirs is None:
            short, other = (source, target) if ours is None else (target, source)
            rest = 1 + sum(1 for _ in lines)
            raise T2RError(
                f"{short.path} ends after line {number - 1}, and {other.path} has {number - 1 + rest} lines: "
                "line by line, one is the translation of the other"
            )
        yield ours, theirs


def encode_sources(tokenizer: PreTrainedTokenizerBase, lines: list[str]) -> list[list[int]]:
    """Tokenize sources."""
    return tokenizer(lines, return_attention_mask=False, verbose=False)["input_ids"]


def read_tokens(lines: list[str]) -> list[list[int]]:
    """Parse targets that are written as token ids separated by spaces."""
    return [[int(token) for token in line.split()] for line in lines]


def encode_targets(tokenizer: PreTrainedTokenizerBase, lines: list[str]) -> list[list[int]]:
    """Tokenize targets."""
    return tokenizer(text_target=lines, return_attention_mask=False, verbose=False)["input_ids"]


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
    source: str,
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
        source: file of sources.
        target: file of targets.
        tokenizer: the tokenizer.
        name: name of the pair in notices.
        as_tokens: the targets are token ids separated by spaces.
        cache_dir: cache folder. None: `pairs` in `T2R_CACHE` or in `~/.cache/t2r`.
        progress: whether to show a progress bar.
        tokenizer_key: the tokenizer's fingerprint, if known.
    """
    files = find_file(source), find_file(target)
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
        notice(corpus.skipped, name or f"{source}, {target}", "have an empty side")
    if not len(corpus):
        raise T2RError(f"there are no pairs in {source} and {target}")
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
    """Log the number of skipped pairs, the reason, and their first line numbers."""
    numbers = ", ".join(map(str, lines[:SHOWN])) + (", ..." if len(lines) > SHOWN else "")
    logger.warning("%s: %s pairs are skipped, which %s (line %s)", where, f"{len(lines):,}", what, numbers)


# --- Blocks -------------------------------------------------------------------------------------------------


def last_of_each(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the different values of a sorted array, and where each ends."""
    different, counts = np.unique(values, return_counts=True)
    return different, np.cumsum(counts)


def width_of(length: Any) -> Any:
    """Return the width of the blocks for pairs of this length: 8, 12, 16, 24, 32, 48, 64, 96, ...

    There are few widths, so that on a GPU a training step is captured for each of them. `length` may be an array."""
    power = 2 ** np.ceil(np.log2(np.maximum(length, NARROWEST))).astype(np.int64)
    return np.where((3 * power // 4 >= length) & (power > NARROWEST), 3 * power // 4, power)


class PairBlocks(Dataset[list[Pair]]):
    """Blocks of pairs of similar length, with the number of readings of each part per epoch.

    A block has a width, and `block_size // width` pairs that are not longer. Pairs that do not fill a block of their
    width are in wider blocks, so only the last block may be incomplete.

    Args:
        sources: the sources with their weights.
        corpora: the tokens of each source.
        block_size: tokens per block, padding included.
        positions: maximum length of a side. None: no limit.
        seed: seed for grouping pairs of equal length into blocks.
    """

    def __init__(
        self,
        sources: Sequence[WeightedSource],
        corpora: Sequence[ParallelCorpus],
        block_size: int,
        *,
        positions: int | None = None,
        seed: int = 0,
    ) -> None:
        self.block_size, self.corpora = block_size, corpora
        longest = block_size if positions is None else min(block_size, positions)
        self.too_long = [np.flatnonzero(corpus.lengths > longest) for corpus in corpora]
        """The skipped pairs of each corpus."""
        self.longest = longest
        self.blocks: list[NDArray[np.int64]] = []
        """The pairs of each block, as rows of corpus and number."""
        counts: list[int] = []
        # Sources with the same number of readings share blocks.
        unique = [replace(entry, source=f"{i}:{entry.source}") for i, entry in enumerate(sources)]
        self.members = join_equal(unique, ())
        for members in self.members:
            made = list(self.divide(members, np.random.default_rng([seed, len(counts)])))
            if not made:
                names = ", ".join(sources[i].source for i in members)
                raise T2RError(f"{names}: every pair has more than {longest} tokens: there is nothing to train on")
            self.blocks += made
            counts.append(len(made))
        if sources[0].share is None:
            readings = [exact(sources[members[0]].readings or 1.0) for members in self.members]
        else:
            readings = readings_of_shares([exact(sources[i].share) for (i,) in self.members], counts)
        self.portions: list[tuple[int, Fraction]] = list(zip(counts, readings, strict=True))
        self.ends = list(accumulate(counts))

    def divide(self, members: Sequence[int], random: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        """Yield the blocks of these corpora, from the shortest pairs to the longest."""
        pairs, lengths, targets = [], [], []
        for i in members:
            corpus = self.corpora[i]
            kept = np.setdiff1d(np.arange(len(corpus)), self.too_long[i])
            pairs.append(np.stack([np.full_like(kept, i), kept], axis=1))
            lengths.append(corpus.lengths[kept])
            targets.append(corpus.target_lengths[kept])
        pair, length, target = map(np.concatenate, (pairs, lengths, targets))
        shuffled = random.permutation(len(pair))
        width = np.minimum(width_of(length), self.longest)
        order = shuffled[np.lexsort((length[shuffled], target[shuffled], width[shuffled]))]
        start = 0
        for value, end in zip(*(x.tolist() for x in last_of_each(width[order])), strict=True):
            count = self.block_size // value
            while end - start >= count:
                yield pair[order[start : start + count]]
                start += count
        if start < len(order):
            yield pair[order[start:]]

    def shape_of(self, length: int) -> tuple[int, int]:
        """Return the number of rows and the width of a block whose longest side has this many tokens."""
        width = min(int(width_of(length)), self.longest)
        return self.block_size // width, width

    def notices(self) -> None:
        """Log the pairs that are too long."""
        for corpus, pairs in zip(self.corpora, self.too_long, strict=True):
            if len(pairs):
                lines = [corpus.line(int(pair)) for pair in pairs[: SHOWN + 1]]
                lines += [0] * (len(pairs) - len(lines))  # only the first ones are named
                notice(lines, corpus.name, f"have more than {self.longest} tokens")

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.blocks)

    def __getitem__(self, index: int) -> list[Pair]:
        corpora, pairs = self.blocks[index].T
        found: list[Any] = [None] * len(pairs)
        for corpus in np.unique(corpora).tolist():
            places = np.flatnonzero(corpora == corpus)
            for place, pair in zip(places.tolist(), self.corpora[corpus].take(pairs[places]), strict=True):
                found[place] = pair
        return found

    def tokens_of_sources(self, counts: NDArray[np.int64]) -> list[int]:
        """Return the tokens read of each source, given the number of readings of each block."""
        read = [0] * len(self.corpora)
        for members, (start, stop) in zip(self.members, pairwise([0, *self.ends]), strict=True):
            for block, count in zip(self.blocks[start:stop], counts[start:stop].tolist(), strict=True):
                for i in members if count else ():
                    own = block[block[:, 0] == i, 1]
                    read[i] += count * int(self.corpora[i].lengths[own].sum())
        return read
