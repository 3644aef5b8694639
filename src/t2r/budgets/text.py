"""The text on which a model is measured: blocks of tokens, or of an encoder-decoder pairs of a source and a target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from t2r.errors import T2RError


class Batch(NamedTuple):
    """Inputs of a model, and which of its positions count `[rows, tokens]`. None: all."""

    inputs: dict[str, Tensor]
    where: Tensor | None = None

    @classmethod
    def of(cls, given: Tensor | Batch, where: Tensor | None = None) -> Batch:
        """Return the batch itself, or that of token ids."""
        return given if isinstance(given, Batch) else cls({"input_ids": given}, where)

    @property
    def positions(self) -> int:
        """The number of positions that count."""
        ids = self.inputs["input_ids"]
        return ids.numel() if self.where is None else int(self.where.sum())

    def to(self, device: torch.device) -> Batch:
        where = None if self.where is None else self.where.to(device)
        return Batch({name: x.to(device) for name, x in self.inputs.items()}, where)


@dataclass(frozen=True)
class Text:
    """Blocks of about the same number of tokens, and how several of them become a batch."""

    blocks: Sequence[Any]
    tokens: int
    """The tokens of a block."""
    make: Callable[[list[Any]], Batch]
    together: bool = True
    """Whether a batch may have several blocks. Blocks of pairs differ in width, and would be padded to the longest."""

    @classmethod
    def of(cls, given: Tensor | Text) -> Text:
        """Return the text itself, or that of token ids `[blocks, tokens]`."""
        if isinstance(given, Text):
            return given
        return cls(list(given), given.shape[1], lambda blocks: Batch({"input_ids": torch.stack(blocks)}))

    @classmethod
    def of_task(cls, task: Any, block_size: int, count: int) -> Text:
        """Return blocks of the training set of a task, evenly distributed over it."""

        def make(items: list[Any]) -> Batch:
            batch = task.collate(items)
            return Batch(task.inputs(batch), task.real_positions(batch))

        return cls(evenly(task.dataset(block_size), count), block_size, make, together=False)

    def __len__(self) -> int:
        return len(self.blocks)

    def batches_of(self, chosen: Sequence[int]) -> list[Batch]:
        """Return these blocks, in one batch if they may be together."""
        groups = [chosen] if self.together else [[i] for i in chosen]
        return [self.make([self.blocks[i] for i in group]) for group in groups]

    def some(self, count: int) -> Text:
        """Return about this many blocks, or all if there are fewer."""
        return replace(self, blocks=self.blocks[:: max(1, len(self) // count)])

    def batches(self, tokens: int) -> Iterator[Batch]:
        """Yield all blocks, as many at a time as have this number of tokens."""
        rows = max(1, tokens // self.tokens)
        for start in range(0, len(self), rows):
            yield from self.batches_of(range(start, min(start + rows, len(self))))


def evenly(dataset: Any, count: int) -> list[Any]:
    """Return items of a training set, evenly distributed over it."""
    count = min(count, len(dataset))
    if not count:
        raise T2RError("the text is shorter than one context: give more text, or a smaller --context")
    return [dataset[i * len(dataset) // count] for i in range(count)]
