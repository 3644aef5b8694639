"""The log messages that describe a plan before it is executed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from t2r.sharding import own
from t2r.training.planning.budget import Timetable, Work, steps_of
from t2r.training.planning.weights import states_of, weight_bytes
from t2r.training.recipes.recipe import Stage
from t2r.training.steps.job import Job
from t2r.training.steps.optimizers import trained_by
from t2r.words import counted, duration, in_minutes


def plan_lines(
    job: Job,
    model: PreTrainedModel,
    work: Work,
    timetable: Timetable | None,
    place: torch.device,
    minutes: float | None,
) -> Iterator[str]:
    """Yield one line per phase and one for the total. `minutes` is the budget. Without a timetable, times are
    omitted."""
    parameters = sum(p.numel() for p in model.parameters())
    precision = "bfloat16" if job.settings.bf16 else "float32"
    yield f"plan: {parameters / 1e6:.1f}M parameters, recipe {work.plan.name}, on {place} in {precision}"
    if work.teacher_tokens:
        tokens = work.teacher_tokens if timetable is None else timetable.teacher_tokens
        what = job.task.told_writing(tokens, work.teacher_tokens)
        yield f"plan: {what}{about(None if timetable is None else timetable.writing)}"
    for stage in work.plan.stages:
        if timetable is None:
            steps, batch, seconds = steps_of(stage, work.tokens + work.teacher_tokens), stage.batch_tokens, None
        else:
            planned = timetable.stages[stage.name]
            steps, batch, seconds = planned.steps, planned.batch_tokens, planned.seconds
        gigabytes = stage_bytes(model, stage, job.teacher_of(stage)) / 1e9
        yield (
            f"plan: {stage.name} ({stage.objective}, trains {stage.train}): {counted(steps, 'step')} of {batch:,} "
            f"tokens, {steps * batch:,} in total{about(seconds)}; weights, gradients and optimizer states "
            f"{gigabytes:.2f} GB"
        )
    if work.passes:
        layers = work.passes - 1
        yield f"plan: scan of {layers} layers" + about(None if timetable is None else timetable.scanning)
    if work.windows:
        windows = work.windows if timetable is None else timetable.windows
        times = len(work.plan.stages) + (2 if job.teacher is not None else 1)
        size = f" of {work.window} tokens" if work.unit == "windows" else ""
        yield f"plan: {counted(times, 'evaluation')} on {counted(windows, work.unit.removesuffix('s'))}{size}" + about(
            None if timetable is None else timetable.measuring
        )
    if timetable is not None:
        of = "" if minutes is None else f", of {in_minutes(60 * minutes)}"
        yield f"plan: about {duration(timetable.seconds)} in total{of}; started {duration(timetable.before)} ago"


def about(seconds: float | None) -> str:
    return "" if seconds is None else f": about {duration(seconds)}"


def stage_bytes(model: PreTrainedModel, stage: Stage, teacher: PreTrainedModel | None) -> int:
    """Return the bytes that this process holds of weights, gradients and optimizer states of a stage, without LoRA
    adapters (a few percent)."""
    sizes = {id(p): own(p).numel() for p in model.parameters()}
    chosen = "maps" if stage.train == "lora" else stage.train
    learning = trained_by(model, Stage("memory", "task", chosen, steps=1))
    of_teacher, bytes_ = 0, 4
    if teacher is not None:
        of_teacher = sum(own(p).numel() for p in teacher.parameters())
        bytes_ = teacher.dtype.itemsize
    trained = sum(size for key, size in sizes.items() if key in learning)
    return weight_bytes(sum(sizes.values()), trained, teacher=of_teacher, teacher_bytes=bytes_, states=states_of(stage))
