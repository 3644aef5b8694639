"""Longer pairs from neighboring lines.

An RNN translates long lines as well as it has learned to. Where the lines of a text are short, several of them, and
their translations, become one pair. Tokens are joined, not text, so translations of the teacher are joined as well.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from t2r.data.parallel.corpus import Pair, ParallelCorpus

LOOKED_AT = 32
"""Pairs from which the tokens that every line begins and ends with are known."""


class JoinedCorpus(ParallelCorpus):
    """A corpus whose pairs are groups of 1, 2, ... `most` neighboring pairs of another one, in turn.

    A group has the first tokens of its first line and the last tokens of its last line, such as the code of a language
    and the end of the sentence, once.

    Args:
        corpus: the pairs.
        most: the size of the largest groups.
        special: special tokens, which lines begin and end with. Not those of unknown words.
        longest: maximum length of a side: a group ends before it becomes longer. None: no limit.
    """

    def __init__(self, corpus: ParallelCorpus, most: int, special: Collection[int], longest: int | None) -> None:
        self.corpus, self.most = corpus, most
        self.name, self.source, self.target, self.skipped = corpus.name, corpus.source, corpus.target, corpus.skipped
        known = corpus.take(np.arange(min(LOOKED_AT, len(corpus))))
        self.frames = [frame([pair[side] for pair in known], special) for side in (0, 1)]
        """Numbers of special tokens at the beginning and at the end of every line, for sources and for targets."""
        own = [sum(ends) for ends in self.frames]
        bare = np.stack([corpus.source_lengths - own[0], corpus.target_lengths - own[1]], axis=1)
        self.starts = group_starts(bare, most, None if longest is None else longest - max(own))
        """The first pair of each group."""
        bare = np.add.reduceat(bare, self.starts)
        self.source_lengths, self.target_lengths = bare[:, 0] + own[0], bare[:, 1] + own[1]
        self.lengths = np.maximum(self.source_lengths, self.target_lengths)

    @property
    def key(self) -> str:
        return f"{self.corpus.key}, joined by {self.most}"

    def line(self, pair: int) -> int:
        return self.corpus.line(int(self.starts[pair]))

    def take(self, pairs: NDArray[np.int64]) -> list[Pair]:
        ends = np.append(self.starts, len(self.corpus))
        counts = ends[pairs + 1] - ends[pairs]
        first = np.repeat(ends[pairs] - np.cumsum(counts) + counts, counts)
        lines = self.corpus.take(first + np.arange(counts.sum()))
        found = []
        for end, count in zip(np.cumsum(counts).tolist(), counts.tolist(), strict=True):
            group = lines[end - count : end]
            found.append(Pair(*(join([pair[side] for pair in group], *self.frames[side]) for side in (0, 1))))
        return found


def frame(lines: list[NDArray[np.int64]], special: Collection[int]) -> tuple[int, int]:
    """Return how many special tokens all lines begin with, and how many they end with."""

    def leading(tokens: Any) -> int:
        count = 0
        while count < len(tokens) - 1 and int(tokens[count]) in special:
            count += 1
        return count

    return min(map(leading, lines)), min(leading(line[::-1]) for line in lines)


def group_starts(lengths: NDArray[np.int64], most: int, longest: int | None) -> NDArray[np.int64]:
    """Return where groups of 1, 2, ... `most` lines begin, of which no side is longer than `longest` unless a single
    line is. `lengths [lines, sides]`."""
    starts, held, wanted, sums = [], 0, 0, [0, 0]
    for i, line in enumerate(lengths.tolist()):
        total = [a + b for a, b in zip(sums, line, strict=True)]
        if held == wanted or (longest is not None and max(total) > longest):
            starts.append(i)
            wanted = wanted % most + 1
            held, total = 0, line
        held, sums = held + 1, total
    return np.array(starts, dtype=np.int64)


def join(lines: list[NDArray[np.int64]], first: int, last: int) -> NDArray[np.int64]:
    """Join lines, of which `first` tokens at the beginning and `last` tokens at the end occur once in the result."""
    inner = [line[first : len(line) - last] for line in lines]
    whole: NDArray[np.int64] = np.concatenate([lines[0][:first], *inner, lines[-1][len(lines[-1]) - last :]])
    return whole
