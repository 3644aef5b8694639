"""The order in which a stage reads its data: epoch after epoch, each a permutation drawn by the seed.

Of a source with r readings, epoch e reads block b as often as a whole number lies in ((b + e) r, (b + e + 1) r]. So the
blocks of a fraction are spread evenly, each epoch reads within one block of its share, and after n epochs every block
was read n r times, rounded up or down. How often a block was read before follows by arithmetic: nothing has to be
stored, and a stage that is resumed goes on in the same order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

READING = "reading"
"""In a batch: the number of this reading of each row, from 1."""
LARGEST = 1 << 26
"""Items that are permuted at a time. A longer epoch is divided."""


class Order(Dataset[tuple[Any, int]]):
    """The items that a stage reads, in their order, each with the number of its reading in this stage, from 1.

    Args:
        items: what is read. If it has `portions`, these are the counts of its parts, each with its readings in an
            epoch; otherwise every item is read once.
        length: how many items the stage reads.
        seed: of the permutations.
    """

    def __init__(self, items: Any, length: int, seed: int = 0) -> None:
        self.items, self.length, self.seed = items, length, seed
        portions: list[tuple[int, Fraction]] = getattr(items, "portions", None) or [(len(items), Fraction(1))]
        divided = -(-int(epoch_items(items)) // LARGEST) or 1
        self.portions = [(count, Fraction(readings) / divided) for count, readings in portions]
        self.starts = [0]
        """Where each epoch starts, as far as it is known."""
        self._epochs: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, place: int) -> tuple[Any, int]:
        if not 0 <= place < self.length:
            raise IndexError(f"item {place} of {self.length}")
        index, reading = self.at(place)
        return self.items[index], reading

    def at(self, place: int) -> tuple[int, int]:
        """Which item is read there, and the number of this reading."""
        while self.starts[-1] <= place:
            epoch = len(self.starts) - 1
            total = sum(
                int(times(readings, count + epoch) - times(readings, epoch)) for count, readings in self.portions
            )
            self.starts.append(self.starts[-1] + total)
        epoch = bisect_right(self.starts, place) - 1
        indices, readings = self.epoch(epoch)
        return int(indices[place - self.starts[epoch]]), int(readings[place - self.starts[epoch]])

    def epoch(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The items of an epoch in their order, and the number of each reading."""
        if number not in self._epochs:
            while len(self._epochs) > 1:  # what is read ahead may be of the next one
                del self._epochs[min(self._epochs)]
            before, counts = self.read_before(number), self.counts(number)
            shuffled = np.random.default_rng([self.seed, number]).permutation(np.repeat(np.arange(len(counts)), counts))
            # In a stable sort the readings of an item follow each other in the order of time.
            by_item = np.argsort(shuffled, kind="stable")
            first = np.cumsum(counts) - counts
            readings = np.empty_like(shuffled)
            readings[by_item] = np.arange(len(shuffled)) - first[shuffled[by_item]]
            self._epochs[number] = shuffled, readings + before[shuffled] + 1
        return self._epochs[number]

    def counts(self, epoch: int) -> NDArray[np.int64]:
        """How often an epoch reads each item."""
        return self.read_before(epoch + 1) - self.read_before(epoch)

    def read_before(self, epoch: int) -> NDArray[np.int64]:
        """How often each item is read before this epoch."""
        parts = []
        for count, readings in self.portions:
            items = np.arange(count, dtype=np.int64)
            parts.append(times(readings, items + epoch) - times(readings, items))
        return np.concatenate(parts)

    def totals(self, length: int | None = None) -> NDArray[np.int64]:
        """How often each item is among the first `length` that are read. None: among all of them."""
        length = self.length if length is None else length
        if not length:
            return self.read_before(0)
        self.at(length - 1)
        epoch = bisect_right(self.starts, length - 1) - 1
        last = self.epoch(epoch)[0][: length - self.starts[epoch]]
        return self.read_before(epoch) + np.bincount(last, minlength=len(self.items))


def times(readings: Fraction, items: Any) -> Any:
    """How many readings so many items make, in whole ones."""
    return items * readings.numerator // readings.denominator


def epoch_items(items: Any) -> float:
    """How many items an epoch reads."""
    portions = getattr(items, "portions", None)
    return len(items) if portions is None else float(sum(count * readings for count, readings in portions))


def collate(
    items: Sequence[tuple[Any, int]],
    batch: Callable[[Sequence[Any]], dict[str, Tensor]],
    rows: Callable[[Any], int] = lambda item: 1,
) -> dict[str, Tensor]:
    """A batch of items, with the number of each row's reading. `rows`: how many rows an item makes."""
    readings = [reading for item, reading in items for _ in range(rows(item))]
    return batch([item for item, _ in items]) | {READING: torch.tensor(readings)}
