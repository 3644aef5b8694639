"""Mixtures of text sources, weighted by readings per epoch or by share of the tokens.

    wiki.txt:2       read twice per epoch
    novels.txt:0.5   every second block, the others in the next epoch
    wiki.txt:60%     60 % of the tokens read

Shares are converted to readings: the source that lasts longest is read once per epoch, the others as often as their
share requires. Sources with the same number of readings are concatenated, so that blocks continue across them.
"""

from __future__ import annotations

import glob
import logging
import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from t2r.data.blocks import Blocks
from t2r.data.corpus import JoinedCorpus, TokenCorpus
from t2r.errors import T2RError
from t2r.options import Sources, check, option, options_of, refuse_unknown
from t2r.storage import kind_of

logger = logging.getLogger(__name__)

WEIGHT = re.compile(r"(?P<source>.+):(?P<number>[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?)\s*(?P<percent>%?)", re.IGNORECASE)
FINEST = 10**6
"""The largest denominator of a number of readings, so that counts are exact in 64 bits."""

"""A source, a list of sources (strings, pairs of source and weight, or mappings with the fields of `WeightedSource`),
or a mapping from source to weight."""


@dataclass(frozen=True)
class WeightedSource:
    """A source of text and its weight, either readings or a share."""

    source: str = option(help="A text file, a glob, JSONL, `datasets:NAME`, or `teacher`.")
    readings: float | None = option(
        None,
        help="Readings per epoch; 0.5: every second block, the others in the next epoch.",
        minimum=0.001,
        maximum=10_000,
        unset="1 if no share is given",
    )
    share: float | None = option(
        None,
        help="Share of the tokens read, in percent. If one source has a share, all must have one. Shares that do not "
        "add up to 100 are scaled.",
        minimum=1e-6,
        maximum=10**6,
        unset="none",
    )

    def __post_init__(self) -> None:
        check(WeightedSource, vars(self), f"train: {self.source}: ")
        if self.readings is not None and self.share is not None:
            raise T2RError(f"train: {self.source}: give readings or a share, not both")

    @property
    def told(self) -> str:
        """The weight in words, after a space; empty for one reading."""
        if self.share is not None:
            return f" ({self.share:g} % of what is read)"
        return "" if self.readings in (None, 1) else f" ({self.readings:g} readings)"

    def record(self, read: Mapping[str, int], total: int) -> dict[str, Any]:
        """The weight, the tokens that each stage read, and their share of all tokens read, for JSON."""
        return {
            "source": self.source,
            "readings": None if self.share is not None else self.readings or 1.0,
            "share": self.share,
            "read": dict(read),
            "share_read": round(100 * sum(read.values()) / total, 3) if total else None,
        }

    def __str__(self) -> str:
        """The source as written on the command line."""
        if self.share is not None:
            return f"{self.source}:{self.share:g}%"
        return self.source if self.readings in (None, 1) else f"{self.source}:{self.readings:g}"


# --- Reading ------------------------------------------------------------------------------------------------


def parse_sources(train: Sources | None) -> list[WeightedSource]:
    """Parse sources in any form. The weights of a source that is given several times are added."""
    if isinstance(train, Mapping):
        parsed = [with_weight(source, weight) for source, weight in train.items()]
    else:
        parsed = [parse_source(entry) for entry in ([train] if isinstance(train, str | Path) else train or ())]
    check_shares(parsed)
    combined: dict[str, WeightedSource] = {}
    for entry in parsed:
        before = combined.get(entry.source)
        combined[entry.source] = entry if before is None else together(before, entry)
    return list(combined.values())


def check_shares(sources: Sequence[WeightedSource]) -> None:
    """Raise T2RError if some sources have a share and others do not."""
    shared = [entry for entry in sources if entry.share is not None]
    if shared and len(shared) < len(sources):
        without = next(entry for entry in sources if entry.share is None)
        raise T2RError(f"train: {shared[0]} has a share and {without} does not: give all sources a share, or none")


def together(one: WeightedSource, other: WeightedSource) -> WeightedSource:
    if one.share is not None and other.share is not None:
        return replace(one, share=one.share + other.share)
    return replace(one, readings=(one.readings or 1.0) + (other.readings or 1.0))


def parse_source(entry: Any) -> WeightedSource:
    if isinstance(entry, WeightedSource):
        return entry
    if isinstance(entry, str | Path):
        return parse_text(str(entry))
    if isinstance(entry, Mapping):
        known = options_of(WeightedSource)
        refuse_unknown(entry, known, "train: ")
        if "source" not in entry:
            raise T2RError(f"train: {dict(entry)!r} has no source")
        values = {name: known[name].read(strip_percent(name, value)) for name, value in entry.items()}
        return WeightedSource(**values)
    if isinstance(entry, list | tuple) and len(entry) == 2:
        return with_weight(*entry)
    raise T2RError(f"train: a source must be a string, a pair of source and weight, or a mapping; got {entry!r}")


def strip_percent(name: str, value: Any) -> Any:
    return value.strip().removesuffix("%") if name == "share" and isinstance(value, str) else value


def parse_text(text: str) -> WeightedSource:
    """Parse `wiki.txt`, `wiki.txt:2` or `wiki.txt:60%`. If a file with the whole name exists, it is used."""
    found = WEIGHT.fullmatch(text)
    if found is None or exists(text):
        return WeightedSource(text)
    return with_weight(found["source"], f"{found['number']}{found['percent']}")


