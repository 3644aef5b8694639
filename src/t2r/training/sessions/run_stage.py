"""Runs a stage of a recipe, or resumes it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, TrainerCallback

from t2r.errors import T2RError
from t2r.training.loop import processes
from t2r.training.loop.checkpoints import COMPLETE, last_checkpoint, remove_incomplete
from t2r.training.loop.interruption import Interrupted, Interruption
from t2r.training.loop.preparation import prepared, with_lora
from t2r.training.loop.threads import Threads
from t2r.training.loop.trainer import StageTrainer
from t2r.training.planning.budget import plan_stage, smaller_batch, steps_of, with_batch
from t2r.training.planning.timing import Speeds, time_stage
from t2r.training.planning.weights import held_bytes
from t2r.training.recipes.recipe import Stage
from t2r.training.sessions.run import Run
from t2r.training.steps.job import Job
from t2r.training.steps.optimizers import choose_trained
from t2r.training.steps.order import epoch_items
from t2r.words import counted, duration

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What is known about the time of a stage.

    Args:
        speeds: measured speeds. None: a stage with a time budget is timed now.
        seconds: the time for this stage. None: the stage's own budget. A stage with a time budget ends when the time
            is over; its number of steps is an estimate.
        threads: the maximum number of threads, tuned during a stage with a time budget. None: it is not tuned.
    """

    speeds: Speeds | None = None
    seconds: float | None = None
    threads: int | None = None


def run_stage(
    run: Run,
    job: Job,
    model: PreTrainedModel,
    stage: Stage,
    limits: Limits = Limits(),  # noqa: B008
) -> PreTrainedModel:
    """Train a stage, or load its result if it is finished. Returns the trained model, with LoRA adapters merged.

    With `compiled` in the settings, the loss is compiled with torch.compile; each layer, if all batches have the same
    shape or the stage is long; and in a transfer, the error of each site. Layers of a kind share the compiled code, so
    this takes half a minute, or one to three for several shapes. On a GPU a step becomes up to twice as fast."""
    if run.restore(stage.name, model):
        return model
    stage, steps, seconds = budgeted(run, job, model, stage, limits)
    trained: Any = with_lora(model, stage, job.settings.seed) if stage.train == "lora" else model
    with prepared(job, model, stage):
        choose_trained(trained, stage)
        cost = None if limits.speeds is None else limits.speeds.stages[stage.name].of(stage.batch_tokens)
        announce(job, trained, stage, steps, seconds if seconds is not None or cost is None else cost * steps)
        folder, logs = run.checkpoints(stage.name), run.logs / stage.name
        trainer = StageTrainer(job, trained, stage, steps, folder, logs=logs, seconds=seconds)
        if (obstacle := trainer.learner.room.obstacle) is not None:
            logger.info("stage %s: its blocks all start at position 0: %s", stage.name, obstacle)
        trainer.add_callback(KeepsTime(run))
        if seconds is not None and limits.threads is not None:
            trainer.add_callback(Threads(limits.threads))
        if processes.is_main():
            remove_incomplete(folder)
        processes.wait()
        with Interruption(anywhere=model.device.type == "cpu") as interruption:
            train_or_resume(trainer, agreed_checkpoint(folder), interruption)
    if stage.train == "lora":
        model = trained.merge_and_unload()
    record(run, trainer)
    run.finish(stage.name, model)
    trainer.accelerator.free_memory()
    if interruption.number is not None:  # during the last step
        interruption.stop()
    return model


def budgeted(
    run: Run, job: Job, model: PreTrainedModel, stage: Stage, limits: Limits
) -> tuple[Stage, int, float | None]:
    """Return the stage with its batch and its warm-up fitted to its budget, its number of steps, and its seconds if
    they are limited. A resumed run keeps them."""
    name = stage.name
    if f"{name}.steps" not in run.facts:
        steps, batch_tokens = steps_and_batch(job, model, stage, limits)
        made: dict[str, Any] = {f"{name}.batch_tokens": batch_tokens, f"{name}.steps": steps}
        if stage.minutes is not None:
            made[f"{name}.seconds"] = 60 * stage.minutes if limits.seconds is None else limits.seconds
        run.add(made)
    steps = run.facts[f"{name}.steps"]
    stage = with_batch(stage, run.facts.get(f"{name}.batch_tokens", stage.batch_tokens))
    return fit(stage, steps), steps, run.facts.get(f"{name}.seconds")


