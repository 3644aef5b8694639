"""Sizes, precision and devices: what every launch needs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from torch import Tensor

from t2r.ops.triton.presence import INTERPRETED


def block(size: int, largest: int) -> int:
    """The power of two that holds this size, from 16 (the smallest side of a tensor-core product) to `largest`."""
    power: int = triton.next_power_of_2(size)
    return max(16, min(power, largest))


def inner(x: Tensor) -> Tensor:
    """The same with its last dimension contiguous; other strides may be any."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors' own."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def precision(*tensors: Tensor, signed: bool = False) -> str:
    """How matrix products are computed. Accumulation is always float32.

    bfloat16 has float32's range, so that bfloat16 inputs stay bfloat16 after they are scaled by decays. float16 has
    not: its products are TF32, which has float16's mantissa. float32 is computed as three TF32 products, and so are
    signed features: where their sum nearly cancels, the rounding of weights would be all that is left."""
    if signed:
        return "tf32x3"
    if all(x.dtype == torch.bfloat16 for x in tensors):
        return "bf16 emulated" if INTERPRETED else "bf16"  # the interpreter's own bfloat16 products are wrong
    return "tf32x3" if any(x.dtype == torch.float32 for x in tensors) else "tf32"
