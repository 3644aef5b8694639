"""Measures the speed of this machine by timing small slices of the work. Weights do not change.

On a GPU, whole batches are timed: a small one takes as long as the launches of its kernels."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from t2r.attention.recurrence import recurrent_sites
from t2r.data.progress import progress_bar
from t2r.errors import T2RError
from t2r.generation.teacher import WritingSpeed
from t2r.graphs import WARM_UP
from t2r.hub import synchronize
from t2r.model.logits import evaluating
from t2r.sharding import own, reshard
from t2r.tasks import Task
from t2r.training.loop import processes
from t2r.training.loop.preparation import prepared, with_lora
from t2r.training.loop.threads import choose
from t2r.training.loop.trainer import batch_shape, captures
from t2r.training.recipes.recipe import Recipe, Stage
from t2r.training.steps.capture import CapturedStep
from t2r.training.steps.job import Job
from t2r.training.steps.learner import Learner
from t2r.training.steps.optimizers import choose_trained, make_optimizer

SLICE = 128
"""Tokens of the first slice."""
ENOUGH = 0.3
"""Seconds that a slice must take to be representative. After a shorter one, a larger slice is timed."""
TOO_LONG = 3.0
"""A slice that takes this many seconds is not repeated as a warm-up."""
GPU_WARM_UP = 3
"""Calls before a slice is timed on a GPU."""
OVERHEAD = 1.1
"""Factor for the overhead of logging, data loading and Python."""


@dataclass(frozen=True)
class Cost:
    """Seconds of a training step: per token, and for the optimizer step."""

    token: float
    step: float

    def of(self, tokens: int) -> float:
        return self.token * tokens + self.step


@dataclass(frozen=True)
class Speeds:
    """Measured times in seconds: a step of each stage, a token of a forward pass, and the teacher's generation."""

    stages: dict[str, Cost]
    reading: float
    writing: WritingSpeed | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        stages = {name: Cost(**cost) for name, cost in values["stages"].items()}
        written = values["writing"]
        return cls(stages, values["reading"], None if written is None else WritingSpeed(*written))


def time_all(job: Job, model: PreTrainedModel, plan: Recipe, write: Callable[[], WritingSpeed | None] | None) -> Speeds:
    """Time a slice of each part of the work. All processes do so; the main one's times are used."""
    shown = job.settings.progress and processes.is_main()
    parts = len(plan.stages) + 1 + (write is not None)
    try:
        with progress_bar("timing this machine", parts, "parts", shown=shown) as report, undisturbed(model):
            stages = {}
            for stage in plan.stages:
                stages[stage.name] = time_stage(job, model, stage)
                report(len(stages))
            reading = time_reading(job.task, model, plan.stages[0])
            report(len(stages) + 1)
            writing = None if write is None else write()
            report(parts)
    except torch.OutOfMemoryError as error:
        raise T2RError(
            "not enough memory for a training step: use gradient_checkpointing, fewer device_tokens, or train fewer "
            "parameters"
        ) from error
    return Speeds.from_dict(processes.agreed(Speeds(stages, reading, writing).to_dict()))


def times_one_size(job: Job, place: torch.device) -> bool:
    """Return whether only whole batches are timed. The time of smaller ones is then not known."""
    return job.settings.compiled or place.type != "cpu"


def time_again(
    job: Job, model: PreTrainedModel, stages: Sequence[Stage], smaller: Sequence[Stage], speeds: Speeds
) -> Speeds:
    """Return the speeds with the times of smaller batches, where a stage has one."""
    found = dict(speeds.stages)
    with undisturbed(model):
        for stage, small in zip(stages, smaller, strict=True):
            if small.batch_tokens < stage.batch_tokens:
                less = time_stage(job, model, small).of(small.batch_tokens)
                seconds = found[stage.name].of(stage.batch_tokens)
                found[stage.name] = through(stage.batch_tokens, seconds, small.batch_tokens, less)
    return Speeds.from_dict(processes.agreed(dataclasses.replace(speeds, stages=found).to_dict()))


def through(tokens: int, seconds: float, fewer: int, less: float) -> Cost:
    """Return the cost of steps between two sizes whose times are known."""
    token = max(0.0, seconds - less) / (tokens - fewer)
    return Cost(token, max(0.0, less - token * fewer))


def choose_threads(job: Job, model: PreTrainedModel, stage: Stage) -> int:
    """Set the number of threads with which a step of the stage is fastest."""
    with undisturbed(model):
        return choose(lambda: time_stage(job, model, stage).of(stage.batch_tokens))


