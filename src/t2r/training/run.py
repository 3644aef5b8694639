"""Run the stages of a recipe, and go on where a run was stopped."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import Dataset, default_collate
from transformers import PreTrainedModel

from t2r.attention.recurrence import recurrent_sites
from t2r.errors import T2RError
from t2r.storage import whole_file, write_text, writing
from t2r.surgery.adapters import family_of
from t2r.training import processes
from t2r.training.recipe import Stage
from t2r.training.trainer import StageTrainer, batch_shape, choose_trained, last_checkpoint

logger = logging.getLogger(__name__)

WORTH_CALIBRATING = 50
"""Fewer steps than this are not told how long they will take: to find out would be a tenth of it."""


class Run:
    """The working folder of a conversion: its plan, what is finished, and the checkpoints of what is not.

    Everything is written to a temporary name and renamed: whenever the process dies, the folder says truly how far it
    came. Of several processes only the main one writes, and not before the first fact is found: what is refused at once
    leaves no folder behind."""

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self.folder = folder
        self.file = folder / "run.json"
        self.facts: dict[str, Any] = {"plan": plan}
        if self.file.exists():
            self.facts = json.loads(self.file.read_text(encoding="utf-8"))
            self.check("plan", plan)

    def check(self, key: str, now: Any) -> None:
        """What is now must be what was when the run began."""
        old, new = {key: self.facts[key]}, {key: json.loads(json.dumps(now))}
        if old != new:
            raise T2RError(
                f"{self.folder} holds an unfinished run with other options ({difference(old, new)}): "
                "repeat its command to go on, or remove the folder to start anew"
            )

    def write(self) -> None:
        if processes.is_main():
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                write_text(self.file, json.dumps(self.facts, indent=1))

    def remember(self, key: str, make: Callable[[], Any]) -> Any:
        """A fact that is found once: on resuming it is what it was. Every process looks; the main one's counts."""
        if key not in self.facts:
            self.facts[key] = processes.agreed(make())
            self.write()
        return self.facts[key]

    @property
    def logs(self) -> Path:
        """For those who write logs as files: beside the result, where they stay."""
        return self.folder.with_suffix(".logs")

    def weights(self, stage: str) -> Path:
        return self.folder / f"{stage}.safetensors"

    def finished(self, stage: str) -> bool:
        return self.weights(stage).exists()


def difference(old: dict[Any, Any], new: dict[Any, Any]) -> str:
    """The first thing in which two plans differ."""
    for key in sorted({*old, *new}):
        if old.get(key) != new.get(key):
            was, now = (dict(enumerate(x)) if isinstance(x, list) else x for x in (old.get(key), new.get(key)))
            if isinstance(was, dict) and isinstance(now, dict):
                return f"{key}.{difference(was, now)}"
            return f"{key}: {str(old.get(key))[:60]} there, {str(new.get(key))[:60]} now"
    return "their order"


def run_stage(
    run: Run,
    model: PreTrainedModel,
    stage: Stage,
    dataset: Dataset[Any],
    teacher: PreTrainedModel | None,
    *,
    seed: int = 0,
    bf16: bool = False,
    save_steps: int | None = None,
    report_to: str = "none",
    progress: bool = True,
    compiled: bool = False,
) -> PreTrainedModel:
    """Train a stage, or take its result if it is finished already. Returns the trained model (LoRA folded in).

    `compiled` has torch.compile fuse each decoder layer and the loss, or in a transfer the comparison of each site: one
    layer's code serves all, so it takes half a minute, and on a GPU a step is more than twice as fast."""
    if run.finished(stage.name):
        load_weights(model, run.weights(stage.name))
        return model
    folder = run.folder / f"{stage.name}.checkpoints"
    options: dict[str, Any] = {"seed": seed, "bf16": bf16, "report_to": report_to, "progress": progress}
    options |= {"compiled": compiled, "logs": run.logs / stage.name}
    trained = with_lora(model, stage, seed) if stage.train == "lora" else model
    uses_cache = getattr(model.config, "use_cache", False)
    fused = [model] if teacher is None else [model, teacher]
    if compiled and stage.objective != "transfer":
        for part in fused:
            compile_layers(part)

    def calibrated() -> float:
        return run.remember(
            f"{stage.name}.seconds", lambda: calibrate(trained, stage, dataset, teacher, folder, options)
        )

    steps = run.remember(f"{stage.name}.steps", lambda: count_steps(stage, dataset, calibrated))
    stage = fit(stage, steps)
    choose_trained(trained, stage)
    seconds = calibrated() * steps if steps >= WORTH_CALIBRATING else None
    announce(stage, steps, trained, teacher, dataset, seconds)
    trainer = StageTrainer(trained, stage, steps, dataset, folder, teacher, save_steps=save_steps, **options)
    checkpoint = last_checkpoint(folder)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    for part in fused:
        compile_layers(part, undo=True)
    if stage.train == "lora":
        model = trained.merge_and_unload()  # type: ignore[operator]
    run.remember(f"{stage.name}.log", lambda: [e for e in trainer.state.log_history if "loss" in e])
    if processes.is_main():
        save_weights(model, run.weights(stage.name))
        shutil.rmtree(folder, ignore_errors=True)
    processes.wait()
    trainer.accelerator.free_memory()
    model.config.use_cache = uses_cache  # Trainer has turned it off
    model.requires_grad_(True)
    return model


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
    dataset: Any,
    teacher: PreTrainedModel | None,
    folder: Path,
    options: dict[str, Any],
) -> float:
    """Seconds per optimizer step: the median of a few forwards and backwards, which change no weight.

    What they draw at random is drawn again: a trainer starts from its seed."""
    trainer = StageTrainer(model, stage, 1, dataset, folder, teacher, **options)
    rows, accumulation = batch_shape(stage)
    batch = default_collate([dataset[i % len(dataset)] for i in range(rows)])
    model.train()
    times = []
    for _ in range(4):
        started = time.perf_counter()
        inputs = trainer._prepare_inputs(batch)
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, inputs)
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


def save_weights(model: PreTrainedModel, path: Path) -> None:
    tensors: dict[str, Any] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:  # tied weights are saved once
            seen.add(tensor.data_ptr())
            tensors[name] = tensor.detach().cpu().contiguous()
    with writing(path), whole_file(path) as temporary:
        save_file(tensors, temporary)


def load_weights(model: PreTrainedModel, path: Path) -> None:
    missing, unexpected = model.load_state_dict(load_file(path), strict=False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    if unexpected or set(missing) - tied:
        raise T2RError(f"{path} is not of this model: remove the folder it is in to start anew")
    model.tie_weights()
