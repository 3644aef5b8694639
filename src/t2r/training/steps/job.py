"""What the stages of a session have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

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
    """The task, the teacher if there is one, and the settings. A model and a stage of it are trained with them."""

    task: Task
    teacher: PreTrainedModel | None = None
    settings: Settings = Settings()

    def teacher_of(self, stage: Stage) -> PreTrainedModel | None:
        """Return the teacher that the stage reads: only a distillation has one."""
        return self.teacher if stage.objective == "distill" else None
