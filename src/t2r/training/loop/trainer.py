"""Trains one stage with Hugging Face's Trainer.

Objectives, optimizers and schedules are t2r's. Trainer provides precision, accumulation, logging, checkpoints and
distributed training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.integrations import TensorBoardCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from t2r import compat
from t2r.errors import T2RError
from t2r.sharding import is_part, is_sharded, own, state_of
from t2r.storage import writing
from t2r.surgery.adapters import Family
from t2r.training.loop import processes, shards
from t2r.training.loop.averaging import Average, averaging_points
from t2r.training.loop.checkpoints import COMPLETE, last_checkpoint, seal
from t2r.training.loop.deadline import FASTER, Deadline, next_agreement
from t2r.training.loop.progress import Bar, Notes
from t2r.training.recipes.recipe import Stage
from t2r.training.steps.capture import CapturedStep
from t2r.training.steps.job import Job, Settings
from t2r.training.steps.learner import Learner
from t2r.training.steps.optimizers import choose_trained, make_optimizer
from t2r.training.steps.order import Order, collate, epoch_items

LEARNED = "learned.safetensors"
"""The file in a checkpoint with everything that changes: trained parameters and buffers."""
SAVE_SECONDS = 180.0
"""Seconds between checkpoints, unless a number of steps is given."""

COUNT, LOSS = "t2r.count", "t2r.loss"
"""Keys added to the inputs and outputs of a captured step."""


class StageTrainer(compat.TrainerHooks, Trainer):
    """Trains one stage.

    Args:
        model: the model that is trained, with its LoRA adapters if there are any.
        steps: the number of steps, planned if there are `seconds`.
        folder: the folder of the checkpoints.
        logs: the folder of log files.
        seconds: the stage ends when this time is over.
    """

    def __init__(
        self,
        job: Job,
        model: PreTrainedModel,
        stage: Stage,
        steps: int,
        folder: Path,
        *,
        logs: Path | None = None,
        seconds: float | None = None,
    ) -> None:
        task = job.task
        choose_trained(model, stage)
        self.deadline = None if seconds is None else Deadline(seconds, steps)
        arguments = training_arguments(job.settings, model, stage, steps, folder, self.deadline)
        items = arguments.max_steps * (stage.batch_tokens // stage.block_size)
        self.stage, self.task, self.learner = stage, task, Learner(job, model, stage)
        self.order = Order(job.dataset(stage), items, job.settings.seed, self.learner.room.largest)
        reached = float if self.deadline is None else self.deadline.planned_step
        self.average = make_average(model, stage, steps, self.order, reached)
        saves = self.when_to_save(job.settings.save_steps, sharded=is_sharded(model))
        capturing = captures(model, job.settings)
        shaped = partial(task.in_few_shapes, block_size=stage.block_size) if capturing else None
        super().__init__(
            model=self.learner,
            args=arguments,
            train_dataset=self.order,
            data_collator=partial(collate, batch=task.collate, rows=task.rows_of, shaped=shaped),
            optimizers=make_optimizers(model, stage, steps, reached),
            callbacks=[x for x in (Intervals(), Watch(), self.deadline, saves, self.average) if x is not None],
        )
        self.replace_callbacks(logs)
        if processes.count() > 1 and not skips_layers(model):  # all of them must skip the same layers
            self.add_callback(OwnNumbers())
        self.sharded = is_sharded(model)
        if self.sharded and self.average is not None:
            raise T2RError(f"stage {stage.name!r}: average is not supported with fsdp_size")
        # True: the loss is divided by the count of `get_batch_samples`. False: it is a mean, divided by accumulation.
        self.model_accepts_loss_kwargs = stage.objective != "transfer"
        self.terms: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        self.captured = CapturedStep(self.whole_step, model.parameters()) if capturing else None

    @staticmethod
    def when_to_save(steps: int | None, *, sharded: bool) -> TrainerCallback | None:
        """Return what requests checkpoints. None: Trainer does, after as many steps. Of a sharded model it refuses to,
        because it does not save the states of its optimizer, as t2r does."""
        if steps is None:
            return Clock()
        return EverySteps(steps) if sharded else None

    def replace_callbacks(self, logs: Path | None) -> None:
        """Remove what prints logs to stdout, where the results go, and write log files to `logs`."""
        self.remove_callback(PrinterCallback)
        shown = self.pop_callback(DEFAULT_PROGRESS_CALLBACK) is not None  # in a notebook it is another one
        self.add_callback((Bar if shown else Notes)(self.stage.name, self.deadline))
        for callback in self.callback_handler.callbacks:  # its default is the checkpoint folder, which is removed
            if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None and logs is not None:
                callback.logging_dir = str(logs)

    # --- The loss -------------------------------------------------------------------------------------------

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of an optimizer step, and the number of scored positions over all processes."""
        batches, _ = super().get_batch_samples(*args, **kwargs)
        if not batches or not self.model_accepts_loss_kwargs:
            return batches, None
        scored = torch.stack([(self.task.labels(batch) >= 0).sum() for batch in batches]).sum()
        return batches, self.accelerator.reduce(scored.to(self.args.device), "sum")

    def compute_loss(  # type: ignore[override]
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
        **_: Any,
    ) -> Any:
        # Gradients are averaged over processes, so each divides its sum by its share of the count.
        count = None if num_items_in_batch is None else num_items_in_batch / processes.count()
        loss, self.sums = model(dict(inputs), count)
        return loss

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if self.captured is None:
            loss = super().training_step(model, inputs, num_items_in_batch)
            sums = self.sums
            if self.sharded and self.accelerator.sync_gradients:
                average_gradients(p for p in self.learner.student.parameters() if not is_part(p))
        else:
            count = {} if num_items_in_batch is None else {COUNT: num_items_in_batch}
            divided = self.current_gradient_accumulation_steps
            sums = dict(self.captured(dict(inputs) | count, variant=divided))  # already on the device
            loss = sums.pop(LOSS)
        for name, value in sums.items():
            self.terms[name] = self.terms.get(name, 0) + value
        return loss

    def whole_step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run forward and backward on a batch. Returns the loss and sums for the log."""
        loss = super().training_step(self.model_wrapped, inputs, inputs.pop(COUNT, None))
        return self.sums | {LOSS: loss}

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self.terms:
            sums = {name: self.accelerator.reduce(value, "sum") for name, value in self.terms.items()}
            logs |= {name: (x / sums["tokens"]).item() for name, x in sums.items() if name != "tokens"}
            self.terms.clear()
        if "learning_rate" in logs and self.optimizer is not None:
            # Trainer logs that of the first parameter group, whose rate may be another than the stage's.
            factor = logs["learning_rate"] / self.optimizer.param_groups[0]["initial_lr"]
            logs |= {name: factor * rate for name, rate in self.stage.peak_rates.items()}
        super().log(logs, *args, **kwargs)

    # --- Checkpoints ----------------------------------------------------------------------------------------

    def save_checkpoint(self, save: Callable[[], None]) -> None:
        trained = [own(p) for p in self.learner.student.parameters() if p.requires_grad]
        if not processes.everywhere(all(bool(p.isfinite().all()) for p in trained)):
            raise T2RError(
                f"weights are not finite at step {self.state.global_step}: lower the learning rate; {kept(self.args)}"
            )
        folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        with writing(folder):
            save()
            self.accelerator.wait_for_everyone()  # each process saves its random state
            if self.is_world_process_zero():
                if self.deadline is not None:
                    self.deadline.save(folder)
                if self.average is not None:
                    self.average.save(folder)
                seal(folder)

    def leave(self) -> None:
        """Save a checkpoint of the last whole step, if there is none, and close the progress bar and log files."""
        folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        if self.state.global_step and not (folder / COMPLETE).exists():
            self.checkpoint_now()
        self.callback_handler.on_train_end(self.args, self.state, self.control)

    def save_weights(self, folder: Path) -> bool:
        if self.sharded:
            shards.save(folder / shards.WEIGHTS, self.changing())
            return True
        folder.mkdir(parents=True, exist_ok=True)
        # Buffers are copied because they may share memory, which safetensors refuses.
        tensors = {
            name: x.detach().to("cpu", copy=not isinstance(x, nn.Parameter)).contiguous()
            for name, x in self.changing().items()
        }
        save_file(tensors, folder / LEARNED)
        return True

    def load_weights(self, folder: Path) -> bool:
        if (folder / shards.WEIGHTS).is_dir():
            shards.load(folder / shards.WEIGHTS, self.changing())
            return True
        if self.sharded:
            raise T2RError(f"{folder} was saved without fsdp_size: resume it without, or start again with --restart")
        saved = load_file(folder / LEARNED)
        for name, x in self.changing().items():
            x.data.copy_(saved[name])
        return True

    def save_optimizer(self, folder: Path) -> bool:
        if self.sharded:
            shards.save_optimizer(folder, *self.resumable())
        return self.sharded

    def load_optimizer(self, folder: Path) -> bool:
        if there := (folder / shards.STATES).is_dir():
            shards.load_optimizer(folder, *self.resumable())
        return there

    def resumable(self) -> tuple[Any, Any, Any]:
        """Return the model, the optimizer without accelerate's wrapper, and the schedule."""
        return self.learner.student, getattr(self.optimizer, "optimizer", self.optimizer), self.lr_scheduler

    def changing(self) -> dict[str, Tensor]:
        """Return the trained parameters, tied ones once, and the persistent buffers."""
        return {
            n: x
            for n, x in state_of(self.learner.student).items()
            if not isinstance(x, nn.Parameter) or x.requires_grad
        }


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace the gradients of parameters that every process has by their mean over the processes."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        joined = torch.cat([x.flatten() for x in gradients])
        torch.distributed.all_reduce(joined)
        joined /= processes.count()
        for x, mean in zip(gradients, joined.split([x.numel() for x in gradients]), strict=True):
            x.copy_(mean.view_as(x))


