"""The kernels of one decoding step: compute features, then decay, update and read a state in place; or read only."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from t2r.ops.common import FASTEST_DECAY, LARGEST_LOG_WEIGHT
from t2r.ops.triton.math import divide, key_of, mix, saturate, stored

FASTEST = tl.constexpr(FASTEST_DECAY)


LARGEST = tl.constexpr(LARGEST_LOG_WEIGHT)


@triton.jit
def operands(
    x, weight, bias, f, f_ok, DIM: tl.constexpr, MAPPED: tl.constexpr, HAS_BIAS: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Load what `features` of one head are computed from: `x [DIM]` and rows `f` of an affine map, or `x [f]` alone."""
    if MAPPED:
        d = tl.arange(0, BD)
        d_ok = d < DIM
        given = tl.load(x + d, mask=d_ok, other=0.0)
        rows = tl.load(weight + f[:, None] * DIM + d[None, :], mask=f_ok[:, None] & d_ok[None, :], other=0.0)
        shift = tl.load(bias + f, mask=f_ok, other=0.0) if HAS_BIAS else given
        return given, rows, shift
    else:
        given = tl.load(x + f, mask=f_ok, other=0.0)
        return given, given, given


@triton.jit
def affine(given, rows, shift, MAPPED: tl.constexpr, HAS_BIAS: tl.constexpr):
    y = given.to(tl.float32)
    if MAPPED:
        y = tl.sum(rows.to(tl.float32) * y[None, :], 1)
        if HAS_BIAS:
            y += shift.to(tl.float32)
    return y


@triton.jit
def features(given, rows, shift, f_ok, MAPPED: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr):
    """Compute the features of one head from its `operands`."""
    y = affine(given, rows, shift, MAPPED, HAS_BIAS)
    if ACTIVATION == "relu":
        y = tl.maximum(y, 0.0)
    elif ACTIVATION == "softmax":
        y = tl.where(f_ok, y, float("-inf"))
        y = tl.exp(y - tl.max(y, 0))
        y = y / tl.sum(y, 0)
    return tl.where(f_ok, y, 0.0)


@triton.jit
def query_log(x, weight, bias, last, DIM: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHS: tl.constexpr, BD: tl.constexpr):
    """Return the logarithm of the factor of a query's sums: the last row of the query map."""
    log = tl.zeros([1], tl.float32)
    if WEIGHS:
        given, row, shift = operands(x, weight, bias, last, last == last, DIM, True, HAS_BIAS, BD)
        log = affine(given, row, shift, True, HAS_BIAS)
    return log


