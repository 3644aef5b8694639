"""One stage on Hugging Face's Trainer: our objectives, optimizers and schedules; precision, accumulation, logging,
checkpoints and several processes are theirs."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from t2r.attention import recurrent_sites
from t2r.errors import T2RError
from t2r.training.objectives import capture_head_input, distillation_loss, head_is_linear, transferring
from t2r.training.recipe import Stage

COMPLETE = "complete"
"""The last file of a checkpoint: without it the checkpoint was cut off and is not used."""


class StageTrainer(Trainer):
    """Trains one stage. `teacher` is what a distillation is measured against."""

    def __init__(
        self,
        model: PreTrainedModel,
        stage: Stage,
        steps: int,
        dataset: Dataset[Any],
        folder: Path,
        teacher: PreTrainedModel | None = None,
        *,
        seed: int = 0,
        bf16: bool = False,
        save_steps: int | None = None,
        report_to: str = "none",
        progress: bool = True,
    ) -> None:
        choose_trained(model, stage)
        optimizer = make_optimizer(model, stage)
        schedule = stage.make_schedule(steps)
        scheduler = LambdaLR(optimizer, lambda step: schedule.at(step) / stage.learning_rate)
        rows, accumulation = batch_shape(stage)
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulation,
            max_grad_norm=stage.clip_norm or 0.0,
            bf16=bf16,
            use_cpu=next(model.parameters()).device.type == "cpu",
            save_strategy="steps",
            save_steps=save_steps or max(1, math.ceil(steps / 10)),
            save_total_limit=2,
            logging_steps=max(1, min(20, steps // 20)),
            logging_nan_inf_filter=False,  # a NaN is news
            report_to=[] if report_to == "none" else [report_to],
            seed=seed,
            data_seed=seed,
            remove_unused_columns=False,
            disable_tqdm=not progress,
            dataloader_num_workers=0,
            dataloader_pin_memory=torch.cuda.is_available(),
            ddp_find_unused_parameters=False,
        )
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=dataset,
            optimizers=(optimizer, scheduler),
            callbacks=[Watch()],
        )
        self.stage, self.teacher = stage, teacher
        self.model_accepts_loss_kwargs = False  # our losses are means: accumulation divides them
        self.terms: dict[str, list[Tensor]] = {}
        self.linear_heads: bool | None = None

    def compute_loss(  # type: ignore[override]
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any
    ) -> Any:
        inputs = dict(inputs)
        labels = inputs.pop("labels", None)
        if self.stage.objective == "transfer":
            with transferring(model) as errors:
                model(**inputs, use_cache=False)
            return torch.stack(errors).mean()
        if self.stage.objective == "task":
            return model(**inputs, labels=labels, use_cache=False).loss
        return self.distill(model, inputs, labels)

    def distill(self, model: Any, inputs: dict[str, Tensor], labels: Tensor | None) -> Tensor:
        stage, teacher = self.stage, self.teacher
        assert teacher is not None and labels is not None
        student: Any = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        if self.linear_heads is None:
            probe = inputs["input_ids"][:1, :8]
            self.linear_heads = head_is_linear(teacher, probe) and head_is_linear(student, probe)
        weights = {"kl_weight": stage.kl_weight, "task_weight": stage.task_weight, "temperature": stage.temperature}
        targets = labels[:, 1:].flatten()
        if self.linear_heads:
            with torch.no_grad(), capture_head_input(teacher) as of_teacher:
                teacher(**inputs, use_cache=False)
            with capture_head_input(student) as of_student:
                model(**inputs, use_cache=False)
            ours, theirs = of_student[0], of_teacher[0]
            heads = {
                "student_head": student.get_output_embeddings(),
                "teacher_head": teacher.get_output_embeddings(),
            }
        else:  # something follows the output embeddings (a cap, a scale): logits as they come, of the whole batch
            with torch.no_grad():
                theirs = teacher(**inputs, use_cache=False).logits
            ours, heads = model(**inputs, use_cache=False).logits, {}
        loss, kl, task = distillation_loss(
            ours[:, :-1].flatten(0, 1), theirs[:, :-1].flatten(0, 1), targets, **heads, **weights
        )
        self.note("kl", kl)
        if stage.task_weight:
            self.note("task", task)
        return loss

    def note(self, name: str, value: Tensor) -> None:
        self.terms.setdefault(name, []).append(value.detach())

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs |= {name: torch.stack(values).mean().item() for name, values in self.terms.items()}
            self.terms.clear()
        super().log(logs, *args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        if self.is_world_process_zero():
            (Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}" / COMPLETE).touch()


class Watch(TrainerCallback):
    """Stops a run that has gone wrong, with the last good checkpoint kept."""

    def __init__(self) -> None:
        self.best = math.inf
        self.bad = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        loss = (logs or {}).get("loss")
        if loss is None:
            return
        if not math.isfinite(loss):
            raise T2RError(f"the loss is {loss} at step {state.global_step}: lower the learning rate; {kept(args)}")
        self.bad = self.bad + 1 if loss > 4 * self.best + 1 else 0
        self.best = min(self.best, loss)
        if self.bad >= 3:
            raise T2RError(
                f"the loss has grown from {self.best:.3g} to {loss:.3g} by step {state.global_step}: it diverges; lower "
                f"the learning rate; {kept(args)}"
            )


def kept(arguments: Any) -> str:
    checkpoint = last_checkpoint(Path(arguments.output_dir))
    return f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end."""
    complete = [p.parent for p in folder.glob(f"checkpoint-*/{COMPLETE}")]
    return max(complete, key=lambda p: int(p.name.split("-")[1]), default=None)


