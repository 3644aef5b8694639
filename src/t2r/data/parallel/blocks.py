"""Blocks of pairs of similar length.

A block holds as many pairs as fit into `block_size` tokens: the number of pairs times the length of the longest, where
the length of a pair is that of its longer side (as fairseq's `max-tokens`). Pairs are sorted by length, which reduces
padding. The blocks are the same in every epoch; `t2r.training.steps.order` permutes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from t2r.data.mixture import WeightedSource, exact, join_equal, readings_of_shares
from t2r.data.parallel.corpus import SHOWN, Pair, ParallelCorpus, notice
from t2r.errors import T2RError

NARROWEST = 8
"""The smallest width of a block."""


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
        self.members = join_equal(sources, ())  # sources with the same number of readings share blocks
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
                notice(lines, corpus.name, f"with more than {self.longest} tokens")

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
