"""Normalization in one kernel, also of a sum, for decoding steps."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from t2r.ops.triton.blocks import on_device

LARGEST = 16384
"""The largest size of a row. A program holds a whole row in registers."""


@triton.jit
def normalize(
    x, other, total, weight, bias, out, size, eps,
    SUM: tl.constexpr, CENTERED: tl.constexpr, ROUND_FIRST: tl.constexpr, PLUS_ONE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize one row. With SUM, the row is that of `x + other`, which is stored in `total`, rounded as usual."""
    row = tl.program_id(0).to(tl.int64) * size
    i = tl.arange(0, BLOCK)
    ok = i < size
    y = tl.load(x + row + i, mask=ok, other=0.0).to(tl.float32)
    if SUM:
        y = (y + tl.load(other + row + i, mask=ok, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row + i, y, mask=ok)
        y = y.to(tl.float32)
    if CENTERED:
        y = tl.where(ok, y - tl.sum(y, 0) / size, 0.0)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / size + eps)
    w = tl.load(weight + i, mask=ok, other=0.0).to(tl.float32)
    if PLUS_ONE:
        w += 1.0
    if ROUND_FIRST:
        y = y.to(out.dtype.element_ty).to(tl.float32)
    y = w * y
    if BIAS:
        y += tl.load(bias + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row + i, y.to(out.dtype.element_ty), mask=ok)


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    centered: bool = False,
    round_first: bool = False,
    plus_one: bool = False,
    other: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """Normalize the last dimension of x, multiply it by the weight and add the bias.

    Args:
        centered: subtract the mean first (layer norm).
        round_first: round normalized values to the dtype of x before they are multiplied.
        plus_one: multiply by 1 + weight.
        other, total: normalize x + other, and write this sum to `total`.
    """
    x = x.contiguous()
    out, size = torch.empty_like(x), x.shape[-1]
    rows, columns = x.numel() // size, triton.next_power_of_2(size)
    with on_device(x):
        normalize[(rows,)](
            x, x if other is None else other, x if total is None else total, weight, weight if bias is None else bias,
            out, size, eps,
            SUM=other is not None, CENTERED=centered, ROUND_FIRST=round_first,
            PLUS_ONE=plus_one, BIAS=bias is not None, BLOCK=columns,
            num_warps=max(1, min(8, columns // 256)),
        )  # fmt: skip
    return out
