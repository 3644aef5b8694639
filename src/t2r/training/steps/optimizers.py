"""The parameters that a stage trains, and its optimizer."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from t2r.attention.recurrence import recurrent_sites
from t2r.errors import T2RError
from t2r.sharding import is_part
from t2r.surgery.frozen import frozen_parameters
from t2r.training.recipes.recipe import Stage
from t2r.training.steps.muon import Muon


def choose_trained(model: nn.Module, stage: Stage) -> None:
    """Set `requires_grad` for a stage. What is never trained stays frozen. With LoRA, peft has done this."""
    if stage.train == "lora":
        return
    learning = trained_by(model, stage)
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in learning)
    if not learning:
        raise T2RError(f"stage {stage.name!r} has nothing to train: the feature maps have no parameters or are frozen")


def trained_by(model: nn.Module, stage: Stage) -> set[int]:
    """Return the ids of the parameters that a stage without LoRA trains."""
    sites = recurrent_sites(model)
    if stage.train == "maps":
        chosen = {id(p) for site in sites for p in site.feature_map.parameters()}
    elif stage.train == "attention":
        chosen = {id(p) for site in sites for p in site.parameters()}
    else:
        chosen = {id(p) for p in model.parameters()}
    chosen -= frozen_parameters(model)
    return {id(p) for p in model.parameters() if id(p) in chosen and p.is_floating_point()}


class Nesterov(torch.optim.SGD):
    """SGD with decoupled weight decay. That of torch's SGD is added to the gradients, and so to the velocity."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        decays = [group["weight_decay"] for group in self.param_groups]
        for group, decay in zip(self.param_groups, decays, strict=True):
            for p in group["params"] if decay else ():
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * decay)
            group["weight_decay"] = 0.0
        try:
            return super().step(closure)
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay


class Kind(NamedTuple):
    """Parameters of one kind form one parameter group."""

    rate: float
    orthogonal: bool
    decays: bool
    divided: bool = False
    """Among processes. One operation cannot update such parameters together with others."""


def make_optimizer(model: nn.Module, stage: Stage) -> torch.optim.Optimizer:
    """Return the stage's optimizer. Its weight decay is decoupled, and excludes norms, biases, embeddings and decay
    rates."""
    sites = recurrent_sites(model)
    maps = {id(p) for site in sites for p in site.feature_map.parameters()}
    paces = {id(p): pace for site in sites for p, pace in site.feature_map.paces().items()}
    map_rate = stage.learning_rate if stage.map_learning_rate is None else stage.map_learning_rate
    matrices = orthogonalized(model, maps) if stage.optimizer == "muon" else set()
    decaying = decayed(model, maps)
    alike: dict[Kind, list[nn.Parameter]] = defaultdict(list)
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in sorted(trained, key=lambda p: id(p) not in maps):  # the order of the groups in checkpoints
        rate = map_rate * paces.get(id(p), 1.0) if id(p) in maps else stage.learning_rate
        alike[Kind(rate, id(p) in matrices, id(p) in decaying or not stage.weight_decay, is_part(p))].append(p)
    groups: list[dict[str, Any]] = [
        {
            "params": own,
            "lr": kind.rate,
            "orthogonal": kind.orthogonal,
            "weight_decay": stage.weight_decay if kind.decays else 0.0,
        }
        for kind, own in alike.items()
    ]
    if stage.optimizer == "nag":  # equivalent to fairseq's, which rescales the velocity by the learning rate
        return Nesterov(groups, lr=stage.learning_rate, momentum=stage.momentum, nesterov=True)
    kind = Muon if stage.optimizer == "muon" else torch.optim.AdamW  # fairseq's adam is AdamW too
    beta1, beta2 = stage.betas
    fused = all(p.device.type in ("cpu", "cuda") for p in trained)
    return kind(groups, lr=stage.learning_rate, betas=(beta1, beta2), eps=stage.epsilon, fused=fused)


def decayed(model: nn.Module, maps: set[int]) -> set[int]:
    """Return the ids of the parameters with weight decay: weights of linear layers and of feature maps.

    In a map, biases and decay rates have a row for each head, so only parameters of three dimensions are weights."""
    tables = embeddings(model)
    return {id(p) for p in model.parameters() if p.dim() > (2 if id(p) in maps else 1) and id(p) not in tables}


def orthogonalized(model: nn.Module, maps: set[int]) -> set[int]:
    """Return the ids of the parameters that Muon updates: weights of linear layers and of feature maps.

    Embeddings are excluded, because their rows are independent. So are parameters of maps with one row per head."""
    tables = embeddings(model)

    def is_matrix(p: Tensor) -> bool:
        return p.dim() == 3 and p.shape[1] > 1 if id(p) in maps else p.dim() == 2 and id(p) not in tables

    return {id(p) for p in model.parameters() if is_matrix(p)}


def embeddings(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of input, output and position embeddings."""
    tables: list[Any] = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    if isinstance(model, PreTrainedModel):
        tables += [model.get_input_embeddings(), model.get_output_embeddings()]
    return {id(p) for table in tables if table is not None for p in table.parameters()}
