"""The log messages that describe a plan before it is executed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from t2r.training.budget import Schedule, Work, duration, in_minutes, steps_of
from t2r.training.memory import states_of, weight_bytes
from t2r.training.optimizers import trained_by
from t2r.training.recipe import Stage
from t2r.training.trainer import Settings


def plan_lines(
    work: Work,
    schedule: Schedule | None,
    model: PreTrainedModel,
    teacher: PreTrainedModel | None,
    settings: Settings,
    place: torch.device,
    given: float | None,
) -> Iterator[str]:
    """Yield one line per phase and one for the total. Without a schedule, times are omitted."""
    parameters = sum(p.numel() for p in model.parameters())
    precision = "bfloat16" if settings.bf16 else "float32"
    yield f"plan: {parameters / 1e6:.1f}M parameters, recipe {work.plan.name}, on {place} in {precision}"
    if work.teacher_tokens:
        tokens = work.teacher_tokens if schedule is None else schedule.teacher_tokens
        # How fast a teacher translates depends on its lines, so it is not timed.
        timed = None if schedule is None or not schedule.writing else schedule.writing
        unknown = "" if schedule is None or timed is not None else ", whose time is not part of the total"
        yield f"plan: the teacher generates {tokens:,} tokens{about(timed)}{unknown}"
    for stage in work.plan.stages:
        if schedule is None:
            steps, batch, seconds = steps_of(stage, work.tokens + work.teacher_tokens), stage.batch_tokens, None
        else:
            planned = schedule.stages[stage.name]
            steps, batch, seconds = planned.steps, planned.batch_tokens, planned.seconds
        gigabytes = stage_bytes(model, stage, teacher) / 1e9
        yield (
            f"plan: {stage.name} ({stage.objective}, trains {stage.train}): {steps:,} steps of {batch:,} tokens, "
            f"{steps * batch:,} in total{about(seconds)}; weights, gradients and optimizer states {gigabytes:.2f} GB"
        )
    if work.passes:
        layers = work.passes - 1
        yield f"plan: scan of {layers} layers" + about(None if schedule is None else schedule.scanning)
    if work.windows:
        windows = work.windows if schedule is None else schedule.windows
        times = len(work.plan.stages) + (2 if teacher is not None else 1)
        size = f" of {work.window} tokens" if work.unit == "windows" else ""
        yield f"plan: {times} evaluations on {windows:,} {work.unit}{size}" + about(
            None if schedule is None else schedule.measuring
        )
    if schedule is not None:
        of = "" if given is None else f", of {in_minutes(60 * given)}"
        yield f"plan: about {duration(schedule.seconds)} in total{of}; {duration(schedule.before)} have passed"


def about(seconds: float | None) -> str:
    return "" if seconds is None else f": about {duration(seconds)}"


def stage_bytes(model: PreTrainedModel, stage: Stage, teacher: PreTrainedModel | None) -> int:
    """Return the bytes of weights, gradients and optimizer states of a stage, without LoRA adapters (a few percent)."""
    sizes = {id(p): p.numel() for p in model.parameters()}
    chosen = "maps" if stage.train == "lora" else stage.train
    learning = trained_by(model, Stage("memory", "task", chosen, steps=1))
    of_teacher, bytes_ = 0, 4
    if teacher is not None and stage.objective == "distill":
        of_teacher = sum(p.numel() for p in teacher.parameters())
        bytes_ = teacher.dtype.itemsize
    trained = sum(size for key, size in sizes.items() if key in learning)
    return weight_bytes(sum(sizes.values()), trained, teacher=of_teacher, teacher_bytes=bytes_, states=states_of(stage))