@triton.jit
def group_operands(
    x, stride, weight, bias, heads, rows_of_head, f, ok, DIM: tl.constexpr, MAPPED: tl.constexpr,
    HAS_BIAS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Load what the features `f` of several query heads `[heads]` are computed from: `operands` with one more
    dimension. `rows_of_head` are the first rows of their maps, and `ok [heads, features]` says which there are."""
    here = heads.to(tl.int64) * stride
    if MAPPED:
        d = tl.arange(0, BD)
        d_ok = d < DIM
        any_ok = tl.max(ok.to(tl.int32), 1) > 0
        given = tl.load(x + here[:, None] + d[None, :], mask=any_ok[:, None] & d_ok[None, :], other=0.0)
        row = rows_of_head[:, None] + f[None, :]
        rows = tl.load(
            weight + row[:, :, None] * DIM + d[None, None, :], mask=ok[:, :, None] & d_ok[None, None, :], other=0.0
        )
        shift = tl.load(bias + row, mask=ok, other=0.0) if HAS_BIAS else given
        return given, rows, shift
    else:
        given = tl.load(x + here[:, None] + f[None, :], mask=ok, other=0.0)
        return given, given, given


@triton.jit
def group_affine(given, rows, shift, MAPPED: tl.constexpr, HAS_BIAS: tl.constexpr):
    y = given.to(tl.float32)
    if MAPPED:
        y = tl.sum(rows.to(tl.float32) * y[:, None, :], 2)
        if HAS_BIAS:
            y += shift.to(tl.float32)
    return y


@triton.jit
def group_features(given, rows, shift, f_ok, MAPPED: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr):
    """Compute the features of several heads `[heads, features]` from their `group_operands`."""
    y = group_affine(given, rows, shift, MAPPED, HAS_BIAS)
    if ACTIVATION == "relu":
        y = tl.maximum(y, 0.0)
    elif ACTIVATION == "softmax":
        y = tl.where(f_ok[None, :], y, float("-inf"))
        y = tl.exp(y - tl.max(y, 1)[:, None])
        y = y / tl.sum(y, 1)[:, None]
    return tl.where(f_ok[None, :], y, 0.0)


@triton.jit
def of_group(
    q, q_h, weight, bias, logs, out, out_h, heads, group, map_rows, f, f_ok, d, d_ok,
    FEATURE: tl.constexpr, DIM: tl.constexpr, MAPPED: tl.constexpr, HAS_BIAS: tl.constexpr,
    WEIGHS_QUERIES: tl.constexpr, BESIDE: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Load what several query heads of a group require: the operands of their features, of the logarithms of their
    factors (the last row of the query map), and what they are added to."""
    ok = heads < group
    given, rows, shift = group_operands(
        q, q_h, weight, bias, heads, map_rows, f, ok[:, None] & f_ok[None, :], DIM, MAPPED, HAS_BIAS, BD
    )
    last_given, last_row, last_shift = given, rows, shift
    if WEIGHS_QUERIES:
        last = tl.zeros([1], tl.int32) + FEATURE
        last_given, last_row, last_shift = group_operands(
            q, q_h, weight, bias, heads, map_rows, last, ok[:, None], DIM, True, HAS_BIAS, BD
        )
    to = out + heads[:, None] * out_h + d[None, :]
    other, mean = heads, to
    if BESIDE:
        other = tl.load(logs + heads, mask=ok, other=0.0)
        mean = tl.load(to, mask=ok[:, None] & d_ok[None, :], other=0.0).to(tl.float32)
    return given, rows, shift, last_given, last_row, last_shift, to, other, mean


@triton.jit
def read_block(query, new, sum_k, sum_abs, HAS_Z_ABS: tl.constexpr, NORMALIZED: tl.constexpr):
    """Read a block of a state with the features of one query. Returns the output or the numerator; the denominator."""
    num = tl.sum(query[:, None] * new, 0)
    den = tl.sum(query * sum_k, 0) + tl.zeros([1], tl.float32)
    if NORMALIZED:
        total = tl.sum(tl.abs(query) * sum_abs, 0) + tl.zeros([1], tl.float32)
        num = tl.sum(divide(num[None, :], den, total, HAS_Z_ABS), 0)
    return num, den


@triton.jit(do_not_specialize=["key_heads", "group", "k_share", "v_share", "mask_share", "logs_b", "seed"])
def decode(
    q, k, v, s, z, z_abs, mask, decay, out, dens, logs, places, slots, fresh, q_weight, q_bias, k_weight, k_bias,
    counts,
    q_b, q_h, k_b, k_h, v_b, v_h, s_b, s_h, s_f, z_b, z_h, za_b, za_h, out_b, out_h, mask_b, mask_h, decay_h, logs_b,
    key_heads, group, k_share, v_share, mask_share, seed,
    FEATURE: tl.constexpr, VALUE: tl.constexpr, DIM: tl.constexpr,
    HAS_Z_ABS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_DECAY: tl.constexpr, GROUPED: tl.constexpr,
    NORMALIZED: tl.constexpr, BESIDE: tl.constexpr, PLACED: tl.constexpr, SLOTTED: tl.constexpr,
    MAPPED: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, WEIGHS: tl.constexpr,
    WEIGHS_QUERIES: tl.constexpr, DRAWN: tl.constexpr,
    BF: tl.constexpr, BV: tl.constexpr, BLOCKS: tl.constexpr, BD: tl.constexpr, BG: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Run one program per sequence and key head. It alone accesses the state.

    With an ACTIVATION, q and k are not features yet: `features` computes them. `k_share`, `v_share` and `mask_share`
    are the numbers of key heads that share a head of k, of v and of the mask. BESIDE another memory, `out` has the
    averages of that memory, to which those of the state are added; `logs` are the logarithms of its weights. If the
    state has only some heads of k and v, `places` are their numbers. SLOTTED, sequence number b has the state number
    `slots[b]`, which is zero if `fresh[b]`. The query heads of a group are read BG at a time, in CHUNKS. A state in
    half precision is computed in float32 and rounded when it is stored: DRAWN, at random by the row's own `counts` and
    the `seed`, so that each replay of a CUDA graph has other numbers (`t2r.ops.rounding`). There are few programs, and
    each waits for memory most of the time: so everything is loaded before anything is computed, and stored at the end,
    because a load does not move before a store or a reduction."""
    b = (tl.program_id(0) // key_heads).to(tl.int64)
    h = (tl.program_id(0) % key_heads).to(tl.int64)
    f, d = tl.arange(0, BF), tl.arange(0, BV)
    f_ok, d_ok = f < FEATURE, d < VALUE
    one = tl.zeros([1], tl.int32)
    k_head, v_head, mask_head, q_first = h // k_share, h // v_share, h // mask_share, h * group
    if PLACED:
        k_head = tl.load(places + k_head).to(tl.int64)
        v_head, mask_head, q_first = k_head, k_head, (k_head * k_share + h % k_share) * group
    q_here, k_here, v_here = q + b * q_b + q_first * q_h, k + b * k_b + k_head * k_h, v + b * v_b + v_head * v_h
    key_rows: tl.constexpr = FEATURE + (1 if WEIGHS else 0)
    query_rows: tl.constexpr = FEATURE + (1 if WEIGHS_QUERIES else 0)
    k_rows, k_shift = k_weight + h * key_rows * DIM, k_bias + h * key_rows
    at, held = b, f_ok
    if SLOTTED:
        at = tl.load(slots + b).to(tl.int64)
        held = f_ok & (tl.load(fresh + b + one) == 0)
    s_here, z_here, a_here = s + at * s_b + h * s_h, z + at * z_b + h * z_h + f, z_abs + at * za_b + h * za_h + f
    first = tl.load(s_here + f[:, None] * s_f + d[None, :], mask=held[:, None] & d_ok[None, :], other=0.0)
    k_given, k_map, k_add = operands(k_here, k_rows, k_shift, f, f_ok, DIM, MAPPED, HAS_BIAS, BD)
    if not GROUPED:
        q_given, q_map, q_add = operands(
            q_here, q_weight + h * query_rows * DIM, q_bias + h * query_rows, f, f_ok, DIM, MAPPED, HAS_BIAS, BD
        )
    if GROUPED:
        g = tl.arange(0, BG)
        i = g
        g_given, g_map, g_add, c_given, c_map, c_add, to, other, mean = of_group(
            q_here, q_h, q_weight, q_bias, logs + b * logs_b + q_first, out + b * out_b + q_first * out_h,
            out_h, i, group, (h * group + i) * query_rows, f, f_ok, d, d_ok,
            FEATURE, DIM, MAPPED, HAS_BIAS, WEIGHS_QUERIES, BESIDE, BD,
        )  # fmt: skip
    if WEIGHS:  # the last row is the logarithm of the key's weight
        last = one + FEATURE
        w_given, w_map, w_add = operands(k_here, k_rows, k_shift, last, last < key_rows, DIM, MAPPED, HAS_BIAS, BD)
    live = tl.full([1], 1, tl.int1)  # whether the token is unmasked
    if HAS_MASK:
        live = tl.load(mask + b * mask_b + mask_head * mask_h + one) != 0
    if HAS_DECAY:
        rate = tl.load(decay + h * decay_h + f, mask=f_ok, other=0.0).to(tl.float32)
    sum_k = tl.load(z_here, mask=held, other=0.0).to(tl.float32)
    sum_abs = sum_k
    if HAS_Z_ABS:
        sum_abs = tl.load(a_here, mask=held, other=0.0).to(tl.float32)
    val = tl.load(v_here + d, mask=d_ok & live, other=0.0)
    drawn = one.to(tl.uint32)
    if DRAWN:
        drawn = key_of(tl.load(counts + b + one), seed + one)

    key = features(k_given, k_map, k_add, f_ok, MAPPED, HAS_BIAS, ACTIVATION)
    if WEIGHS:
        log = affine(w_given, w_map, w_add, MAPPED, HAS_BIAS)
        key = key * tl.exp(tl.minimum(tl.maximum(log, -LARGEST), LARGEST))
    key = tl.where(live, key, 0.0)
    left = tl.full([BF], 1.0, tl.float32)
    if HAS_DECAY:
        left = tl.where(live, tl.exp(-tl.minimum(tl.maximum(rate, 0.0), FASTEST)), 1.0)
    sum_k = sum_k * left + key
    if HAS_Z_ABS:
        sum_abs = sum_abs * left + tl.abs(key)
    else:
        sum_abs = sum_k
    if not GROUPED:
        query = features(q_given, q_map, q_add, f_ok, MAPPED, HAS_BIAS, ACTIVATION)

    for block in tl.static_range(BLOCKS):
        if block > 0:
            d = block * BV + tl.arange(0, BV)
            d_ok = d < VALUE
            first = tl.load(s_here + f[:, None] * s_f + d[None, :], mask=held[:, None] & d_ok[None, :], other=0.0)
            val = tl.load(v_here + d, mask=d_ok & live, other=0.0)
        new = first.to(tl.float32) * left[:, None] + key[:, None] * val.to(tl.float32)[None, :]
        if GROUPED:
            for chunk in tl.static_range(CHUNKS):
                if block + chunk > 0:
                    i = chunk * BG + g
                    g_given, g_map, g_add, c_given, c_map, c_add, to, other, mean = of_group(
                        q_here, q_h, q_weight, q_bias, logs + b * logs_b + q_first, out + b * out_b + q_first * out_h,
                        out_h, i, group, (h * group + i) * query_rows, f, f_ok, d, d_ok,
                        FEATURE, DIM, MAPPED, HAS_BIAS, WEIGHS_QUERIES, BESIDE, BD,
                    )  # fmt: skip
                queries = group_features(g_given, g_map, g_add, f_ok, MAPPED, HAS_BIAS, ACTIVATION)
                row = tl.sum(queries[:, :, None] * new[None, :, :], 1)
                den = tl.sum(queries * sum_k[None, :], 1)
                if NORMALIZED:
                    row = divide(row, den, tl.sum(tl.abs(queries) * sum_abs[None, :], 1), HAS_Z_ABS)
                if BESIDE:
                    factor = tl.zeros([BG], tl.float32)
                    if WEIGHS_QUERIES:
                        factor = tl.sum(group_affine(c_given, c_map, c_add, True, HAS_BIAS), 1)
                    row = mix(row, den[:, None], factor[:, None], mean, other[:, None])
                tl.store(to, saturate(row, out.dtype.element_ty), mask=(i < group)[:, None] & d_ok[None, :])
                if not NORMALIZED and not BESIDE:
                    tl.store(dens + b * key_heads * group + h * group + i, den, mask=i < group)
        else:
            row, den = read_block(query, new, sum_k, sum_abs, HAS_Z_ABS, NORMALIZED)
            here = out + b * out_b + q_first * out_h + d
            if BESIDE:
                log = query_log(
                    q_here, q_weight + h * query_rows * DIM, q_bias + h * query_rows, one + FEATURE,
                    DIM, HAS_BIAS, WEIGHS_QUERIES, BD,
                )  # fmt: skip
                other = tl.load(logs + b * logs_b + q_first + one)
                row = mix(row, den, log, tl.load(here, mask=d_ok, other=0.0).to(tl.float32), other)
            tl.store(here, saturate(row, out.dtype.element_ty), mask=d_ok)
            if not NORMALIZED and not BESIDE:
                tl.store(dens + b * key_heads + h + one, den)
        here = s_here + f[:, None] * s_f + d[None, :]
        place = (h * FEATURE + f[:, None]) * VALUE + d[None, :]
        kept = stored(new, s.dtype.element_ty, drawn[:, None], place, DRAWN)
        tl.store(here, kept, mask=f_ok[:, None] & d_ok[None, :])
    place = key_heads * FEATURE * VALUE + h * FEATURE + f  # the places of z are after those of all heads of s
    tl.store(z_here, stored(sum_k, z.dtype.element_ty, drawn, place, DRAWN), mask=f_ok)
    if HAS_Z_ABS:
        kept = stored(sum_abs, z_abs.dtype.element_ty, drawn, place + key_heads * FEATURE, DRAWN)
        tl.store(a_here, kept, mask=f_ok)


@triton.jit(do_not_specialize=["heads", "group"])
def read(
    q, s, z, z_abs, out,
    q_b, q_h, s_b, s_h, s_f, z_b, z_h, za_b, za_h,
    heads, group, FEATURE: tl.constexpr, VALUE: tl.constexpr,
    HAS_Z_ABS: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Read a fixed state with features of queries. Run one program per sequence, query head and block of values."""
    b = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    h = head // group
    f = tl.arange(0, BF)
    d = tl.program_id(1) * BV + tl.arange(0, BV)
    f_ok, d_ok = f < FEATURE, d < VALUE
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
    tl.store(out + (b * heads + head) * VALUE + d, saturate(row, out.dtype.element_ty), mask=d_ok)
