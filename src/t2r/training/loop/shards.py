"""Tensors of several processes in a checkpoint: each process writes its part, and any number of processes reads them.

This is torch's distributed checkpoint (DCP) in safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from t2r.storage import write_text
from t2r.training.loop import processes

WEIGHTS, STATES = "weights", "optimizer"
"""The folders in a checkpoint."""
SCHEDULE = "schedule.json"
"""The file in a checkpoint with the step of the learning rate schedule."""


def save(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors. Collective."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    dcp.save({name: x.detach() for name, x in tensors.items()}, storage_writer=writer)


def load(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors with the saved values of the same names. Collective, if there are several processes."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    reader = HuggingFaceStorageReader(str(folder))
    found = {name: x.detach() for name, x in tensors.items()}
    dcp.load(found, storage_reader=reader, no_dist=not dist.is_initialized())


def names(folder: Path) -> list[str]:
    """Return the names of the saved tensors."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    return list(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)


def save_optimizer(folder: Path, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Write the states of an optimizer, by the names of the parameters, and the step of the schedule. Collective.

    Neither depends on the groups of the optimizer, which are others if weights are not divided."""
    named = {id(p): name for name, p in model.named_parameters()}
    states = {
        f"{named[id(p)]}/{key}": x.clone() if x.dim() == 0 else x
        for p, state in optimizer.state.items()
        for key, x in state.items()
    }
    save(folder / STATES, states)
    if processes.is_main():
        write_text(folder / SCHEDULE, json.dumps({"step": scheduler.last_epoch, "calls": scheduler._step_count}))


def load_optimizer(folder: Path, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Read what `save_optimizer` wrote. Collective, if there are several processes."""
    parameters = dict(model.named_parameters())
    read: dict[str, Tensor] = {}
    for entry in names(folder / STATES):
        name, _, key = entry.rpartition("/")
        p = parameters[name]
        read[entry] = torch.zeros(()) if key == "step" else torch.zeros_like(p, requires_grad=False)
    load(folder / STATES, read)
    for entry, x in read.items():
        name, _, key = entry.rpartition("/")
        optimizer.state[parameters[name]][key] = x
    made = json.loads((folder / SCHEDULE).read_text(encoding="utf-8"))
    scheduler.last_epoch, scheduler._step_count = made["step"], made["calls"]
    rates = [base * of(made["step"]) for base, of in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
