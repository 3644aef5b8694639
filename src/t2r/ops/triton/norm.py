"""Root mean square normalization in one kernel, for decoding steps."""

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
def normalize(x, weight, out, size, eps, ROUND_FIRST: tl.constexpr, PLUS_ONE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    i = tl.arange(0, BLOCK)
    ok = i < size
    given = tl.load(x + row + i, mask=ok, other=0.0).to(tl.float32)
    y = given * tl.rsqrt(tl.sum(given * given, 0) / size + eps)
    w = tl.load(weight + i, mask=ok, other=0.0).to(tl.float32)
    if PLUS_ONE:
        w += 1.0
    if ROUND_FIRST:
        y = y.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row + i, (w * y).to(out.dtype.element_ty), mask=ok)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, round_first: bool, plus_one: bool) -> Tensor:
    """Normalize the last dimension and multiply by the weight, or by 1 + weight with `plus_one`.

    With `round_first`, the normalized values are rounded to the dtype of x before they are multiplied."""
    x = x.contiguous()
    out, size = torch.empty_like(x), x.shape[-1]
    rows, columns = x.numel() // size, triton.next_power_of_2(size)
    with on_device(x):
        normalize[(rows,)](
            x, weight, out, size, eps, ROUND_FIRST=round_first, PLUS_ONE=plus_one, BLOCK=columns,
            num_warps=max(1, min(8, columns // 256)),
        )  # fmt: skip
    return out
