"""Block sizes, precision and device selection for kernel launches."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from t2r.ops.triton.presence import INTERPRETED


def block(size: int, largest: int) -> int:
    """Round up to a power of two between 16 (the smallest side of a tensor-core product) and `largest`."""
    # In plain Python: every launch calls this, and triton's own function is slow.
    return max(16, min(1 << (size - 1).bit_length(), largest))


def inner(x: Tensor) -> Tensor:
    """Make the last dimension contiguous. Other strides are arbitrary."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Select the device of a tensor. Triton launches kernels on the current device, which may be another one."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():  # cheaper than to select it again
        return nullcontext()
    return torch.cuda.device(x.device)


def precision(*tensors: Tensor, signed: bool = False) -> str:
    """Return the precision of matrix products. Accumulation is always float32.

    bfloat16 has the range of float32, so bfloat16 inputs stay bfloat16 after scaling by decay factors. float16 does
    not: its products use TF32, which has the mantissa of float16. Products of wider inputs are computed as three TF32
    products. So are those of signed features, because rounding errors dominate where their sum nearly cancels."""
    if signed:
        return "tf32x3"
    if all(x.dtype == torch.bfloat16 for x in tensors):
        return "bf16 emulated" if INTERPRETED else "bf16"  # the interpreter computes bfloat16 products incorrectly
    return "tf32x3" if any(x.dtype in (torch.float32, torch.float64) for x in tensors) else "tf32"