def steps_and_batch(job: Job, model: PreTrainedModel, stage: Stage, limits: Limits) -> tuple[int, int]:
    """Return the number of steps of a stage and the tokens per step."""
    tokens = round(epoch_items(job.task.dataset(stage.block_size)) * stage.block_size)
    if stage.minutes is None:
        return steps_of(stage, tokens), stage.batch_tokens
    speeds = limits.speeds
    told = speeds is not None  # the caller has already logged what was reduced
    if speeds is None:
        speeds = Speeds({stage.name: time_stage(job, model, stage)}, 0.0)
    made = plan_stage(stage, speeds, limits.seconds, tokens, job.task.smallest_block(stage.block_size))
    if made.batch_tokens < stage.batch_tokens and not told:
        logger.warning("%s, to fit into its minutes", smaller_batch(stage, made.batch_tokens))
    return max(1, made.steps), made.batch_tokens


def agreed_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that the main process finds, or None. It reads all of its files, so the others do not.

    Raises T2RError if another process does not see it: it would train from the beginning."""
    found: Path | None = processes.agreed(last_checkpoint(folder) if processes.is_main() else None)
    if found is not None and not processes.everywhere((found / COMPLETE).exists()):
        raise T2RError(
            f"not all processes see {found}, which the first one resumes: several machines need a folder that all "
            "of them share"
        )
    return found


def train_or_resume(trainer: StageTrainer, checkpoint: Path | None, interruption: Interruption) -> None:
    """Train, from a checkpoint if there is one. If the stage averages its weights, the model has the mean.

    If it is interrupted, a checkpoint is saved."""
    name = trainer.stage.name
    if checkpoint is not None:
        logger.info("resuming from step %s of %s", checkpoint.name.split("-")[1], name)
        if trainer.deadline is not None:
            trainer.deadline.load(checkpoint)
        if trainer.average is not None:
            trainer.average.load(checkpoint)
    trainer.add_callback(interruption)
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except Interrupted:
        interruption.rewind()
        trainer.leave()
        if trainer.state.global_step:
            logger.warning("interrupted: step %d of %s is saved", trainer.state.global_step, name)
        interruption.stop()
    if trainer.average is not None:
        trainer.average.finish()
        logger.info("stage %s: the mean of %d points is the result", name, trainer.average.count)


def record(run: Run, trainer: StageTrainer) -> None:
    """Save the facts of a trained stage: its steps if they were limited by time, the tokens of each source, and the
    log."""
    stage, done, dataset = trainer.stage, trainer.state.global_step, trainer.order.items
    if trainer.deadline is not None:
        logger.info("stage %s: %s steps in %s", stage.name, f"{done:,}", duration(trainer.deadline.elapsed))
        run.remember(f"{stage.name}.done", lambda: done)
    if hasattr(dataset, "tokens_of_sources"):
        counts = trainer.order.totals(done * stage.batch_tokens // stage.block_size)
        run.remember(f"{stage.name}.read", lambda: dataset.tokens_of_sources(counts))
    run.remember(f"{stage.name}.log", lambda: [e for e in trainer.state.log_history if "loss" in e])


class KeepsTime(TrainerCallback):
    """Records the working time of the run with every checkpoint."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.write()


def fit(stage: Stage, steps: int) -> Stage:
    """Return the stage with its warm-up shortened to fit its budget, with a warning if the budget is in steps."""
    fitted = stage.fitted(steps)
    if fitted != stage and stage.minutes is None:
        logger.warning(
            "stage %s has %s, no more than its %s, which are reduced to %d",
            stage.name,
            counted(steps, "step"),
            counted(stage.warmup_steps, "warm-up step"),
            fitted.warmup_steps,
        )
    return fitted


def announce(job: Job, model: Any, stage: Stage, steps: int, seconds: float | None) -> None:
    """Log the steps, tokens, time and memory of a stage before it starts."""
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    bytes_ = held_bytes(model, stage, job.teacher_of(stage))
    blocks = steps * stage.batch_tokens // stage.block_size
    logger.info(
        "stage %s (%s, trains %s): %s steps of %s tokens (%.1f epochs)%s; %.1fM of %.1fM parameters are trained; "
        "weights, gradients and optimizer states need %.2f GB, plus activations",
        stage.name,
        stage.objective,
        stage.train,
        f"{steps:,}",
        f"{stage.batch_tokens:,}",
        blocks / epoch_items(job.task.dataset(stage.block_size)),
        "" if seconds is None else f" in about {duration(seconds)}",
        trained / 1e6,
        parameters / 1e6,
        bytes_ / 1e9,
    )
