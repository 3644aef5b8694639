"""flash-linear-attention (the package fla-core) beside our kernels in `t2r bench ops`.

`chunk_linear_attn` computes the same as ours. With decay, the closest is `chunk_gla`: it has a gate for each token and
feature, of which all tokens have the same here, and does not divide by a denominator. Its inputs are
`[batch, time, heads, size]`: they are arranged before the time is measured.

Versions 3.4 to 3.7.0 of Triton compile the backward pass of `chunk_linear_attn` wrongly on Hopper GPUs
(fla-org/flash-linear-attention#640): on an H200 it reads memory that it does not own. It is not run there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from t2r.errors import T2RError

NAME = "fla"
FAULTY = ((3, 4, 0), (3, 7, 1))
"""The first version of Triton with a faulty backward pass on Hopper GPUs, and the first without."""
UNTRAINED = "this version of Triton compiles the backward pass of fla wrongly for this GPU; it is not run"


def check(device: str) -> None:
    if not device.startswith("cuda"):
        raise T2RError(f"the backend {NAME} needs a CUDA device, got {device}")
    try:
        import fla.ops  # noqa: F401
    except ImportError as error:
        raise T2RError(f"the backend {NAME} is not installed: run `pip install fla-core einops` ({error})") from error


def functions(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, decay: Tensor | None
) -> tuple[Callable[[], object], Callable[[], object] | None]:
    """Return the forward pass, and forward and backward where that can be run."""
    from fla.ops.gla import chunk_gla
    from fla.ops.linear_attn import chunk_linear_attn

    def arranged(x: Tensor) -> Tensor:
        return x.detach().transpose(1, 2).contiguous().requires_grad_()

    inputs: list[Tensor] = [arranged(x) for x in (q, k, v)]
    weight = grad.transpose(1, 2).contiguous()
    attend: Any = chunk_linear_attn
    if decay is not None:
        attend = chunk_gla
        inputs.append((-decay.detach()).expand_as(inputs[0]).contiguous().requires_grad_())

    @torch.no_grad()
    def forward() -> object:
        return attend(*inputs, scale=1.0)[0]

    def training() -> object:
        return torch.autograd.grad(attend(*inputs, scale=1.0)[0], inputs, weight)

    return forward, None if decay is None and faulty(q.device) else training


def faulty(device: torch.device) -> bool:
    """Whether the backward pass without decay is compiled wrongly here."""
    import triton

    version = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:3])
    return torch.cuda.get_device_capability(device)[0] == 9 and FAULTY[0] <= version < FAULTY[1]
