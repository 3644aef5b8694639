"""Run a stage of a recipe, and go on where a run was stopped."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from t2r import compat
from t2r.attention.recurrence import recurrent_sites
from t2r.errors import T2RError
from t2r.surgery.adapters import family_of
from t2r.tasks import Task
from t2r.training.checkpoints import last_checkpoint
from t2r.training.optimizers import choose_trained
from t2r.training.recipe import Stage
from t2r.training.run import Run
from t2r.training.trainer import Settings, StageTrainer, batch_shape

logger = logging.getLogger(__name__)

WORTH_CALIBRATING = 50
"""Fewer steps than this are not told how long they will take: to find out would be a tenth of it."""


def run_stage(
    run: Run,
    model: PreTrainedModel,
    stage: Stage,
    task: Task,
    teacher: PreTrainedModel | None = None,
    settings: Settings = Settings(),  # noqa: B008
) -> PreTrainedModel:
    """Train a stage, or take its result if it is finished already. Returns the trained model (LoRA folded in).

    With `settings.compiled`, torch.compile fuses each decoder layer and the loss, or in a transfer the comparison of
    each site: one layer's code serves all, so it takes half a minute, and on a GPU a step is more than twice as fast.
    """
    if run.restore(stage.name, model):
        return model
    if stage.objective != "distill":
        teacher = None
    folder = run.checkpoints(stage.name)
    trained: Any = with_lora(model, stage, settings.seed) if stage.train == "lora" else model
    with prepared(trained, model, teacher, stage, settings):

        def calibrated() -> float:
            return run.remember(
                f"{stage.name}.seconds", lambda: calibrate(trained, stage, task, teacher, folder, settings)
            )

        dataset: Any = task.dataset(stage.block_size)
        steps = run.remember(f"{stage.name}.steps", lambda: count_steps(stage, dataset, calibrated))
        stage = fit(stage, steps)
        choose_trained(trained, stage)
        seconds = calibrated() * steps if steps >= WORTH_CALIBRATING else None
        announce(stage, steps, trained, teacher, dataset, seconds)
        trainer = StageTrainer(trained, stage, steps, task, folder, teacher, settings, run.logs / stage.name)
        checkpoint = last_checkpoint(folder)
        if checkpoint is not None:
            logger.info("stage %s goes on from step %s", stage.name, checkpoint.name.split("-")[1])
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if stage.train == "lora":
        model = trained.merge_and_unload()
    run.remember(f"{stage.name}.log", lambda: [e for e in trainer.state.log_history if "loss" in e])
    run.finish(stage.name, model)
    trainer.accelerator.free_memory()
    return model


@contextmanager
def prepared(
    trained: Any, model: PreTrainedModel, teacher: PreTrainedModel | None, stage: Stage, settings: Settings
) -> Iterator[None]:
    """Layers compiled and checkpointed as the settings say. However the stage ends, they are as before, and all
    parameters can learn again."""
    fused = [model] if teacher is None else [model, teacher]
    recomputes = settings.gradient_checkpointing and stage.objective != "transfer"  # which has gradients in maps alone
    try:
        if recomputes:
            check_checkpointing(model)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if settings.compiled and stage.objective != "transfer":
            for part in fused:
                compile_layers(part)
        yield
    finally:
        for part in fused:
            compile_layers(part, undo=True)
        if recomputes:
            model.gradient_checkpointing_disable()
        model.requires_grad_(True)


def check_checkpointing(model: PreTrainedModel) -> None:
    """Refuse gradient checkpointing where the model has none."""
    if not model.supports_gradient_checkpointing:
        raise T2RError(f"{model.config.model_type} has no gradient checkpointing: train it without")


def compile_layers(model: PreTrainedModel, undo: bool = False) -> None:
    try:
        layers = family_of(model).decoder_layers(model)
    except T2RError:  # a model of which we know nothing trains as it is
        return
    for layer in layers:
        if undo:
            layer._compiled_call_impl = None
        else:
            layer.compile(dynamic=False)


def count_steps(stage: Stage, dataset: Any, calibrated: Callable[[], float]) -> int:
    """The stage's budget in optimizer steps; `calibrated` finds out how many seconds one takes."""
    if stage.steps is not None:
        return stage.steps
    if stage.tokens is not None:
        return max(1, stage.tokens // stage.batch_tokens)
    if stage.epochs is not None:
        return max(1, int(stage.epochs * len(dataset) * stage.block_size // stage.batch_tokens))
    assert stage.minutes is not None
    return max(1, int(stage.minutes * 60 / calibrated()))


def fit(stage: Stage, steps: int) -> Stage:
    """The stage with a warm-up that its budget has room for."""
    fitted = stage.fitted(steps)
    if fitted is not stage:
        logger.warning(
            "stage %s: %d steps end before the warm-up of %d would: it is shortened to %d",
            stage.name,
            steps,
            stage.warmup_steps,
            fitted.warmup_steps,
        )
    return fitted


def calibrate(
    model: PreTrainedModel,
    stage: Stage,
    task: Task,
    teacher: PreTrainedModel | None,
    folder: Path,
    settings: Settings,
) -> float:
    """Seconds per optimizer step: the median of a few forwards and backwards, which change no weight.

    What they draw at random is drawn again: a trainer starts from its seed."""
    trainer = StageTrainer(model, stage, 1, task, folder, teacher, settings)
    rows, accumulation = batch_shape(stage)
    dataset: Any = trainer.train_dataset
    batch = task.collate([dataset[i % len(dataset)] for i in range(rows)])
    trainer.learner.train()
    times = []
    for _ in range(4):
        started = time.perf_counter()
        inputs = compat.prepared_inputs(trainer, batch)
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(trainer.learner, inputs)
        loss.backward()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    model.zero_grad(set_to_none=True)
    return sorted(times[1:])[1] * accumulation * 1.1  # the optimizer and the loader take their share


def announce(stage: Stage, steps: int, model: Any, teacher: Any, dataset: Any, seconds: float | None) -> None:
    """Before it starts: what it will take."""
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    bytes_ = sum(p.numel() * p.element_size() for p in model.parameters())
    if teacher is not None:
        bytes_ += sum(p.numel() * p.element_size() for p in teacher.parameters())
    states = 1 if stage.optimizer == "nag" else 2
    bytes_ += trained * 4 * (1 + states)
    blocks = steps * stage.batch_tokens // stage.block_size
    logger.info(
        "stage %s (%s, trains %s): %s steps, %s tokens (%.1f epochs of the corpus)%s; %.1fM of %.1fM parameters learn; "
        "weights, gradients and optimizer need %.2f GB, activations come on top",
        stage.name,
        stage.objective,
        stage.train,
        f"{steps:,}",
        f"{steps * stage.batch_tokens:,}",
        blocks / len(dataset),
        "" if seconds is None else f" in about {duration(seconds)}",
        trained / 1e6,
        parameters / 1e6,
        bytes_ / 1e9,
    )


def duration(seconds: float) -> str:
    """Words for a time that is known roughly."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(1, round(seconds))} seconds"


def with_lora(model: PreTrainedModel, stage: Stage, seed: int) -> Any:
    """The model with low-rank adapters on its linear layers, the maps trained in full."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise T2RError("train: lora needs the peft extra: pip install 't2r[peft]'") from error
    config = LoraConfig(r=stage.lora_rank, lora_alpha=2 * stage.lora_rank, target_modules="all-linear")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapted = get_peft_model(model, config)
    for site in recurrent_sites(adapted):
        if site.feature_map.trainable:
            site.feature_map.requires_grad_(True)
    return adapted
