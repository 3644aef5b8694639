"""What the training session asks of a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from transformers import PreTrainedModel


class Task(ABC):
    """Where the data comes from, how it is batched, which positions are scored against which labels, and the metric.

    The session calls, in this order: `check` with the model, `read`, `prepare`, `dataset` for each stage, then for
    every batch `collate`, `inputs`, `teacher_inputs` and `labels`, and between the stages `measure`.
    """

    name: ClassVar[str]
    """In results.json."""
    pipeline_tag: ClassVar[str] = "text-generation"
    """In the model card: what the hub lists such a model under."""

    uniform: bool = False
    """Whether every item is one text of the same length: nothing is padded, and no documents are packed."""

    # --- Data -----------------------------------------------------------------------------------------------

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What makes this data this data, for JSON. A run that is resumed must be given the same."""

    @abstractmethod
    def check(self, model: PreTrainedModel, block_sizes: Iterable[int]) -> None:
        """Refuse a model that cannot do this task, or cannot read blocks of these sizes."""

    def read(self) -> None:  # noqa: B027  (most tasks have nothing to do)
        """Read the data that is there before anything is timed or written, so that bad data is refused first."""

    @property
    def asked_of_teacher(self) -> int:
        """How many tokens the teacher is to write."""
        return 0

    def example(self, rows: int, length: int) -> dict[str, Tensor]:
        """A batch to time a step with: so many items of `length` tokens, or of as many as they have."""
        items: Any = self.dataset(length)
        return self.collate([items[i % len(items)] for i in range(rows)])

    @property
    def tokens(self) -> int:
        """How many tokens there are to train on, so far."""
        return 0

    @property
    def epoch_tokens(self) -> int:
        """How many tokens an epoch reads, of what there is so far."""
        return self.tokens

    def told_data(self) -> str:
        """What was trained on, in words, for the model card."""
        return ""

    def mixture(self, read: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
        """What was read of each source, for JSON. `read`: for each stage, the tokens of each source, in the order of
        `tokens_of_sources` of the dataset."""
        return []

    @abstractmethod
    def prepare(self, teacher: PreTrainedModel | None, longest: int) -> list[str]:
        """Make the data, of which no item has more than `longest` tokens; `teacher` may be asked to write some.

        Returns names that change when the content of the data does."""

    @abstractmethod
    def dataset(self, block_size: int) -> Dataset[Any]:
        """Items of about `block_size` tokens each: as many of them make a batch as have its number of tokens."""

    def collate(self, items: Sequence[Any]) -> dict[str, Tensor]:
        """A batch of items. It has `labels` as the model's own loss would take them."""
        batch: dict[str, Tensor] = default_collate(list(items))
        return batch

    # --- Loss -----------------------------------------------------------------------------------------------

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the student reads."""
        return {name: x for name, x in batch.items() if name != "labels"}

    def teacher_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the teacher reads, where the student reads `inputs`."""
        return inputs

    @abstractmethod
    def labels(self, batch: dict[str, Tensor]) -> Tensor:
        """The token that the logits at each position are scored against, `[batch, time]`; -100: none."""

    @abstractmethod
    def disturbed(self, inputs: dict[str, Tensor], share: float | Tensor) -> dict[str, Tensor]:
        """The inputs with this share of the tokens exchanged at random for others of the batch. A tensor of shape
        [rows, 1] has a share for each row."""

    # --- Measuring and telling ------------------------------------------------------------------------------

    def windows(self, model: PreTrainedModel) -> tuple[int, int]:
        """How many windows one measurement reads, and the tokens of each."""
        return 0, 0

    def restrict(  # noqa: B027
        self, *, teacher_tokens: int | None = None, windows: int | None = None
    ) -> None:
        """Let the teacher write no more than this, and measure on so many windows only: there is no time for more."""

    @abstractmethod
    def measure(self, model: PreTrainedModel, teacher: PreTrainedModel | None = None) -> dict[str, Any] | None:
        """The metrics on the validation data, for JSON; None without such data."""

    def recall(self, model: PreTrainedModel) -> list[dict[str, Any]]:
        """How often the model recalls a word after some distances, for JSON; empty where that cannot be measured."""
        return []

    @abstractmethod
    def told(self, measured: dict[str, Any]) -> str:
        """A measurement in a few words, for the log."""

    @staticmethod
    @abstractmethod
    def table(
        measured: Sequence[tuple[str, dict[str, Any] | None]], *, compared: bool
    ) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """The header and the rows of a table of measurements; `compared`: with the first of them, the teacher's."""


def exchanged(ids: Tensor, share: float | Tensor) -> Tensor:
    """Tokens, of which this share, at random, are others of the same batch. A model that is to be like its teacher on
    any text learns more from a text it has seen before if it is not quite the same."""
    others = ids.flatten()[torch.randint(ids.numel(), ids.shape, device=ids.device)]
    return torch.where(torch.rand(ids.shape, device=ids.device) < share, others, ids)
