"""The backward pass: the division, the gradients that the queries of a segment give to the state before it, the reverse
scan, and the gradients of each chunk. States are recomputed. Names are those of `forward`. `gradients` has the layout
of `states` without z_abs, and slot i is the gradient of the state before segment i.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from t2r.ops.triton.math import SIZES, bounds, chunk, dot, tile, visible


@triton.jit(do_not_specialize=SIZES)
def division(
    g, out, dens, totals, inverse, g_dens,
    g_b, g_h, g_t, out_b, out_h, out_t, heads, time, value,
    SIGNED: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute 1 / denominator and the gradient of the denominator.

    The gradient of the numerator is g / denominator. Bounded denominators are constant and have zero gradient."""
    value = value * ALIGN
    b = (tl.program_id(0) // heads).to(tl.int64)
    h = (tl.program_id(0) % heads).to(tl.int64)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    there = t < time
    product = tl.zeros([BT], tl.float32)
    for start in range(0, value, BV):
        d = start + tl.arange(0, BV)
        d_ok = d < value
        a = tile(g + b * g_b + h * g_h, g_t, t, there, d, d_ok)
        o = tile(out + b * out_b + h * out_h, out_t, t, there, d, d_ok)
        product += tl.sum(a * o, 1)
    row = (b * heads + h) * time + t
    den = tl.load(dens + row, mask=there, other=0.0)
    total = den
    if SIGNED:
        total = tl.load(totals + row, mask=there, other=0.0)
    safe, bounded, empty = bounds(den, total, SIGNED)
    inv = tl.where(empty, 0.0, 1.0 / safe)
    tl.store(inverse + row, inv, mask=there)
    tl.store(g_dens + row, tl.where(bounded, 0.0, -product * inv), mask=there)


@triton.jit(do_not_specialize=SIZES)
def segment_gradients(
    q, g, inverse, g_dens, dz_sums, decay, mask, document, gradients,
    q_b, q_h, q_t, g_b, g_h, g_t,
    key_heads, group, time, feature, value, chunks, per, slot,
    DECAY: tl.constexpr, SCALED: tl.constexpr, HAS_MASK: tl.constexpr, PACKED: tl.constexpr, NORMALIZED: tl.constexpr,
    HOW: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Write the gradient that the queries of segment i give to the state before it to slot i.

    With SCALED, queries have been multiplied by `sweep.scale`."""
    feature, value = feature * ALIGN, value * ALIGN
    segment = tl.program_id(2)
    value_blocks = (value + BV - 1) // BV
    v_block = tl.program_id(1) % value_blocks
    b = (tl.program_id(0) // key_heads).to(tl.int64)
    h = (tl.program_id(0) % key_heads).to(tl.int64)
    f = (tl.program_id(1) // value_blocks) * BF + tl.arange(0, BF)
    d = v_block * BV + tl.arange(0, BV)
    f_ok, d_ok = f < feature, d < value
    rate = tl.zeros([BF], tl.float32)
    if DECAY:
        rate = tl.load(decay + h * feature + f, mask=f_ok, other=0.0)
    ds = tl.zeros([BF, BV], tl.float32)
    dz = tl.zeros([BF], tl.float32)
    first = segment * per
    end = tl.minimum(first + per, chunks)
    for i in range(first, end):
        c = end - 1 - (i - first)
        t, there, _, clock, length, _, fresh, _, carried = chunk(c, b, mask, document, time, HAS_MASK, PACKED, BT)
        rows = there & fresh
        aged = tl.where(carried, tl.exp(-length * rate), 0.0)
        ds *= aged[:, None]
        dz *= aged
        for j in range(0, group):
            head = h * group + j
            row = (b * key_heads * group + head) * time + t
            queries = tile(q + b * q_b + head * q_h, q_t, t, rows, f, f_ok)
            if DECAY and not SCALED:
                queries *= tl.exp(-clock[:, None] * rate[None, :])
            g_num = tile(g + b * g_b + head * g_h, g_t, t, rows, d, d_ok)
            if NORMALIZED:
                g_num *= tl.load(inverse + row, mask=rows, other=0.0)[:, None]
            g_den = tl.load(g_dens + row, mask=rows, other=0.0)
            own_s = dot(tl.trans(queries), g_num, HOW)
            if SCALED:
                half = tl.exp(-rate * (length / 2))
                own_s *= half[:, None]
                own_z = tl.load(dz_sums + ((b * key_heads + h) * chunks + c) * feature + f, mask=f_ok, other=0.0) * half
            else:
                own_z = tl.sum(queries * g_den[:, None], 0)
            ds += own_s
            dz += own_z
    here = gradients + ((b * key_heads + h) * (tl.num_programs(2) + 1) + segment) * slot
    tl.store(here + f[:, None] * value + d[None, :], ds, mask=f_ok[:, None] & d_ok[None, :])
    if v_block == 0:
        tl.store(here + feature * value + f, dz, mask=f_ok)


@triton.jit(do_not_specialize=SIZES)
def feature_gradients(
    q, k, v, g, inverse, g_dens, decay, mask, document, states, gradients, dq, dk, d_decay,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, dq_b, dq_h, dq_t, dk_b, dk_h, dk_t,
    key_heads, group, time, feature, value, chunks, state_slot, slot,
    DECAY: tl.constexpr, HAS_MASK: tl.constexpr, PACKED: tl.constexpr, NORMALIZED: tl.constexpr, HOW: tl.constexpr,
    BT: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk, and the decay gradient of each chunk, `d_decay [batch, chunks, key_heads, feature]`.

    The decay gradient sums products of features and their gradients, weighted by elapsed tokens: the distance between
    query and key for pairs within the chunk, the clock for queries that read the state, and the remaining length of
    the chunk for keys that enter the state."""
    feature, value = feature * ALIGN, value * ALIGN
    c = tl.program_id(2)
    b = (tl.program_id(0) // key_heads).to(tl.int64)
    h = (tl.program_id(0) % key_heads).to(tl.int64)
    t, there, real, clock, length, documents, fresh, keep, carried = chunk(
        c, b, mask, document, time, HAS_MASK, PACKED, BT
    )
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    f_ok = f < feature
    bh = b * key_heads + h
    before = states + (bh * (chunks + 1) + c) * state_slot
    after = gradients + (bh * (chunks + 1) + c + 1) * slot
    seen = visible(documents, PACKED, BT)
    offset = clock - length / 2
    keys = tile(k + b * k_b + h * k_h, k_t, t, real, f, f_ok)
    z = tl.load(before + feature * value + f, mask=f_ok, other=0.0)
    dz = tl.load(after + feature * value + f, mask=f_ok, other=0.0)
    rate = tl.zeros([BF], tl.float32)
    half = tl.full([BF], 1.0, tl.float32)
    d_rate = tl.zeros([BF], tl.float32)
    if DECAY:
        rate = tl.load(decay + h * feature + f, mask=f_ok, other=0.0)
        half = tl.exp(-rate * (length / 2))
        keys *= tl.exp(offset[:, None] * rate[None, :])

    dk_pairs = tl.zeros([BT, BF], tl.float32)
    for i in range(0, group):
        head = h * group + i
        row = (b * key_heads * group + head) * time + t
        d_weights = tl.zeros([BT, BT], tl.float32)
        dq_state = tl.zeros([BT, BF], tl.float32)
        inv = tl.full([BT], 1.0, tl.float32)
        if NORMALIZED:
            inv = tl.load(inverse + row, mask=there, other=0.0)
        g_den = tl.load(g_dens + row, mask=there, other=0.0)
        for start in range(0, value, BV):
            d = start + tl.arange(0, BV)
            d_ok = d < value
            # Not divided here: the quotient would be rounded for the products, whose difference to g_den can be small.
            given = tile(g + b * g_b + head * g_h, g_t, t, there, d, d_ok)
            values = tile(v + b * v_b + h * v_h, v_t, t, real, d, d_ok)
            s = tile(before, value, f, f_ok, d, d_ok) * half[:, None]
            d_weights += dot(given, tl.trans(values), HOW)
            dq_state += dot(given, tl.trans(s), HOW)
        d_weights = tl.where(seen, d_weights * inv[:, None] + g_den[:, None], 0.0)
        dq_state = dq_state * inv[:, None] + g_den[:, None] * (z * half)[None, :]
        if PACKED:
            dq_state = tl.where(fresh[:, None], dq_state, 0.0)
        queries = tile(q + b * q_b + head * q_h, q_t, t, there, f, f_ok)
        if DECAY:
            queries *= tl.exp(-offset[:, None] * rate[None, :])
        dq_pairs = dot(d_weights, keys, HOW)
        dk_pairs += dot(tl.trans(d_weights), queries, HOW)
        total = dq_pairs + dq_state
        if DECAY:
            d_rate -= tl.sum(queries * (offset[:, None] * dq_pairs + clock[:, None] * dq_state), 0)
            total *= tl.exp(-offset[:, None] * rate[None, :])
        here = dq + b * dq_b + head * dq_h + t[:, None].to(tl.int64) * dq_t + f[None, :]
        tl.store(here, total.to(dq.dtype.element_ty), mask=there[:, None] & f_ok[None, :])

    dk_state = tl.zeros([BT, BF], tl.float32)
    shared = z * dz
    for start in range(0, value, BV):
        d = start + tl.arange(0, BV)
        d_ok = d < value
        values = tile(v + b * v_b + h * v_h, v_t, t, real, d, d_ok)
        ds = tile(after, value, f, f_ok, d, d_ok)
        dk_state += dot(values, tl.trans(ds * half[:, None]), HOW)
        if DECAY:
            shared += tl.sum(tile(before, value, f, f_ok, d, d_ok) * ds, 1)
    dk_state += (dz * half)[None, :]
    if PACKED:
        dk_state = tl.where(keep[:, None], dk_state, 0.0)
    total = dk_pairs + dk_state
    if DECAY:
        d_rate += tl.sum(keys * (offset[:, None] * dk_pairs - (length - clock)[:, None] * dk_state), 0)
        d_rate -= tl.where(carried, length * tl.exp(-rate * length) * shared, 0.0)
        tl.store(d_decay + ((b * chunks + c) * key_heads + h) * feature + f, d_rate, mask=f_ok)
        total *= tl.exp(offset[:, None] * rate[None, :])
    total = tl.where(real[:, None], total, 0.0)
    here = dk + b * dk_b + h * dk_h + t[:, None].to(tl.int64) * dk_t + f[None, :]
    tl.store(here, total.to(dk.dtype.element_ty), mask=there[:, None] & f_ok[None, :])


@triton.jit(do_not_specialize=SIZES)
def value_gradients(
    q, k, g, inverse, decay, mask, document, gradients, dv,
    q_b, q_h, q_t, k_b, k_h, k_t, g_b, g_h, g_t, dv_b, dv_h, dv_t,
    key_heads, group, time, feature, value, chunks, slot,
    DECAY: tl.constexpr, HAS_MASK: tl.constexpr, PACKED: tl.constexpr, NORMALIZED: tl.constexpr, HOW: tl.constexpr,
    BT: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute dv from the queries of the chunk and from the gradient of the state after it."""
    feature, value = feature * ALIGN, value * ALIGN
    c = tl.program_id(2)
    b = (tl.program_id(0) // key_heads).to(tl.int64)
    h = (tl.program_id(0) % key_heads).to(tl.int64)
    t, there, real, clock, length, documents, _, keep, _ = chunk(c, b, mask, document, time, HAS_MASK, PACKED, BT)
    d = tl.program_id(1) * BV + tl.arange(0, BV)
    d_ok = d < value
    after = gradients + ((b * key_heads + h) * (chunks + 1) + c + 1) * slot
    seen = visible(documents, PACKED, BT)
    offset = clock - length / 2
    total = tl.zeros([BT, BV], tl.float32)
    for start in range(0, feature, BF):
        f = start + tl.arange(0, BF)
        f_ok = f < feature
        keys = tile(k + b * k_b + h * k_h, k_t, t, real, f, f_ok)
        ds = tile(after, value, f, f_ok, d, d_ok)
        if DECAY:
            rate = tl.load(decay + h * feature + f, mask=f_ok, other=0.0)
            keys *= tl.exp(-(length - clock)[:, None] * rate[None, :])
        total += dot(keys, ds, HOW)
    if PACKED:
        total = tl.where(keep[:, None], total, 0.0)
    for i in range(0, group):
        head = h * group + i
        weights = tl.zeros([BT, BT], tl.float32)
        for start in range(0, feature, BF):
            f = start + tl.arange(0, BF)
            f_ok = f < feature
            queries = tile(q + b * q_b + head * q_h, q_t, t, there, f, f_ok)
            keys = tile(k + b * k_b + h * k_h, k_t, t, real, f, f_ok)
            if DECAY:
                rate = tl.load(decay + h * feature + f, mask=f_ok, other=0.0)
                queries *= tl.exp(-offset[:, None] * rate[None, :])
                keys *= tl.exp(offset[:, None] * rate[None, :])
            weights += dot(queries, tl.trans(keys), HOW)
        weights = tl.where(seen, weights, 0.0)
        g_num = tile(g + b * g_b + head * g_h, g_t, t, there, d, d_ok)
        if NORMALIZED:
            row = (b * key_heads * group + head) * time + t
            g_num *= tl.load(inverse + row, mask=there, other=0.0)[:, None]
        total += dot(tl.trans(weights), g_num, HOW)
    total = tl.where(real[:, None], total, 0.0)
    here = dv + b * dv_b + h * dv_h + t[:, None].to(tl.int64) * dv_t + d[None, :]
    tl.store(here, total.to(dv.dtype.element_ty), mask=there[:, None] & d_ok[None, :])
