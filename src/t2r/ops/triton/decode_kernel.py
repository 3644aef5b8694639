"""The kernels of one decoding step: compute features, then decay, update and read a state in place; or read only."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from t2r.ops.common import FASTEST_DECAY, LARGEST_LOG_WEIGHT
from t2r.ops.triton.math import SIZES, divide, saturate

FASTEST = tl.constexpr(FASTEST_DECAY)


LARGEST = tl.constexpr(LARGEST_LOG_WEIGHT)


@triton.jit
def features(
    x, weight, bias, f, f_ok, feature, dim,
    MAPPED: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the features of one head: from `x [dim]` by an affine map, or by the activation alone."""
    if MAPPED:
        y = rows_of(x, weight, bias, f, f_ok, dim, HAS_BIAS, BD)
    else:
        y = tl.load(x + f, mask=f_ok, other=0.0).to(tl.float32)
    if ACTIVATION == "relu":
        y = tl.maximum(y, 0.0)
    elif ACTIVATION == "softmax":
        y = tl.where(f_ok, y, float("-inf"))
        y = tl.exp(y - tl.max(y, 0))
        y = y / tl.sum(y, 0)
    return tl.where(f_ok, y, 0.0)


@triton.jit
def rows_of(x, weight, bias, f, f_ok, dim, HAS_BIAS: tl.constexpr, BD: tl.constexpr):
    """Compute rows `f` of an affine map of `x [dim]`."""
    d = tl.arange(0, BD)
    d_ok = d < dim
    given = tl.load(x + d, mask=d_ok, other=0.0).to(tl.float32)
    w = tl.load(weight + f[:, None] * dim + d[None, :], mask=f_ok[:, None] & d_ok[None, :], other=0.0).to(tl.float32)
    y = tl.sum(w * given[None, :], 1)
    if HAS_BIAS:
        y += tl.load(bias + f, mask=f_ok, other=0.0).to(tl.float32)
    return y


@triton.jit(do_not_specialize=[*SIZES, "dim", "key_rows", "k_share", "v_share"])
def decode(
    q, k, v, s, z, z_abs, mask, decay, out, q_weight, q_bias, k_weight, k_bias,
    q_b, q_h, k_b, k_h, v_b, v_h, s_b, s_h, s_f, z_b, z_h, za_b, za_h, out_b, out_h, mask_b, decay_h,
    key_heads, group, feature, value, dim, key_rows, k_share, v_share,
    HAS_Z_ABS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_DECAY: tl.constexpr,
    MAPPED: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, WEIGHS: tl.constexpr,
    BF: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Run one program per sequence and key head. It alone accesses the state, so z is not read after it is written.

    With an ACTIVATION, q and k are not features yet: `features` computes them. `k_share` and `v_share` are the numbers
    of key heads that share a head of k and of v. A state in half precision is computed in float32 and rounded when it
    is stored."""
    b = (tl.program_id(0) // key_heads).to(tl.int64)
    h = (tl.program_id(0) % key_heads).to(tl.int64)
    f = tl.arange(0, BF)
    f_ok = f < feature
    one = tl.zeros([1], tl.int32)
    live = tl.full([1], 1, tl.int1)  # whether the token is unmasked
    if HAS_MASK:
        live = tl.load(mask + b * mask_b + one) != 0
    k_here = k + b * k_b + (h // k_share) * k_h
    key = features(
        k_here, k_weight + h * key_rows * dim, k_bias + h * key_rows, f, f_ok, feature, dim,
        MAPPED, HAS_BIAS, ACTIVATION, BD,
    )  # fmt: skip
    if WEIGHS:  # the last row is the logarithm of the key's weight
        last = one + feature
        if MAPPED:
            log = rows_of(
                k_here, k_weight + h * key_rows * dim, k_bias + h * key_rows, last, last < key_rows, dim, HAS_BIAS, BD
            )
        else:
            log = tl.load(k_here + last).to(tl.float32)
        key = key * tl.exp(tl.minimum(tl.maximum(log, -LARGEST), LARGEST))
    key = tl.where(live, key, 0.0)
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
    for start in range(0, value, BV):
        d = start + tl.arange(0, BV)
        d_ok = d < value
        val = tl.load(v + b * v_b + (h // v_share) * v_h + d, mask=d_ok & live, other=0.0).to(tl.float32)
        s_here = s + b * s_b + h * s_h + f[:, None] * s_f + d[None, :]
        ok = f_ok[:, None] & d_ok[None, :]
        new = tl.load(s_here, mask=ok, other=0.0).to(tl.float32) * left[:, None] + key[:, None] * val[None, :]
        tl.store(s_here, new.to(s.dtype.element_ty), mask=ok)
        for i in range(0, group):
            head = h * group + i
            query = features(
                q + b * q_b + head * q_h, q_weight + head * feature * dim, q_bias + head * feature, f, f_ok, feature,
                dim, MAPPED, HAS_BIAS, ACTIVATION, BD,
            )  # fmt: skip
            num = tl.sum(query[:, None] * new, 0)
            den = tl.sum(query * sum_k, 0) + tl.zeros([1], tl.float32)
            total = tl.sum(tl.abs(query) * sum_abs, 0) + tl.zeros([1], tl.float32)
            row = tl.sum(divide(num[None, :], den, total, HAS_Z_ABS), 0)
            tl.store(out + b * out_b + head * out_h + d, saturate(row, out.dtype.element_ty), mask=d_ok)


@triton.jit(do_not_specialize=SIZES)
def read(
    q, s, z, z_abs, out,
    q_b, q_h, s_b, s_h, s_f, z_b, z_h, za_b, za_h,
    heads, group, feature, value,
    HAS_Z_ABS: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Read a fixed state with features of queries. Run one program per sequence, query head and block of values."""
    b = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    h = head // group
    f = tl.arange(0, BF)
    d = tl.program_id(1) * BV + tl.arange(0, BV)
    f_ok, d_ok = f < feature, d < value
    query = tl.load(q + b * q_b + head * q_h + f, mask=f_ok, other=0.0).to(tl.float32)
    s_here = s + b * s_b + h * s_h + f[:, None] * s_f + d[None, :]
    num = tl.sum(query[:, None] * tl.load(s_here, mask=f_ok[:, None] & d_ok[None, :], other=0.0).to(tl.float32), 0)
    sums = tl.load(z + b * z_b + h * z_h + f, mask=f_ok, other=0.0).to(tl.float32)
    den = tl.sum(query * sums, 0) + tl.zeros([1], tl.float32)
    total = den
    if HAS_Z_ABS:
        sums = tl.load(z_abs + b * za_b + h * za_h + f, mask=f_ok, other=0.0).to(tl.float32)
        total = tl.sum(tl.abs(query) * sums, 0) + tl.zeros([1], tl.float32)
    row = tl.sum(divide(num[None, :], den, total, HAS_Z_ABS), 0)
    tl.store(out + (b * heads + head) * value + d, saturate(row, out.dtype.element_ty), mask=d_ok)