def batch_shape(stage: Stage) -> tuple[int, int]:
    """Rows of a forward on one device, and forwards per optimizer step, so that a step is `batch_tokens` in all."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rows = stage.batch_tokens // stage.block_size
    if rows % world:
        raise T2RError(f"a batch of {rows} blocks cannot be shared evenly by {world} processes")
    most = (stage.device_tokens or min(stage.batch_tokens, 16384)) // stage.block_size
    per_device = rows // world
    accumulation = -(-per_device // max(1, most))
    while per_device % accumulation:
        accumulation += 1
    return per_device // accumulation, accumulation


def choose_trained(model: nn.Module, stage: Stage) -> None:
    """Set which parameters learn. A frozen map stays frozen; LoRA has frozen the rest itself."""
    if stage.train == "lora":
        return
    sites = recurrent_sites(model)
    maps = {id(p) for site in sites for p in site.feature_map.parameters()}
    attention = {id(p) for site in sites for p in site.parameters()}
    frozen = {id(p) for site in sites if not site.feature_map.trainable for p in site.feature_map.parameters()}
    chosen = {"maps": maps, "attention": attention}.get(stage.train)
    for name, parameter in model.named_parameters():
        learns = (chosen is None or id(parameter) in chosen) and id(parameter) not in frozen
        parameter.requires_grad_(learns and "embed_positions" not in name and parameter.is_floating_point())
    if not any(p.requires_grad for p in model.parameters()):
        raise T2RError(f"stage {stage.name!r} has nothing to train: its maps have no parameters, or are frozen")


def make_optimizer(model: nn.Module, stage: Stage) -> torch.optim.Optimizer:
    maps = {id(p) for site in recurrent_sites(model) for p in site.feature_map.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if id(p) in maps], "lr": stage.map_learning_rate or stage.learning_rate},
        {"params": [p for p in trained if id(p) not in maps], "lr": stage.learning_rate},
    ]
    groups = [group for group in groups if group["params"]]
    if stage.optimizer == "nag":  # fairseq's nag is this, its velocity rescaled with the rate
        return torch.optim.SGD(
            groups, lr=stage.learning_rate, momentum=stage.momentum, nesterov=True, weight_decay=stage.weight_decay
        )
    kind = torch.optim.AdamW if stage.optimizer == "adamw" else torch.optim.Adam
    beta1, beta2 = stage.betas
    fused = all(p.device.type == "cuda" for p in trained)
    return kind(
        groups,
        lr=stage.learning_rate,
        betas=(beta1, beta2),
        eps=stage.epsilon,
        weight_decay=stage.weight_decay,
        fused=fused,
    )
