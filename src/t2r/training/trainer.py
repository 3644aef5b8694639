"""One stage on Hugging Face's Trainer: our objectives, optimizers and schedules; precision, accumulation, logging,
checkpoints and several processes are theirs."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations import TensorBoardCallback

from t2r.attention.recurrence import recurrent_sites
from t2r.errors import T2RError
from t2r.storage import writing
from t2r.training import processes
from t2r.training.muon import Muon
from t2r.training.objectives import capture_head_input, distillation_loss, head_gives_logits, transferring
from t2r.training.recipe import Stage

COMPLETE = "complete"
"""The last file of a checkpoint: without it the checkpoint was cut off and is not used."""
LEARNED = "learned.safetensors"
"""In a checkpoint of a LoRA stage: all that is trained. peft itself would save the adapters only, not the maps."""


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
        logs: Path | None = None,
        progress: bool = True,
        compiled: bool = False,
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
        arguments._n_gpu = min(1, arguments.n_gpu)  # without a launcher, one: DataParallel would multiply the batch
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=dataset,
            optimizers=(optimizer, scheduler),
            callbacks=[Watch()],
        )
        # Each prints what is logged to stdout, among our results.
        self.remove_callback(PrinterCallback)
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(Bar())
        for callback in self.callback_handler.callbacks:  # its own choice is the folder of the checkpoints, which goes
            if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None and logs is not None:
                callback.logging_dir = str(logs)
        self.stage, self.teacher, self.compiled = stage, teacher, compiled
        # Whether the loss is divided by what `get_batch_samples` counts, or a mean that accumulation has to divide.
        self.model_accepts_loss_kwargs = stage.objective != "transfer"
        self.terms: dict[str, Tensor] = {}
        self.heads_known = False
        # Nobody reads the logits of a transfer: one row of them has to be.
        takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.without_logits = {"logits_to_keep": 1} if takes_rows else {}
        # Such a model forms the logits of the words it needs, and of no others: an adaptive softmax.
        self.own_loss = stage.objective == "task" and bool(getattr(model, "loss_without_logits", False))
        # FSDP has whole weights inside a forward only.
        if stage.objective != "transfer" and not (self.own_loss or self.is_fsdp_enabled):
            block: Any = dataset[0]
            probe = block["input_ids"][None, :8].to(model.device)
            self.heads_known = all(head_gives_logits(part, probe) for part in (model, teacher) if part is not None)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The batches of an optimizer step, and how many tokens of them are to be learned from, in all processes."""
        batches, _ = super().get_batch_samples(*args, **kwargs)
        if not batches or not self.model_accepts_loss_kwargs:
            return batches, None
        scored = torch.stack([(batch["labels"][:, 1:] >= 0).sum() for batch in batches]).sum()
        return batches, self.accelerator.reduce(scored.to(self.args.device), "sum")

    def compute_loss(  # type: ignore[override]
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
        **_: Any,
    ) -> Any:
        inputs = dict(inputs)
        whole = inputs.pop("labels")
        if self.stage.noise:
            inputs["input_ids"] = exchanged(inputs["input_ids"], self.stage.noise)
        if self.stage.objective == "transfer":
            with transferring(model, self.compiled) as errors:
                model(**inputs, use_cache=False, **self.without_logits)
            return torch.stack(errors).mean()
        # Processes average their gradients, so each divides its sum by its share of the count.
        count = None if num_items_in_batch is None else num_items_in_batch / processes.count()
        if self.own_loss:  # it shifts the labels itself
            scored = None if count is None else count.clamp_min(1)
            return model(**inputs, labels=whole, num_items_in_batch=scored, use_cache=False).loss
        return self.against(model, inputs, whole[:, 1:].flatten(), count)

    def against(self, model: Any, inputs: dict[str, Tensor], labels: Tensor, count: Tensor | None) -> Tensor:
        """The loss against the text and, in a distillation, against the teacher's distribution."""
        stage, teacher = self.stage, self.teacher
        distills = stage.objective == "distill"
        weights = (stage.kl_weight, stage.task_weight) if distills else (0.0, 1.0)
        student: Any = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        theirs: Any = None
        heads: dict[str, Any] = {}
        if self.heads_known:
            heads["student_head"] = student.get_output_embeddings()
            with capture_head_input(student) as of_student:
                model(**inputs, use_cache=False)
            ours = of_student[0]
            if teacher is not None:
                heads["teacher_head"] = teacher.get_output_embeddings()
                with torch.no_grad(), capture_head_input(teacher) as of_teacher:
                    teacher(**inputs, use_cache=False)
                theirs = of_teacher[0]
        else:  # something follows the output embeddings (a cap, a scale): logits as they come, of the whole batch
            ours = model(**inputs, use_cache=False).logits
            if teacher is not None:
                with torch.no_grad():
                    theirs = teacher(**inputs, use_cache=False).logits
        loss, kl, task = distillation_loss(
            ours[:, :-1].flatten(0, 1),
            None if theirs is None else theirs[:, :-1].flatten(0, 1),
            labels,
            count=count,
            kl_weight=weights[0],
            task_weight=weights[1],
            temperature=stage.temperature,
            compiled=self.compiled,
            **heads,
        )
        if distills:
            scored = (labels >= 0).sum()
            share = scored.clamp_min(1) if count is None else count
            self.note("tokens", scored)
            self.note("kl", kl * share)
            if stage.task_weight:
                self.note("task", task * share)
        return loss

    def note(self, name: str, value: Tensor) -> None:
        self.terms[name] = self.terms.get(name, 0) + value.detach()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self.terms:
            sums = {name: self.accelerator.reduce(value, "sum") for name, value in self.terms.items()}
            logs |= {name: (x / sums["tokens"]).item() for name, x in sums.items() if name != "tokens"}
            self.terms.clear()
        super().log(logs, *args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if not all(p.isfinite().all() for p in self.learned().values()):
            raise T2RError(
                f"the weights are not finite at step {self.state.global_step}: lower the learning rate; "
                f"{kept(self.args)}"
            )
        folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        with writing(folder):
            super()._save_checkpoint(*args, **kwargs)
            self.accelerator.wait_for_everyone()  # each process has saved its random state
            if self.is_world_process_zero():
                (folder / COMPLETE).touch()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self.stage.train != "lora":
            super()._save(output_dir, state_dict)
            return
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: p.detach().cpu().contiguous() for name, p in self.learned().items()}, folder / LEARNED)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.stage.train != "lora":
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        saved, own = load_file(Path(resume_from_checkpoint) / LEARNED), self.learned()
        for name, parameter in own.items():
            parameter.data.copy_(saved[name])

    def learned(self) -> dict[str, nn.Parameter]:
        model: Any = self.model
        return {name: p for name, p in model.named_parameters() if p.requires_grad}