class undisturbed:
    """Restore the random state, the training mode and `requires_grad` of the parameters on exit."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __enter__(self) -> None:
        device = self.model.device
        devices, kind = ([device.index or 0], device.type) if device.type != "cpu" else ([], "cuda")
        self.random = torch.random.fork_rng(devices, device_type=kind)
        self.random.__enter__()
        self.training = self.model.training
        self.learn = [(p, p.requires_grad) for p in self.model.parameters()]

    def __exit__(self, *error: Any) -> None:
        self.random.__exit__(*error)
        self.model.train(self.training)
        reshard(self.model)
        self.model.zero_grad(set_to_none=True)
        for parameter, learns in self.learn:
            parameter.requires_grad_(learns)


@contextmanager
def stage_step(
    job: Job, model: PreTrainedModel, stage: Stage, trained: Any = None
) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """Yield a function that runs forward and backward of a stage on one batch, as a session does. `trained` is the
    model with LoRA adapters, if there are any."""
    trained, settings = model if trained is None else trained, job.settings
    with prepared(job, model, stage):
        choose_trained(trained, stage)
        learner = Learner(job, trained, stage).train()

        def work(batch: dict[str, Any]) -> dict[str, Any]:
            with torch.autocast(model.device.type, torch.bfloat16, enabled=settings.bf16):
                loss, _ = learner(batch)
            loss.backward()
            return {}

        yield CapturedStep(work, trained.parameters()) if captures(trained, settings) else work


def time_stage(job: Job, model: PreTrainedModel, stage: Stage) -> Cost:
    """Return the time of forward, backward and optimizer step in this stage."""
    settings = job.settings
    trained: Any = with_lora(model, stage, settings.seed) if stage.train == "lora" else model
    try:
        with stage_step(job, model, stage, trained) as step:
            sizes = sizes_to_time(stage, model.device, settings.compiled)
            warm_up = WARM_UP + 1 if captures(trained, settings) else int(settings.compiled)
            token = time_slices(step, job.task, model.device, sizes, warm_up, partial(job.example, stage))
            return Cost(token * OVERHEAD / processes.count(), time_optimizer(trained, stage))
    finally:
        if stage.train == "lora":
            trained.unload()


def time_optimizer(model: Any, stage: Stage) -> float:
    """Return the seconds of one optimizer step, with the current gradients and a learning rate of 0."""
    optimizer = make_optimizer(model, stage)
    gradients = [own(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
    if not processes.everywhere(finite):  # 0 times infinity is NaN
        return 0.0
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()  # creates the optimizer states
    return timed(lambda: optimizer.step(), next(model.parameters()).device)


def time_reading(task: Task, model: PreTrainedModel, stage: Stage) -> float:
    """Return the seconds per token of a forward pass."""

    def read(batch: dict[str, Any]) -> None:
        model(**task.inputs(batch), use_cache=False)

    with evaluating(model), torch.no_grad():
        return time_slices(read, task, model.device, sizes_to_time(stage, model.device))


def sizes_to_time(stage: Stage, device: torch.device, compiled: bool = False) -> Iterable[tuple[int, int]]:
    """Return rows and lengths of the slices to time: only the batch of one device on a GPU, or for compiled code, which
    is specialized to one shape; otherwise ever larger slices."""
    rows, _ = batch_shape(stage)
    return [(rows, stage.block_size)] if compiled or device.type != "cpu" else slices(rows, stage.block_size)


def slices(rows: int, block_size: int) -> Iterator[tuple[int, int]]:
    """Yield rows and lengths of ever larger slices, up to a whole batch of one device."""
    if block_size > SLICE:
        yield 1, SLICE
    count = 1
    while count < rows:
        yield count, block_size
        count *= 4
    yield rows, block_size


def time_slices(
    work: Callable[[dict[str, Any]], None],
    task: Task,
    device: torch.device,
    sizes: Any,
    warm_up: int = 0,
    example: Callable[[int, int], dict[str, Any]] | None = None,
) -> float:
    """Return the seconds per token of the first slice that takes long enough, after `warm_up` calls. `example` returns
    a batch of a number of rows and a length. None: the task's.

    On a GPU, the first calls on a new shape load and tune kernels, so each slice is warmed up."""
    token, warm = 0.0, False
    if device.type != "cpu":
        warm_up = max(warm_up, GPU_WARM_UP)
    for rows, length in sizes:
        batch = {name: x.to(device) for name, x in (example or task.example)(rows, length).items()}
        tokens = task.labels(batch).numel()
        for _ in range(warm_up):
            work(batch)
        seconds = timed(lambda batch=batch: work(batch), device)  # type: ignore[misc]
        if not warm and not warm_up and seconds < TOO_LONG:
            seconds, warm = timed(lambda batch=batch: work(batch), device), True  # type: ignore[misc]
        token = seconds / tokens
        if seconds >= ENOUGH:
            break
    return token


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of a call. All processes get the main one's, so that they agree on what is timed next."""
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    seconds: float = processes.agreed(time.perf_counter() - started)
    return seconds


def scanned_layers(model: PreTrainedModel) -> int:
    """Return the number of forward passes of a scan: one per layer, and one with softmax attention everywhere."""
    return 1 + len({site.layer_idx for site in recurrent_sites(model)})
