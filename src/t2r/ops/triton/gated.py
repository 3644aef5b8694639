"""The activation and product of a gated layer in one kernel, for decoding steps."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from t2r.ops.triton.blocks import inner, on_device

BLOCK = 1024


@triton.jit
def gate(x, up, out, x_row, up_row, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < size
    y = tl.load(x + row * x_row + i, mask=ok, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        y = y * tl.sigmoid(y)
    elif ACTIVATION == "gelu":  # (1 + tanh(u)) / 2 is the logistic function of 2 u
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    elif ACTIVATION == "relu":
        y = tl.maximum(y, 0.0)
    y = y.to(out.dtype.element_ty).to(tl.float32)  # as two operations would round it
    y = y * tl.load(up + row * up_row + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * size + i, y.to(out.dtype.element_ty), mask=ok)


def gated(x: Tensor, up: Tensor, activation: str) -> Tensor:
    """Compute activation(x) * up for `x` and `up [rows, 1, size]`. `gelu` is the approximation with tanh."""
    x, up, size = inner(x), inner(up), x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with on_device(x):
        gate[(x.shape[0], triton.cdiv(size, BLOCK))](
            x, up, out, x.stride(0), up.stride(0), size, ACTIVATION=activation, BLOCK=BLOCK, num_warps=4
        )
    return out
