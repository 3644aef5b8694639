"""The order in which a stage reads its data: in epochs, each a permutation determined by the seed.

For a source that is read r times per epoch, epoch e reads block b as often as there are integers in
((b + e) r, (b + e + 1) r]. So for fractional r the blocks are spread evenly, each epoch is within one block of its
share, and after n epochs every block was read n r times, rounded up or down. The number of earlier readings of a block
is computed, not stored, so a resumed stage continues in the same order.
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
"""The key in a batch for the number of this reading of each row, from 1."""
OFFSET = "offset"
"""The key in a batch for the first position of each row."""
LARGEST = 1 << 20
"""The most items that are permuted at a time: below a second. A longer epoch, as of very unequal shares, is
divided."""


class Order(Dataset[tuple[Any, ...]]):
    """The items that a stage reads, in order, each with the number of its reading in this stage, from 1, and if the
    blocks of the stage are moved, its offset.

    Args:
        items: the dataset. Its `portions`, if any, are pairs of a count of items and their readings per epoch.
            Otherwise every item is read once per epoch.
        length: number of items that the stage reads.
        seed: seed of the permutations and of the offsets.
        room: the largest offset. 0: there are none.
    """

    def __init__(self, items: Any, length: int, seed: int = 0, room: int = 0) -> None:
        self.items, self.length, self.seed, self.room = items, length, seed, room
        portions: list[tuple[int, Fraction]] = getattr(items, "portions", None) or [(len(items), Fraction(1))]
        divided = -(-int(epoch_items(items)) // LARGEST) or 1
        self.portions = [(count, Fraction(readings) / divided) for count, readings in portions]
        self.starts = [0]
        """Where each epoch starts, as far as computed."""
        self._epochs: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, place: int) -> tuple[Any, ...]:
        if not 0 <= place < self.length:
            raise IndexError(f"item {place} of {self.length}")
        index, reading = self.at(place)
        return (self.items[index], reading, self.offset(place)) if self.room else (self.items[index], reading)

    def offset(self, place: int) -> int:
        """Return the offset of the item at a place. It depends on nothing else, so a resumed stage draws the same.

        Every second item stays where texts begin: what they lose is then small (docs/log/2026-11.md)."""
        return int(np.random.default_rng([self.seed, place, 1]).integers(self.room, endpoint=True)) if place % 2 else 0

    def at(self, place: int) -> tuple[int, int]:
        """Return the index of the item at a place, and the number of this reading."""
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
        """Return the item indices of an epoch in order, and the number of each reading."""
        if number not in self._epochs:
            while len(self._epochs) > 1:  # two are kept: prefetching may read from the next epoch
                del self._epochs[min(self._epochs)]
            before, counts = self.read_before(number), self.counts(number)
            shuffled = np.random.default_rng([self.seed, number]).permutation(np.repeat(np.arange(len(counts)), counts))
            # A stable sort keeps the readings of an item in the order in which they occur.
            by_item = np.argsort(shuffled, kind="stable")
            first = np.cumsum(counts) - counts
            readings = np.empty_like(shuffled)
            readings[by_item] = np.arange(len(shuffled)) - first[shuffled[by_item]]
            self._epochs[number] = shuffled, readings + before[shuffled] + 1
        return self._epochs[number]

    def counts(self, epoch: int) -> NDArray[np.int64]:
        """Return how often an epoch reads each item."""
        return self.read_before(epoch + 1) - self.read_before(epoch)

    def read_before(self, epoch: int) -> NDArray[np.int64]:
        """Return how often each item is read before this epoch."""
        parts = []
        for count, readings in self.portions:
            items = np.arange(count, dtype=np.int64)
            parts.append(times(readings, items + epoch) - times(readings, items))
        return np.concatenate(parts)

    def totals(self, length: int | None = None) -> NDArray[np.int64]:
        """Return how often each item is among the first `length` read. None: among all."""
        length = self.length if length is None else length
        if not length:
            return self.read_before(0)
        self.at(length - 1)
        epoch = bisect_right(self.starts, length - 1) - 1
        last = self.epoch(epoch)[0][: length - self.starts[epoch]]
        return self.read_before(epoch) + np.bincount(last, minlength=len(self.items))


def times(readings: Fraction, items: Any) -> Any:
    """Return the number of complete readings of this many items, rounded down."""
    return items * readings.numerator // readings.denominator


def epoch_items(items: Any) -> float:
    """Return the number of items in an epoch."""
    portions = getattr(items, "portions", None)
    return len(items) if portions is None else float(sum(count * readings for count, readings in portions))


def collate(
    items: Sequence[tuple[Any, ...]],
    batch: Callable[[Sequence[Any]], dict[str, Tensor]],
    rows: Callable[[Any], int] = lambda item: 1,
    shaped: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
) -> dict[str, Tensor]:
    """Collate items of an order into a batch, with the number of each row's reading, and its offset if it has one.
    `rows` is the number of rows of an item, and `shaped` gives a batch its final shape."""
    made = batch([item for item, *_ in items])
    for i, name in enumerate((READING, OFFSET)[: len(items[0]) - 1]):
        made[name] = torch.tensor([numbers[i] for item, *numbers in items for _ in range(rows(item))])
    return made if shaped is None else shaped(made)
