"""Models whose weights are divided among processes (FSDP 2 of torch, by `DistributedConfig` of transformers).

Each process has a part of every tensor, a `DTensor`. The root of the model gathers its own weights (embeddings, the
last norm, the head) when a forward pass begins, and each layer gathers its weights while it runs. Functions that are
marked collective must be called by all processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

INSIDE = "run_inside"
"""The method of a sharded model that runs a part of it with the weights of the root gathered."""


def is_sharded(model: Any) -> bool:
    """Return whether the weights of a model are divided among processes."""
    return (getattr(model, "fsdp_size", None) or 1) > 1


def is_part(x: Any) -> bool:
    """Return whether a tensor is divided among processes."""
    return hasattr(x, "full_tensor")


def own(x: Tensor) -> Tensor:
    """Return the part of a tensor that this process has; of any other tensor, all of it."""
    tensor: Any = x
    return tensor.to_local() if is_part(x) else x


def tensors_of(x: Tensor) -> list[Tensor]:
    """Return the tensors that a tensor consists of: the integers and scales of a quantized one, or itself."""
    tensor: Any = x
    names = tensor.__tensor_flatten__()[0] if hasattr(x, "__tensor_flatten__") else None
    return [x] if names is None else [getattr(x, name) for name in names]


def whole(x: Tensor) -> Tensor:
    """Return the values of all processes. Collective."""
    tensor: Any = x
    return tensor.full_tensor() if is_part(x) else x


@torch.no_grad()
def fill(x: Tensor, value: Tensor) -> None:
    """Copy a whole tensor, which every process has, into `x`: each process its own part."""
    if is_part(x):
        from torch.distributed.tensor import distribute_tensor

        target: Any = x
        value = value.to(own(x).device, x.dtype)
        value = own(distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None))
    own(x).copy_(value)


def reshard(model: Any) -> None:
    """Free gathered weights, so that the parameters of the model are the divided ones again.

    After a forward pass without a backward pass, the root keeps its weights gathered, and they are its parameters."""
    if not is_sharded(model):
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def allow_inside(model: nn.Module) -> None:
    """Let `run_inside` run parts of a sharded model."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    def run(self: nn.Module, part: nn.Module, inputs: Mapping[str, Any]) -> Any:
        out = part(**inputs)
        states = getattr(out, "last_hidden_state", None)
        if states is not None and states._is_view():  # torch warns of views, on which its hooks can be lost
            out.last_hidden_state = states.clone()
        return out

    setattr(model, INSIDE, MethodType(run, model))
    register_fsdp_forward_method(model, INSIDE)


def run_inside(model: nn.Module, part: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Run a part of a model, as the model itself does. The weights of the root stay gathered until the backward pass
    has ended, or until `reshard`."""
    run = getattr(model, INSIDE, None)
    return part(**inputs) if run is None else run(part, inputs)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, tied ones once, and the persistent buffers of a model, by name."""
    reshard(model)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: x for name, x in model.state_dict(keep_vars=True).items() if name not in parameters}
    return dict(model.named_parameters()) | buffers


def gathered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the values of all processes, on the CPU, of each tensor of `state_of`, one after the other.
    Collective."""
    for name, x in state_of(model).items():
        yield name, whole(x.detach()).cpu()
