"""Mixtures: how often, or for which share of the tokens, each source of text is read.

    wiki.txt:2       read twice in an epoch
    novels.txt:0.5   every second block, the others in the next epoch
    wiki.txt:60%     60 % of the tokens that are read

Shares become numbers of readings: the source that lasts longest is read once in an epoch, the others as often as their
share requires. Sources with the same number of readings are read as one text: blocks run on from one to the next.
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
from t2r.options import check, option, options_of, refuse_unknown
from t2r.storage import kind_of

logger = logging.getLogger(__name__)

WEIGHT = re.compile(r"(?P<source>.+):(?P<number>[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?)\s*(?P<percent>%?)", re.IGNORECASE)
FINEST = 10**6
"""The largest denominator of a number of readings, so that counting is exact in 64 bits."""

Sources = str | Sequence[Any] | Mapping[str, Any]
"""A source, a list of them (texts, pairs of source and weight, or mappings with the fields of `WeightedSource`), or a
mapping from source to weight."""


@dataclass(frozen=True)
class WeightedSource:
    """A source of text, with the number of its readings or with its share."""

    source: str = option(help="A text file, a glob, JSONL, `datasets:NAME`, or `teacher`.")
    readings: float | None = option(
        None,
        help="How often it is read in an epoch; 0.5: every second block, the others in the next epoch.",
        minimum=0.001,
        maximum=10_000,
        unset="1, without a share",
    )
    share: float | None = option(
        None,
        help="Its share of the tokens that are read, in per cent. If one source has a share, all must; if they do not "
        "add up to 100, they are scaled.",
        above=0,
        maximum=10**6,
        unset="none",
    )

    def __post_init__(self) -> None:
        check(WeightedSource, vars(self), f"train: {self.source}: ")
        if self.readings is not None and self.share is not None:
            raise T2RError(f"train: {self.source}: give readings or a share, not both")

    def __str__(self) -> str:
        """As it is written on the command line."""
        if self.share is not None:
            return f"{self.source}:{self.share:g}%"
        return self.source if self.readings in (None, 1) else f"{self.source}:{self.readings:g}"


# --- Reading ------------------------------------------------------------------------------------------------


def parse_sources(train: Sources | None) -> list[WeightedSource]:
    """What the caller gave, in any of its forms. A source that is given several times is read so many times more."""
    if isinstance(train, Mapping):
        parsed = [with_weight(source, weight) for source, weight in train.items()]
    else:
        parsed = [parse_source(entry) for entry in ([train] if isinstance(train, str) else train or ())]
    check_shares(parsed)
    combined: dict[str, WeightedSource] = {}
    for entry in parsed:
        before = combined.get(entry.source)
        combined[entry.source] = entry if before is None else together(before, entry)
    return list(combined.values())


def check_shares(sources: Sequence[WeightedSource]) -> None:
    """Either every source has a share, or none has."""
    shared = [entry for entry in sources if entry.share is not None]
    if shared and len(shared) < len(sources):
        without = next(entry for entry in sources if entry.share is None)
        raise T2RError(
            f"train: {shared[0]} is a share and {without} is not: give every source a share, or none of them"
        )


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
    raise T2RError(f"train: a source is a text, a pair of source and weight, or a mapping; got {entry!r}")


def strip_percent(name: str, value: Any) -> Any:
    return value.strip().removesuffix("%") if name == "share" and isinstance(value, str) else value


def parse_text(text: str) -> WeightedSource:
    """`wiki.txt`, `wiki.txt:2` or `wiki.txt:60%`. A file whose name ends like this is still found."""
    found = WEIGHT.fullmatch(text)
    if found is None or exists(text):
        return WeightedSource(text)
    return with_weight(found["source"], f"{found['number']}{found['percent']}")


def exists(name: str) -> bool:
    if name.startswith("datasets:"):
        return False
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # ~somebody, who is not known here
        return False
    return kind_of(path) is not None or (glob.has_magic(name) and bool(glob.glob(str(path), recursive=True)))


def with_weight(source: Any, weight: Any) -> WeightedSource:
    """A number is a number of readings, a text such as `60%` a share."""
    source = str(source) if isinstance(source, Path) else source
    if isinstance(weight, str) and weight.strip().endswith("%"):
        return WeightedSource(source, share=options_of(WeightedSource)["share"].read(strip_percent("share", weight)))
    return WeightedSource(source, readings=options_of(WeightedSource)["readings"].read(weight))


def warn_of_shares(sources: Sequence[WeightedSource]) -> None:
    total = sum(entry.share or 0.0 for entry in sources)
    if total and not math.isclose(total, 100, rel_tol=1e-6):
        logger.warning("the shares of the texts add up to %g %%: they are scaled to 100 %%", total)


# --- Blocks -------------------------------------------------------------------------------------------------


class MixedBlocks(Dataset[dict[str, Tensor]]):
    """The blocks of all sources, each once, and how often those of each part are read in an epoch.

    Args:
        sources: what was asked for.
        corpora: the tokens of each.
        apart: sources that are never joined with others.
    """

    def __init__(
        self,
        sources: Sequence[WeightedSource],
        corpora: Sequence[TokenCorpus],
        block_size: int,
        *,
        documents: bool = False,
        apart: Sequence[str] = (),
    ) -> None:
        self.block_size = block_size
        self.members = join_equal(sources, apart)
        """For each part, the numbers of its sources."""
        self.corpora = corpora
        self.parts = []
        for members in self.members:
            joined = JoinedCorpus([corpora[i] for i in members])
            if len(joined) < block_size and len(self.members) > 1:
                names = ", ".join(sources[i].source for i in members)
                raise T2RError(
                    f"{names} has {len(joined)} tokens, less than one block of {block_size}: give more of it, use a "
                    "smaller block_size, or give it the weight of another source, to which it is then joined"
                )
            self.parts.append(Blocks(joined, block_size, documents=documents))
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
        """How many different blocks there are."""
        return self.ends[-1]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        index %= len(self)
        part = bisect_right(self.ends, index)
        return self.parts[part][index - (self.ends[part - 1] if part else 0)]

    @property
    def portions(self) -> list[tuple[int, Fraction]]:
        """The blocks of each part, and how often they are read in an epoch."""
        return [(len(part), readings) for part, readings in zip(self.parts, self.readings, strict=True)]

    def tokens_of_sources(self, counts: NDArray[np.int64]) -> list[int]:
        """How many tokens of each source are read if each block is read as often as `counts` says."""
        read = [0] * len(self.corpora)
        for members, (start, stop) in zip(self.members, pairwise([0, *self.ends]), strict=True):
            # Of the first x tokens of a part so many are read: linear within a block, and nothing behind the last.
            total = np.concatenate([[0], np.cumsum(counts[start:stop])]) * self.block_size
            places = np.arange(stop - start + 1) * self.block_size
            ends = np.cumsum([0, *(len(self.corpora[i]) for i in members)])
            for member, tokens in zip(members, np.diff(np.interp(ends, places, total)), strict=True):
                read[member] = round(float(tokens))
        return read


def join_equal(sources: Sequence[WeightedSource], apart: Sequence[str]) -> list[list[int]]:
    """The numbers of the sources that are read as one text."""
    groups: dict[Any, list[int]] = {}
    for index, entry in enumerate(sources):
        alone = entry.share is not None or entry.source in apart
        groups.setdefault(("alone", index) if alone else entry.readings or 1.0, []).append(index)
    return list(groups.values())


def exact(number: float | None) -> Fraction:
    """0.1 is one tenth."""
    return Fraction(str(number)).limit_denominator(FINEST)


def readings_of_shares(shares: Sequence[Fraction], blocks: Sequence[int]) -> list[Fraction]:
    """How often each source is read in an epoch, in which the one that lasts longest is read once."""
    epoch = max(count / share for share, count in zip(shares, blocks, strict=True))
    return [
        (share * epoch / count).limit_denominator(max(FINEST, count))
        for share, count in zip(shares, blocks, strict=True)
    ]