class Bar(ProgressCallback):
    """Progress on stderr, with the loss beside it."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is not None and "loss" in (logs or {}):
            self.training_bar.set_postfix(loss=f"{logs['loss']:.4g}")


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
        self.bad = self.bad + 1 if loss > 2 * self.best + 1 else 0
        self.best = min(self.best, loss)
        if self.bad >= 3:
            raise T2RError(
                f"the loss has grown from {self.best:.3g} to {loss:.3g} by step {state.global_step}: it diverges; "
                f"lower the learning rate; {kept(args)}"
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
    world = processes.count()
    rows = stage.batch_tokens // stage.block_size
    if rows % world:
        raise T2RError(f"a batch of {rows} blocks cannot be shared evenly by {world} processes")
    most = (stage.device_tokens or min(stage.batch_tokens, 16384)) // stage.block_size
    per_device = rows // world
    accumulation = -(-per_device // max(1, most))
    while per_device % accumulation:
        accumulation += 1
    return per_device // accumulation, accumulation


def exchanged(ids: Tensor, share: float) -> Tensor:
    """Tokens, of which this share, at random, are others of the same batch. A model that is to be like its teacher on
    any text learns more from a text it has seen before if it is not quite the same."""
    others = ids.flatten()[torch.randint(ids.numel(), ids.shape, device=ids.device)]
    return torch.where(torch.rand(ids.shape, device=ids.device) < share, others, ids)


def choose_trained(model: nn.Module, stage: Stage) -> None:
    """Set which parameters learn. A frozen map stays frozen; LoRA has frozen the rest itself."""
    if stage.train == "lora":
        return
    sites = recurrent_sites(model)
    maps = {id(p) for site in sites for p in site.feature_map.parameters()}
    attention = {id(p) for site in sites for p in site.parameters()}
    frozen = {id(p) for site in sites if not site.feature_map.trainable for p in site.feature_map.parameters()}
    frozen |= {id(p) for m in model.modules() if "Sinusoidal" in type(m).__name__ for p in m.parameters()}
    chosen = {"maps": maps, "attention": attention}.get(stage.train)
    for parameter in model.parameters():
        learns = (chosen is None or id(parameter) in chosen) and id(parameter) not in frozen
        parameter.requires_grad_(learns and parameter.is_floating_point())
    if not any(p.requires_grad for p in model.parameters()):
        raise T2RError(f"stage {stage.name!r} has nothing to train: its maps have no parameters, or are frozen")


def make_optimizer(model: nn.Module, stage: Stage) -> torch.optim.Optimizer:
    sites = recurrent_sites(model)
    maps = {id(p) for site in sites for p in site.feature_map.parameters()}
    paces = {id(p): pace for site in sites for p, pace in site.feature_map.paces().items()}
    map_rate = stage.learning_rate if stage.map_learning_rate is None else stage.map_learning_rate
    matrices = orthogonalized(model, maps) if stage.optimizer == "muon" else set()
    alike: dict[tuple[float, bool], list[nn.Parameter]] = defaultdict(list)
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in sorted(trained, key=lambda p: id(p) not in maps):  # whose rate is logged is the first
        rate = map_rate * paces.get(id(p), 1.0) if id(p) in maps else stage.learning_rate
        alike[rate, id(p) in matrices].append(p)
    groups = [{"params": own, "lr": rate, "orthogonal": matrix} for (rate, matrix), own in alike.items()]
    if stage.optimizer == "nag":  # fairseq's is this, its velocity rescaled with the rate (and its decay decoupled)
        return torch.optim.SGD(
            groups, lr=stage.learning_rate, momentum=stage.momentum, nesterov=True, weight_decay=stage.weight_decay
        )
    kind = {"muon": Muon, "adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[stage.optimizer]
    beta1, beta2 = stage.betas
    fused = all(p.device.type in ("cpu", "cuda") for p in trained)
    return kind(
        groups,
        lr=stage.learning_rate,
        betas=(beta1, beta2),
        eps=stage.epsilon,
        weight_decay=stage.weight_decay,
        fused=fused,
    )


def orthogonalized(model: nn.Module, maps: set[int]) -> set[int]:
    """The parameters that Muon takes for matrices: weights of linear layers, and those of maps, one for each head. Not
    embeddings, whose rows have nothing to do with each other, nor what has a row for each head and is no matrix."""
    head: Any = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) or m is head for p in m.parameters()}

    def is_matrix(p: Tensor) -> bool:
        return p.dim() == 3 and p.shape[1] > 1 if id(p) in maps else p.dim() == 2 and id(p) not in tables

    return {id(p) for p in model.parameters() if is_matrix(p)}
