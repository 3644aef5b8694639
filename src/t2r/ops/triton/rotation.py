"""Rotation of the queries and keys of one token by their position, in one kernel."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from t2r.ops.triton.blocks import inner, on_device
from t2r.ops.triton.softmax_step import rows_of


@triton.jit(do_not_specialize=["heads", "key_heads"])
def turn(
    q, k, cos, sin, new_q, new_k, q_b, q_h, k_b, k_h, cos_b, heads, key_heads, DIM: tl.constexpr, BD: tl.constexpr
):
    """Run one program per row and head, of queries first."""
    b = (tl.program_id(0) // (heads + key_heads)).to(tl.int64)
    h = (tl.program_id(0) % (heads + key_heads)).to(tl.int64)
    one, d = tl.zeros([1], tl.int64), tl.arange(0, BD)
    to = one[:, None] + d[None, :]
    ok = to < DIM
    if h < heads:
        y = rows_of(q, b * q_b + h * q_h + one, one == 0, cos + b * cos_b, sin + b * cos_b, d, DIM, True)
        tl.store(new_q + (b * heads + h) * DIM + to, y, mask=ok)
    else:
        h -= heads
        y = rows_of(k, b * k_b + h * k_h + one, one == 0, cos + b * cos_b, sin + b * cos_b, d, DIM, True)
        tl.store(new_k + (b * key_heads + h) * DIM + to, y, mask=ok)


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys of one token, `[rows, heads, 1, dim]`, by cosines and sines `[rows or 1, 1, dim]`.

    The two halves of a head are its real and imaginary parts."""
    q, k = inner(q), inner(k)
    (rows, heads, _, dim), key_heads = q.shape, k.shape[1]
    cos, sin = (inner(x.expand(rows, 1, dim)) for x in (cos, sin))
    new_q, new_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    with on_device(q):
        turn[(rows * (heads + key_heads),)](
            q, k, cos, sin, new_q, new_k, q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos.stride(0),
            heads, key_heads, DIM=dim, BD=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip
    return new_q, new_k