def training_arguments(
    settings: Settings, model: nn.Module, stage: Stage, steps: int, folder: Path, deadline: Deadline | None
) -> TrainingArguments:
    """Return the arguments of Trainer. With a deadline there may be more steps than planned."""
    rows, accumulation = batch_shape(stage)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps if deadline is None else FASTER * steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=stage.clip_norm or 0.0,
        bf16=settings.bf16,
        use_cpu=next(model.parameters()).device.type == "cpu",
        save_strategy="no" if settings.save_steps is None or is_sharded(model) else "steps",
        save_steps=settings.save_steps or 500,
        save_total_limit=2,
        logging_steps=max(1, min(20, steps // 20)),
        logging_nan_inf_filter=False,  # `Watch` must see NaN losses
        report_to=[] if settings.report_to == "none" else [settings.report_to],
        seed=settings.seed,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        disable_tqdm=not settings.progress,
        log_level_replica="passive",  # by default, Trainer lets all processes but the first print warnings
        dataloader_num_workers=0,
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
    )
    compat.use_one_gpu(arguments)
    return arguments


def make_optimizers(
    model: nn.Module, stage: Stage, steps: int, reached: Callable[[int], float]
) -> tuple[Optimizer, LambdaLR]:
    """Return the optimizer, and its learning rates as a function of the step of the plan that is `reached`."""
    optimizer = make_optimizer(model, stage)
    schedule = stage.make_schedule(steps)
    return optimizer, LambdaLR(optimizer, lambda step: schedule.at(reached(step)) / stage.learning_rate)


def make_average(
    model: nn.Module, stage: Stage, steps: int, order: Order, reached: Callable[[int], float]
) -> Average | None:
    """Return what averages the weights of a stage, if it does."""
    if stage.average <= 1:
        return None
    epoch = float(epoch_items(order.items)) * stage.block_size / stage.batch_tokens
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return Average(weights, averaging_points(steps, stage.average, epoch), reached)


class Clock(TrainerCallback):
    """Requests a checkpoint every SAVE_SECONDS."""

    def __init__(self) -> None:
        self.began = self.saved = time.monotonic()
        self.first = self.due = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = self.saved = time.monotonic()
        self.first = self.due = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        if processes.count() > 1 and step < self.due:
            return
        now = time.monotonic()
        since, total = processes.agreed((now - self.saved, now - self.began))
        self.due = step + next_agreement(total / max(1, step - self.first))
        if since >= SAVE_SECONDS:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved = time.monotonic()


class EverySteps(TrainerCallback):
    """Requests a checkpoint every so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.steps == 0:
            control.should_save = True


class OwnNumbers(TrainerCallback):
    """Lets each of several processes draw random numbers of its own, for dropout and token noise. Trainer gives all of
    them the same seed. A resumed process then reads its state from the checkpoint, if it wrote one."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        set_seed((args.seed + processes.rank()) % (1 << 32))


class Intervals(TrainerCallback):
    """Saves and logs as often as this command says. A checkpoint has the intervals of the command that wrote it."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.save_steps, state.logging_steps = args.save_steps, args.logging_steps


class Watch(TrainerCallback):
    """Stops a run that diverges. The last good checkpoint is kept."""

    def __init__(self) -> None:
        self.best = math.inf
        self.bad = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        loss = (logs or {}).get("loss")
        if loss is None:
            return
        if not math.isfinite(loss):
            raise T2RError(f"the loss is {loss} at step {state.global_step}: lower the learning rate; {kept(args)}")
        self.bad = self.bad + 1 if loss > 2 * self.best + 1 else 0
        self.best = min(self.best, loss)
        if self.bad >= 3:
            raise T2RError(
                f"training diverges: the loss rose from {self.best:.3g} to {loss:.3g} by step {state.global_step}; "
                f"lower the learning rate; {kept(args)}"
            )


def captures(model: nn.Module, settings: Settings) -> bool:
    """Return whether steps are captured as CUDA graphs: if compiled, on one GPU, without gradient checkpointing, which
    restores the random state in the backward pass and so cannot be captured, and without layer dropout."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    return (
        on_gpu
        and settings.compiled
        and not settings.gradient_checkpointing
        and processes.count() == 1
        and not skips_layers(model)
    )


def skips_layers(model: nn.Module) -> bool:
    """Return whether the model has layer dropout. A captured step would always skip the layers that it skipped when it
    was captured."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return any(getattr(config, name, 0.0) for config in configs for name in Family.layer_drops)


def kept(arguments: Any) -> str:
    checkpoint = last_checkpoint(Path(arguments.output_dir))
    return f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"


def batch_shape(stage: Stage) -> tuple[int, int]:
    """Return the rows per forward pass on one device, and the forward passes per optimizer step."""
    world = processes.count()
    rows = stage.batch_tokens // stage.block_size
    if rows % world:
        raise T2RError(f"a batch of {rows} blocks cannot be divided evenly among {world} processes")
    most = (stage.device_tokens or min(stage.batch_tokens, 16384)) // stage.block_size
    per_device = rows // world
    accumulation = -(-per_device // max(1, most))
    while per_device % accumulation:
        accumulation += 1
    return per_device // accumulation, accumulation
