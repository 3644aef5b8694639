"""Prepares a model for a stage, and restores it afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from t2r import compat
from t2r.attention.interface import PADDED, UNMASKED
from t2r.attention.recurrence import recurrent_sites
from t2r.errors import T2RError
from t2r.surgery.adapters import family_of
from t2r.surgery.frozen import unfreeze
from t2r.tasks import Task
from t2r.training.loop.trainer import captures
from t2r.training.recipes.recipe import Stage
from t2r.training.steps.arithmetic import sound_gradients
from t2r.training.steps.job import Job
from t2r.words import extra

COMPILATIONS = 64
"""Compilations of layers in a stage. Layers of further kinds would run without."""
LONG, LONG_MINUTES = 20_000, 30
"""Steps, or minutes, from which on layers are compiled for batches of several shapes: this takes one to five minutes
and saves about 15 ms per step."""


@contextmanager
def prepared(job: Job, model: PreTrainedModel, stage: Stage) -> Iterator[None]:
    """Enable compilation and gradient checkpointing by the settings, and disable dropout if the stage says so. On exit
    this is undone, and all parameters that can be trained require gradients again."""
    task, settings, teacher = job.task, job.settings, job.teacher_of(stage)
    fused = [model] if teacher is None else [model, teacher]
    attention = [compat.attention_implementation(part) for part in fused]
    recomputes = settings.gradient_checkpointing and stage.objective != "transfer"  # whose gradients stay in the maps
    dropout = [] if stage.dropout else disable_dropout(model)
    try:
        if recomputes:
            check_checkpointing(model)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if settings.compiled and stage.objective != "transfer" and (task.one_shape or is_long(stage)):
            for part in fused:
                compile_layers(part, one_shape=task.one_shape)
        if captures(model, settings) and (name := implementation(model, task)) is not None:
            for part in fused:
                compat.set_attention_implementation(part, name)
        with (
            many_compilations() if settings.compiled else nullcontext(),
            nullcontext() if task.uniform else sound_gradients(),
        ):
            yield
    finally:
        for part, name in zip(fused, attention, strict=True):
            restore_layers(part)
            compat.set_attention_implementation(part, name)
        if recomputes:
            model.gradient_checkpointing_disable()
        for owner, name, share in dropout:
            setattr(owner, name, share)
        unfreeze(model)


def disable_dropout(model: nn.Module) -> list[tuple[Any, str, float]]:
    """Set every dropout probability of the model to 0. Returns what they were, as owner, name and value.

    Models of transformers contain dropout modules, or keep a number in the module or in the configuration. Evaluation
    mode instead would disable gradient checkpointing, and draw no new random features."""
    before = []
    configs = {id(c): c for module in model.modules() if (c := getattr(module, "config", None)) is not None}
    for owner in (*model.modules(), *configs.values()):
        layer = isinstance(owner, nn.modules.dropout._DropoutNd)
        for name, value in list(vars(owner).items()):
            if isinstance(value, float) and ("drop" in name or (layer and name == "p")):
                before.append((owner, name, value))
                setattr(owner, name, 0.0)
    return before


def implementation(model: PreTrainedModel, task: Task) -> str | None:
    """Return the attention implementation that does not inspect masks, for batches of the task. None if there is none:
    documents are packed, or the attention modules do not use transformers' attention interface."""
    if task.uniform:
        return UNMASKED if compat.on_attention_interface(model) else None
    # The attention modules of known families accept the masks of t2r.
    return PADDED if not task.packed and layers_of(model) else None


def check_checkpointing(model: PreTrainedModel) -> None:
    """Raise T2RError if the model does not support gradient checkpointing."""
    if not model.supports_gradient_checkpointing:
        raise T2RError(f"{model.config.model_type} does not support gradient checkpointing: train without it")


def is_long(stage: Stage) -> bool:
    """Return whether a stage is known to be long."""
    steps = stage.steps or (stage.tokens or 0) // stage.batch_tokens
    return steps >= LONG or (stage.minutes or 0) >= LONG_MINUTES


def compile_layers(model: PreTrainedModel, *, one_shape: bool) -> None:
    """Compile the layers of the model: for the shape of all batches or, if they have several, for the first shape and
    then once for all. Models of an unknown family are not compiled."""
    for layer in layers_of(model):
        layer.compile(dynamic=False if one_shape else None)


def restore_layers(model: PreTrainedModel) -> None:
    for layer in layers_of(model):
        layer._compiled_call_impl = None


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    try:
        family = family_of(model)
    except T2RError:
        return []
    return [*family.encoder_layers(model), *family.decoder_layers(model)]


def many_compilations() -> Any:
    """Return a context that allows more compilations than torch does by default: of layers with softmax and with
    recurrent attention, of the student and the teacher, for one shape and for all."""
    return torch._dynamo.config.patch(recompile_limit=COMPILATIONS)


def shared_layers(model: nn.Module) -> list[str]:
    """Return the linear layers whose weights other modules have too. The others would not have the adapters, but a
    merged adapter would change them."""
    owners: dict[int, int] = {}
    layers = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    for _, module in layers:
        for weight in module.parameters(recurse=False):
            owners[id(weight)] = owners.get(id(weight), 0) + 1
    return [
        name
        for name, module in layers
        if isinstance(module, nn.Linear) and any(owners[id(w)] > 1 for w in module.parameters(recurse=False))
    ]


def with_lora(model: PreTrainedModel, stage: Stage, seed: int) -> Any:
    """Return the model with LoRA adapters on its linear layers. The maps are trained in full."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise T2RError(f"train: lora requires the peft extra: {extra('peft')}") from error
    how: dict[str, Any] = {"target_modules": "all-linear", "exclude_modules": shared_layers(model)}
    config = LoraConfig(r=stage.lora_rank, lora_alpha=2 * stage.lora_rank, **how)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapted = get_peft_model(model, config)
    for site in recurrent_sites(adapted):
        if site.feature_map.trainable:
            site.feature_map.requires_grad_(True)
    return adapted
