"""A student with its objective, as one module whose forward returns the loss."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from t2r import compat
from t2r.data.teacher_logits import take_taught
from t2r.errors import T2RError
from t2r.model.logits import Readout, last_only
from t2r.model.top_k import TopK
from t2r.training.recipes.recipe import Stage
from t2r.training.steps.job import Job
from t2r.training.steps.objectives import distillation_loss, transferring
from t2r.training.steps.offsets import Room, moved
from t2r.training.steps.order import OFFSET, READING


class Learner(compat.WrapsModel, nn.Module):
    """The module that Trainer trains. The whole loss, including the head, is computed in the forward, as wrappers for
    distributed training require.

    Args:
        job: the task, the teacher and the settings. If they say so, the loss is compiled; the errors of a transfer only
            if all batches have the same shape.
        student: the model that learns, with its LoRA adapters if there are any.
    """

    def __init__(self, job: Job, student: PreTrainedModel, stage: Stage) -> None:
        super().__init__()
        self.student = student
        self.stage, self.task, self.compiled = stage, job.task, job.settings.compiled
        self.room = Room.of(student, stage)
        self._teacher = (job.teacher_of(stage),)  # in a tuple, so that it is not registered as a submodule
        self._readouts: dict[int, Readout] = {}
        # An adaptive softmax computes only the logits that the loss needs.
        self.own_loss = stage.objective == "task" and bool(getattr(student, "loss_without_logits", False))
        if self.own_loss and stage.label_smoothing:
            raise T2RError(f"stage {stage.name!r}: an adaptive softmax has no label smoothing")
        self.without_logits = last_only(student)

    @property
    def wrapped(self) -> nn.Module:
        return self.student

    def forward(self, batch: dict[str, Tensor], count: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a batch, and sums for the log.

        The loss is a mean over the scored positions or, if the batch is a part of a larger one, their sum divided by
        `count`."""
        reading, offset = batch.get(READING), batch.get(OFFSET)
        batch, taught = take_taught({name: x for name, x in batch.items() if name not in (READING, OFFSET)})
        if self.stage.noise:
            share: float | Tensor = self.stage.noise
            if reading is not None and self.stage.noise_from > 1:
                share = share * (reading >= self.stage.noise_from)[:, None]
            batch = self.task.disturbed(batch, share)
        given = inputs = self.task.inputs(batch)
        if self.room.largest:  # an example that is timed has no offset, but the shapes of the training
            inputs = moved(inputs, inputs["input_ids"].new_zeros(len(batch["labels"])) if offset is None else offset)
        if self.stage.objective == "transfer":
            # Logits are not needed: the model's body is enough, or the logits of one position.
            body = None if self.without_logits else self.readout(self.student, inputs)
            real = self.task.real_positions(batch)
            with transferring(self.student, self.compiled and self.task.one_shape, real) as errors:
                if body is None:
                    self.student(**inputs, use_cache=False, **self.without_logits)
                else:
                    body.states(inputs)
            return torch.stack(errors).mean(), {}
        if self.own_loss:
            scored = None if count is None else count.clamp_min(1)
            model = cast(Any, self.student)
            return model(**inputs, labels=batch["labels"], num_items_in_batch=scored, use_cache=False).loss, {}
        return self.against(inputs, given, self.task.labels(batch).flatten(), count, taught)

    def against(
        self,
        inputs: dict[str, Tensor],
        given: dict[str, Tensor],
        labels: Tensor,
        count: Tensor | None,
        taught: TopK | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss on the labels and, in a distillation, on the teacher's distribution, which is computed unless
        it is known. The teacher reads the inputs that were `given`, before their positions were moved."""
        stage, (teacher,) = self.stage, self._teacher
        distills = stage.objective == "distill"
        kl_weight, task_weight = (stage.kl_weight, stage.task_weight) if distills else (0.0, 1.0)
        ours, student_head = self.read(self.student, inputs)
        theirs: Tensor | TopK | None = taught
        teacher_head = None
        if teacher is not None:
            with torch.no_grad():
                theirs, teacher_head = self.read(teacher, self.task.teacher_inputs(given))
        loss, kl, task = distillation_loss(
            ours,
            theirs,
            labels,
            count=count,
            student_head=student_head,
            teacher_head=teacher_head,
            kl_weight=kl_weight,
            task_weight=task_weight,
            temperature=stage.temperature,
            label_smoothing=stage.label_smoothing,
            compiled=self.compiled,
            fixed=self.compiled and not self.task.one_shape,
        )
        if not distills:
            return loss, {}
        scored = (labels >= 0).sum()
        share = scored.clamp_min(1) if count is None else count
        sums = {"tokens": scored, "kl": kl * share} | ({"task": task * share} if task_weight else {})
        return loss, {name: x.detach() for name, x in sums.items()}

    def read(self, model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Any]:
        """Return the inputs of the model's head, one row per position, and the head; or the logits and None."""
        readout = self.readout(model, inputs)
        return readout.states(inputs).flatten(0, 1), readout.projection

    def readout(self, model: Any, inputs: dict[str, Tensor]) -> Readout:
        if id(model) not in self._readouts:
            self._readouts[id(model)] = Readout(model, inputs)
        return self._readouts[id(model)]