def exists(name: str) -> bool:
    if name.startswith("datasets:"):
        return False
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # ~user with an unknown user
        return False
    return kind_of(path) is not None or (glob.has_magic(name) and bool(glob.glob(str(path), recursive=True)))


def with_weight(source: Any, weight: Any) -> WeightedSource:
    """Build a source from a weight: a number means readings, a string such as `60%` a share."""
    source = str(source) if isinstance(source, Path) else source
    if isinstance(weight, str) and weight.strip().endswith("%"):
        return WeightedSource(source, share=options_of(WeightedSource)["share"].read(strip_percent("share", weight)))
    return WeightedSource(source, readings=options_of(WeightedSource)["readings"].read(weight))


def warn_of_shares(sources: Sequence[WeightedSource]) -> None:
    total = sum(entry.share or 0.0 for entry in sources)
    if total and not math.isclose(total, 100, rel_tol=1e-6):
        logger.warning("the shares of the sources add up to %g %%: they are scaled to 100 %%", total)


# --- Blocks -------------------------------------------------------------------------------------------------


class MixedBlocks(Dataset[dict[str, Tensor]]):
    """The blocks of all sources, each once, and the number of readings per epoch of each part.

    A part is a source, or several sources that are concatenated.

    Args:
        sources: the sources and their weights.
        corpora: the tokenized corpus of each source.
        block_size: tokens per block.
        documents: whether to restart positions with each document, as in `Blocks`.
        apart: sources that are never concatenated with others.
        bos: the first token of a block, as in `Blocks`.
    """

    def __init__(
        self,
        sources: Sequence[WeightedSource],
        corpora: Sequence[TokenCorpus],
        block_size: int,
        *,
        documents: bool = False,
        apart: Sequence[str] = (),
        bos: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.members = join_equal(sources, apart)
        """For each part, the indices of its sources."""
        self.corpora = corpora
        self.parts = []
        alone = [
            sources[members[0]].share is not None or sources[members[0]].source in apart for members in self.members
        ]
        for members, own in zip(self.members, alone, strict=True):
            joined = JoinedCorpus([corpora[i] for i in members])
            if len(joined) < block_size:
                names = ", ".join(sources[i].source for i in members)
                both = ", or give it the same weight as another source, to concatenate both"
                raise T2RError(
                    f"{names} has {len(joined)} tokens, less than one block of {block_size}: give more text or use a "
                    f"smaller block_size{both if not own and alone.count(False) > 1 else ''}"
                )
            self.parts.append(Blocks(joined, block_size, documents=documents, bos=bos))
        shares = None
        if sources[0].share is not None:
            shares = [exact(sources[i].share) for (i,) in self.members]
        self.readings = (
            [exact(sources[members[0]].readings or 1.0) for members in self.members]
            if shares is None
            else readings_of_shares(shares, [len(part) for part in self.parts])
        )
        self.ends = list(accumulate(len(part) for part in self.parts))

    def __len__(self) -> int:
        """The number of distinct blocks."""
        return self.ends[-1]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        index %= len(self)
        part = bisect_right(self.ends, index)
        return self.parts[part][index - (self.ends[part - 1] if part else 0)]

    @property
    def portions(self) -> list[tuple[int, Fraction]]:
        """The number of blocks of each part, and its readings per epoch."""
        return [(len(part), readings) for part, readings in zip(self.parts, self.readings, strict=True)]

    def tokens_of_sources(self, counts: NDArray[np.int64]) -> list[int]:
        """Return the number of tokens read from each source, given the number of readings of each block."""
        read = [0] * len(self.corpora)
        for members, (start, stop) in zip(self.members, pairwise([0, *self.ends]), strict=True):
            # The tokens read of the first x tokens of a part: linear within a block, and constant after the last.
            total = np.concatenate([[0], np.cumsum(counts[start:stop])]) * self.block_size
            places = np.arange(stop - start + 1) * self.block_size
            ends = np.cumsum([0, *(len(self.corpora[i]) for i in members)])
            for member, tokens in zip(members, np.diff(np.interp(ends, places, total)), strict=True):
                read[member] = round(float(tokens))
        return read


def join_equal(sources: Sequence[WeightedSource], apart: Sequence[str]) -> list[list[int]]:
    """Return the indices of the sources of each part."""
    groups: dict[Any, list[int]] = {}
    for index, entry in enumerate(sources):
        alone = entry.share is not None or entry.source in apart
        groups.setdefault(("alone", index) if alone else entry.readings or 1.0, []).append(index)
    return list(groups.values())


def exact(number: float | None) -> Fraction:
    """Return the decimal number as an exact fraction: 0.1 becomes 1/10."""
    return Fraction(str(number)).limit_denominator(FINEST)


def readings_of_shares(shares: Sequence[Fraction], blocks: Sequence[int]) -> list[Fraction]:
    """Convert shares to readings per epoch. The source that lasts longest is read once."""
    epoch = max(count / share for share, count in zip(shares, blocks, strict=True))
    return [
        (share * epoch / count).limit_denominator(max(FINEST, count))
        for share, count in zip(shares, blocks, strict=True)
    ]
