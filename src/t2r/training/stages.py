"""Runs a stage of a recipe, or resumes it."""

from __future__ import annotations

import logging
from typing import Any

from transformers import PreTrainedModel, TrainerCallback

from t2r.tasks import Task
from t2r.training.budget import duration, plan_stage, smaller_batch, steps_of, with_batch
from t2r.training.checkpoints import last_checkpoint
from t2r.training.memory import held_bytes
from t2r.training.optimizers import choose_trained
from t2r.training.order import epoch_items
from t2r.training.preparation import prepared, with_lora
from t2r.training.recipe import Stage
from t2r.training.run import Run
from t2r.training.threads import Threads
from t2r.training.timing import Speeds, time_stage
from t2r.training.trainer import Settings, StageTrainer

logger = logging.getLogger(__name__)


def run_stage(
    run: Run,
    model: PreTrainedModel,
    stage: Stage,
    task: Task,
    teacher: PreTrainedModel | None = None,
    settings: Settings = Settings(),  # noqa: B008
    speeds: Speeds | None = None,
    seconds: float | None = None,
    threads: int | None = None,
) -> PreTrainedModel:
    """Train a stage, or load its result if it is finished. Returns the trained model, with LoRA adapters merged.

    With `settings.compiled`, each decoder layer and the loss are compiled with torch.compile; in a transfer, the error
    of each site. All layers share the compiled code, so this takes half a minute. On a GPU a step becomes more than
    twice as fast.

    Args:
        speeds: measured speeds. None: a stage with a time budget is timed now.
        seconds: the time for this stage. None: the stage's own budget. A stage with a time budget ends when the time
            is over; its number of steps is an estimate.
        threads: the maximum number of threads, tuned during a stage with a time budget. None: it is not tuned.
    """
    if run.restore(stage.name, model):
        return model
    if stage.objective != "distill":
        teacher = None
    dataset: Any = task.dataset(stage.block_size)
    if f"{stage.name}.steps" not in run.facts:
        steps, batch_tokens = budgeted(
            stage, round(epoch_items(dataset) * stage.block_size), model, task, teacher, settings, speeds, seconds
        )
        run.remember(f"{stage.name}.batch_tokens", lambda: batch_tokens)
        run.remember(f"{stage.name}.steps", lambda: steps)
        if stage.minutes is not None:
            limit = 60 * stage.minutes if seconds is None else seconds
            run.remember(f"{stage.name}.seconds", lambda: limit)
    steps, seconds = run.facts[f"{stage.name}.steps"], run.facts.get(f"{stage.name}.seconds")
    stage = fit(with_batch(stage, run.facts.get(f"{stage.name}.batch_tokens", stage.batch_tokens)), steps)
    folder = run.checkpoints(stage.name)
    trained: Any = with_lora(model, stage, settings.seed) if stage.train == "lora" else model
    with prepared(trained, model, teacher, stage, settings, task):
        choose_trained(trained, stage)
        cost = None if speeds is None else speeds.stages[stage.name].of(stage.batch_tokens)
        expected = seconds if seconds is not None or cost is None else cost * steps
        announce(stage, steps, trained, teacher, dataset, expected)
        trainer = StageTrainer(trained, stage, steps, task, folder, teacher, settings, run.logs / stage.name, seconds)
        trainer.add_callback(KeepsTime(run))
        if seconds is not None and threads is not None:
            trainer.add_callback(Threads(threads))
        checkpoint = last_checkpoint(folder)
        if checkpoint is not None:
            logger.info("resuming from step %s of %s", checkpoint.name.split("-")[1], stage.name)
            if trainer.deadline is not None:
                trainer.deadline.load(checkpoint)
            if trainer.average is not None:
                trainer.average.load(checkpoint)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if trainer.average is not None:
            trainer.average.finish()
            logger.info("stage %s: the mean of %d points is the result", stage.name, trainer.average.count)
    if stage.train == "lora":
        model = trained.merge_and_unload()
    done = trainer.state.global_step
    if trainer.deadline is not None:
        logger.info("stage %s: %s steps in %s", stage.name, f"{done:,}", duration(trainer.deadline.elapsed))
        run.remember(f"{stage.name}.done", lambda: done)
    if hasattr(dataset, "tokens_of_sources"):
        counts = trainer.order.totals(done * stage.batch_tokens // stage.block_size)
        run.remember(f"{stage.name}.read", lambda: dataset.tokens_of_sources(counts))
    run.remember(f"{stage.name}.log", lambda: [e for e in trainer.state.log_history if "loss" in e])
    run.finish(stage.name, model)
    trainer.accelerator.free_memory()
    return model


class KeepsTime(TrainerCallback):
    """Records the working time of the run with every checkpoint."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.write()


def budgeted(
    stage: Stage,
    tokens: int,
    model: PreTrainedModel,
    task: Task,
    teacher: PreTrainedModel | None,
    settings: Settings,
    speeds: Speeds | None,
    seconds: float | None,
) -> tuple[int, int]:
    """Return the number of steps of a stage and the tokens per step, for a text of `tokens` tokens."""
    if stage.minutes is None:
        return steps_of(stage, tokens), stage.batch_tokens
    told = speeds is not None  # the caller has already logged what was reduced
    if speeds is None:
        speeds = Speeds({stage.name: time_stage(model, stage, task, teacher, settings)}, 0.0)
    made = plan_stage(stage, speeds, seconds, tokens)
    if made.batch_tokens < stage.batch_tokens and not told:
        logger.warning("%s, to fit into its minutes", smaller_batch(stage, made.batch_tokens))
    return max(1, made.steps), made.batch_tokens


def fit(stage: Stage, steps: int) -> Stage:
    """Return the stage with its warm-up shortened to fit its budget, with a warning."""
    fitted = stage.fitted(steps)
    if fitted is not stage:
        logger.warning(
            "stage %s has %d steps, no more than its %d warm-up steps, which are reduced to %d",
            stage.name,
            steps,
            stage.warmup_steps,
            fitted.warmup_steps,
        )
    return fitted


def announce(stage: Stage, steps: int, model: Any, teacher: Any, dataset: Any, seconds: float | None) -> None:
    """Log the steps, tokens, time and memory of a stage before it starts."""
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    bytes_ = held_bytes(model, stage, teacher)
    blocks = steps * stage.batch_tokens // stage.block_size
    logger.info(
        "stage %s (%s, trains %s): %s steps, %s tokens (%.1f epochs)%s; %.1fM of %.1fM parameters are trained; "
        "weights, gradients and optimizer states need %.2f GB, plus activations",
        stage.name,
        stage.objective,
        stage.train,
        f"{steps:,}",
        f"{steps * stage.batch_tokens:,}",
        blocks / epoch_items(dataset),
        "" if seconds is None else f" in about {duration(seconds)}",
        trained / 1e6,
        parameters / 1e6,
        bytes_ / 1e9,
    )
