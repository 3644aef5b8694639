"""The interface between the training session and a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from transformers import PreTrainedModel

from t2r.errors import T2RError
from t2r.generation.teacher import WritingSpeed
from t2r.surgery.adapters import family_of


class Task(ABC):
    """A task defines the data, its batches, the labels of each position, and the metric.

    The session calls, in this order: `check` with the model, `read`, `prepare`, `dataset` for each stage, then for
    every batch `collate`, `inputs`, `teacher_inputs` and `labels`, and between the stages `measure`.
    """

    name: ClassVar[str]
    """The name in results.json."""
    pipeline_tag: ClassVar[str] = "text-generation"
    """The pipeline tag in the model card."""

    measured_in: ClassVar[str] = "windows"
    """Unit of `windows`, in the printed plan."""

    packed: bool = True
    """Whether an item may contain several documents."""

    uniform: bool = False
    """Whether all items have the same length, without padding and packed documents."""

    one_shape: bool = True
    """Whether all batches have the same shape. Layers and losses are compiled for one shape."""

    # --- Data -----------------------------------------------------------------------------------------------

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what identifies the data, for JSON. A run can be resumed only with the same description."""

    @abstractmethod
    def check(self, model: PreTrainedModel, block_sizes: Iterable[int]) -> None:
        """Raise T2RError if the model does not support this task or blocks of these sizes."""

    def read(self) -> None:  # noqa: B027  (optional)
        """Read the existing data, so that invalid data is detected before anything is timed or generated."""

    @property
    def text_key(self) -> str | None:
        """A name that changes with the content of the text that was read, but not with how much of it is held out.
        None: nothing was read."""
        return None

    @property
    def asked_of_teacher(self) -> int:
        """The number of tokens that the teacher generates."""
        return 0

    fewest_blocks: ClassVar[int] = 16
    """Minimum number of blocks, of the smallest size, that the teacher generates, however short the time is."""

    def writing_speed(self, teacher: PreTrainedModel, length: int) -> WritingSpeed | None:
        """Time the teacher's generation of items of `length` tokens. None: it generates nothing."""
        return None

    def told_writing(self, tokens: int, asked: int) -> str:
        """Describe what the teacher generates, and what was asked if that is more."""
        return f"the teacher generates {tokens:,} tokens" + (f" instead of {asked:,}" if tokens < asked else "")

    def smallest_block(self, block_size: int) -> int:
        """Return the size to which blocks may be divided, to make a batch smaller than one block."""
        return block_size

    def example(self, rows: int, length: int) -> dict[str, Tensor]:
        """Return a batch of `rows` items with at most `length` tokens, to measure the time of a step."""
        items: Any = self.dataset(length)
        return self.collate([items[i % len(items)] for i in range(rows)])

    def in_few_shapes(self, batch: dict[str, Tensor], block_size: int) -> dict[str, Tensor]:
        """Return the batch padded to one of a few shapes, with the same loss. Steps are captured for each shape."""
        return batch

    @property
    def tokens(self) -> int:
        """The number of training tokens available so far."""
        return 0

    @property
    def epoch_tokens(self) -> int:
        """The number of tokens per epoch, for the data available so far."""
        return self.tokens

    def told_data(self) -> str:
        """Return a description of the training data for the model card."""
        return ""

    def mixture(self, read: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
        """Return the tokens read from each source, for JSON.

        `read` has, for each stage, the tokens of each source, in the order of `tokens_of_sources` of the dataset."""
        return []

    @abstractmethod
    def prepare(self, teacher: PreTrainedModel | None, longest: int) -> list[str]:
        """Prepare the data, with at most `longest` tokens per item. The `teacher` may generate some of it.

        Returns names that change with the content of the data."""

    @abstractmethod
    def dataset(self, block_size: int) -> Dataset[Any]:
        """Return the items, of about `block_size` tokens each."""

    def collate(self, items: Sequence[Any]) -> dict[str, Tensor]:
        """Return a batch of items, with `labels` in the form expected by the model's own loss."""
        batch: dict[str, Tensor] = default_collate(list(items))
        return batch

    def rows_of(self, item: Any) -> int:
        """Return the number of rows that an item has in a batch."""
        return 1

    # --- Loss -----------------------------------------------------------------------------------------------

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs of the student."""
        return {name: x for name, x in batch.items() if name != "labels"}

    def teacher_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs of the teacher that correspond to `inputs` of the student."""
        return inputs

    @abstractmethod
    def labels(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the target token of the logits at each position, `[batch, time]`, or -100 for no target."""

    def real_positions(self, batch: dict[str, Tensor]) -> Tensor | None:
        """Return a mask `[batch, time]` of the positions whose attention a transfer matches. None: all."""
        return None

    @abstractmethod
    def disturbed(self, batch: dict[str, Tensor], share: float | Tensor) -> dict[str, Tensor]:
        """Return the batch with token noise: this share of the input tokens is replaced by random ones of the batch.

        A tensor of shape [rows, 1] has a share for each row."""

    # --- Evaluation -----------------------------------------------------------------------------------------

    def windows(self, model: PreTrainedModel, teacher_tokens: int | None = None) -> tuple[int, int]:
        """Return the number of windows of a measurement, and the tokens per window.

        They may be held out of `teacher_tokens` that are not generated yet. None: as many as were asked."""
        return 0, 0

    def restrict(  # noqa: B027
        self, *, teacher_tokens: int | None = None, windows: int | None = None
    ) -> None:
        """Limit the tokens that the teacher generates, and the windows of a measurement, to fit a time budget."""

    @abstractmethod
    def measure(self, model: PreTrainedModel, teacher: PreTrainedModel | None = None) -> dict[str, Any] | None:
        """Return the metrics on the validation data, for JSON, or None without validation data."""

    def recall(self, model: PreTrainedModel) -> list[dict[str, Any]]:
        """How often the model recalls a word after some distances, for JSON; empty where that cannot be measured."""
        return []

    @staticmethod
    def doubt(teacher: Mapping[str, Any]) -> str | None:
        """Return why the teacher's own score says that text and model do not belong together, or None if it does
        not."""
        return None

    @staticmethod
    def gap(teacher: Mapping[str, Any], student: Mapping[str, Any]) -> str | None:
        """Describe the score of a student that is far worse than its teacher. None: it is not."""
        return None

    def prompts(self) -> list[str]:
        """Return prompts for samples of a model, or sources to translate; empty if there are none."""
        return []

    @abstractmethod
    def told(self, measured: dict[str, Any]) -> str:
        """Return a short summary of a measurement, for the log."""

    @staticmethod
    @abstractmethod
    def table(
        measured: Sequence[tuple[str, dict[str, Any] | None]], *, compared: bool
    ) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return the header and the rows of a table of measurements.

        With `compared`, they are compared with the first measurement, which is that of the teacher."""


def exchanged(ids: Tensor, share: float | Tensor, real: Tensor | None = None) -> Tensor:
    """Apply token noise: replace this share of the tokens by random tokens of the same batch. With a mask `real`, only
    tokens in it are replaced, and only by tokens in it.

    The noise varies a text that is read several times. A student that imitates its teacher learns more from it."""
    if real is None:
        places = torch.randint(ids.numel(), ids.shape, device=ids.device)
    else:
        # Indexing by the mask would wait for the device, and a captured step must not.
        first = torch.argsort(real.flatten().int(), descending=True, stable=True)
        places = first[torch.randint(1 << 62, ids.shape, device=ids.device) % real.sum().clamp_min(1)]
    noisy = torch.rand(ids.shape, device=ids.device) < share
    return torch.where(noisy if real is None else noisy & real, ids.flatten()[places], ids)


def number(value: float | None, digits: int) -> str:
    """A cell of a table; empty where nothing was measured."""
    return "" if value is None else f"{value:.{digits}f}"


def max_positions(model: PreTrainedModel) -> int | None:
    """How many tokens the model can read at most; None: any number."""
    positions: int | None = getattr(model.config, "max_position_embeddings", None)
    try:
        return family_of(model).max_positions(model) or positions
    except T2RError:  # a family that we do not know
        return positions
