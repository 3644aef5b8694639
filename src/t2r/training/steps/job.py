"""What the stages of a session have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from t2r.data.teacher_logits import TaughtBlocks, TeacherLogits
from t2r.sharding import is_sharded
from t2r.tasks import Task
from t2r.training.recipes.recipe import Stage


@dataclass(frozen=True)
class Settings:
    """The settings of a session, apart from its plan.

    Args:
        seed: seed of the data order, of dropout and of token noise.
        bf16: train with bfloat16 autocast; weights stay in float32.
        compiled: compile losses and layers, and on a GPU replay steps as CUDA graphs.
        gradient_checkpointing: recompute the activations of a layer in the backward pass, to save memory.
        save_steps: optimizer steps between checkpoints. None: a checkpoint every three minutes.
        report_to: `none`, or an experiment tracker of transformers.
        progress: show progress bars.
    """

    seed: int = 0
    bf16: bool = False
    compiled: bool = False
    gradient_checkpointing: bool = False
    save_steps: int | None = None
    report_to: str = "none"
    progress: bool = True

    @classmethod
    def on(
        cls, device: torch.device, *, bf16: bool | None = None, compiled: bool | None = None, **others: Any
    ) -> Settings:
        """Return settings for a device. `bf16` and `compiled` are true by default on a GPU."""
        on_gpu = device.type == "cuda"
        return cls(bf16=on_gpu if bf16 is None else bf16, compiled=on_gpu if compiled is None else compiled, **others)


@dataclass(frozen=True)
class Job:
    """The task, the teacher if there is one, and the settings. A model and a stage of it are trained with them.

    If there are `logits` of the teacher on disk, distillations read them, and do not run the teacher."""

    task: Task
    teacher: PreTrainedModel | None = None
    settings: Settings = Settings()
    logits: TeacherLogits | None = None

    def teacher_of(self, stage: Stage) -> PreTrainedModel | None:
        """Return the teacher that the stage runs: only a distillation does."""
        return self.teacher if stage.objective == "distill" and self.logits is None else None

    @contextmanager
    def without_teacher(self, stage: Stage) -> Iterator[None]:
        """Move the teacher to the memory of the CPU while a stage reads its logits from the disk: it is needed on the
        device for evaluation only."""
        idle: Any = self.teacher if self.logits is not None and stage.objective == "distill" else None
        if idle is None or idle.device.type == "cpu" or is_sharded(idle):
            yield
            return
        place = idle.device
        try:
            idle.to("cpu")
            torch.cuda.empty_cache()
            yield
        finally:
            idle.to(place)

    def dataset(self, stage: Stage) -> Any:
        """Return the items that the stage reads, with the logits of the teacher if it needs them from the disk."""
        items: Any = self.task.dataset(stage.block_size)
        return items if self.logits is None or stage.objective != "distill" else TaughtBlocks(items, self.logits)

    def example(self, stage: Stage, rows: int, length: int) -> dict[str, Tensor]:
        """Return a batch of `rows` items with at most `length` tokens, to measure the time of a step."""
        if self.logits is None or stage.objective != "distill":
            return self.task.example(rows, length)
        items = self.dataset(stage)
        batch = self.task.collate([items[i % len(items)] for i in range(rows)])
        return {name: x[:, :length] for name, x in batch.items()}
