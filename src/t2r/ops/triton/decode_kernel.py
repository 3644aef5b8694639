"""The kernel of one decoding step: decay, update and read a state in place."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from t2r.ops.common import FASTEST_DECAY
from t2r.ops.triton.math import SIZES, divide, saturate

FASTEST = tl.constexpr(FASTEST_DECAY)


@triton.jit(do_not_specialize=SIZES)
def decode(
    q, k, v, s, z, z_abs, mask, decay, out, dens, totals,
    q_b, q_h, k_b, k_h, v_b, v_h, s_b, s_h, s_f, z_b, z_h, za_b, za_h, out_b, out_h, mask_b, decay_h,
    key_heads, group, feature, value,
    HAS_Z_ABS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_DECAY: tl.constexpr, COUNT: tl.constexpr,
    BF: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Run one program per sequence and key head. It alone accesses the state, so z is not read after it is written.

    A state in half precision is computed in float32 and rounded where it is stored."""
    b = (tl.program_id(0) // key_heads).to(tl.int64)
    h = (tl.program_id(0) % key_heads).to(tl.int64)
    f = tl.arange(0, BF)
    f_ok = f < feature
    live = tl.full([1], 1, tl.int1)  # whether the token is unmasked
    if HAS_MASK:
        live = tl.load(mask + b * mask_b + tl.zeros([1], tl.int32)) != 0
    key = tl.load(k + b * k_b + h * k_h + f, mask=f_ok & live, other=0.0).to(tl.float32)
    left = tl.full([BF], 1.0, tl.float32)
    if HAS_DECAY:
        rate = tl.load(decay + h * decay_h + f, mask=f_ok, other=0.0).to(tl.float32)
        rate = tl.minimum(tl.maximum(rate, 0.0), FASTEST)
        left = tl.where(live, tl.exp(-rate), 1.0)
    z_here = z + b * z_b + h * z_h + f
    sum_k = tl.load(z_here, mask=f_ok, other=0.0).to(tl.float32) * left + key
    tl.store(z_here, sum_k.to(z.dtype.element_ty), mask=f_ok)
    sum_abs = sum_k
    if HAS_Z_ABS:
        a_here = z_abs + b * za_b + h * za_h + f
        sum_abs = tl.load(a_here, mask=f_ok, other=0.0).to(tl.float32) * left + tl.abs(key)
        tl.store(a_here, sum_abs.to(z_abs.dtype.element_ty), mask=f_ok)
    one = tl.zeros([1], tl.int32)
    for start in range(0, value, BV):
        d = start + tl.arange(0, BV)
        d_ok = d < value
        val = tl.load(v + b * v_b + h * v_h + d, mask=d_ok & live, other=0.0).to(tl.float32)
        s_here = s + b * s_b + h * s_h + f[:, None] * s_f + d[None, :]
        ok = f_ok[:, None] & d_ok[None, :]
        new = tl.load(s_here, mask=ok, other=0.0).to(tl.float32) * left[:, None] + key[:, None] * val[None, :]
        tl.store(s_here, new.to(s.dtype.element_ty), mask=ok)
        for i in range(0, group):
            head = h * group + i
            query = tl.load(q + b * q_b + head * q_h + f, mask=f_ok, other=0.0).to(tl.float32)
            num = tl.sum(query[:, None] * new, 0)
            den = tl.sum(query * sum_k, 0) + tl.zeros([1], tl.float32)
            total = tl.sum(tl.abs(query) * sum_abs, 0) + tl.zeros([1], tl.float32)
            row = tl.sum(divide(num[None, :], den, total, HAS_Z_ABS), 0)
            tl.store(out + b * out_b + head * out_h + d, saturate(row, out.dtype.element_ty), mask=d_ok)
            if COUNT:
                tl.store(dens + b * key_heads * group + head + one, den)
                tl.store(totals + b * key_heads * group + head + one, total)
