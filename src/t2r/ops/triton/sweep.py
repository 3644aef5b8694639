"""Sweeps: programs that go through the chunks of a segment, and keep the state in registers.

A sequence has one segment if there are enough sequences and heads to fill the GPU, and a few otherwise. States are
written at the ends of segments only, so that most of the memory traffic is that of the inputs and outputs. A state must
fit into the registers of one program: `plan.Plan.swept`.

With decay, `scale` multiplies queries and keys before. Factors in the sweeps would be computed several times, and the
tiles would pass through registers, instead of being copied to shared memory while the previous chunk is computed. For
the same reason, `scale` sums them: a sum over the tokens of a chunk makes all warps of a sweep wait for each other.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from t2r.ops.triton.math import SIZES, chunk, divide, dot, narrow, rounded, saturate, tile, visible


@triton.jit(do_not_specialize=SIZES)
def scale(
    q, k, g_dens, decay, mask, document, scaled_q, scaled_k, z_sums, dz_sums,
    q_b, q_h, q_t, k_b, k_h, k_t, to_b, to_h, to_t,
    heads, time, feature,
    BACK: tl.constexpr, HAS_MASK: tl.constexpr, PACKED: tl.constexpr,
    BT: tl.constexpr, BF: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Multiply queries and keys with their decay factors, relative to the middle of their chunk, which keeps exponents
    small (see `t2r.ops.chunks`).

    Also write what each chunk adds to z, `z_sums [batch, heads, chunks, feature]`, and with BACK to its gradient."""
    feature = feature * ALIGN
    bh = tl.program_id(0).to(tl.int64)
    b = bh // heads
    h = bh % heads
    f = tl.arange(0, BF)
    f_ok = f < feature
    rate = tl.load(decay + h * feature + f, mask=f_ok, other=0.0)
    c = tl.program_id(1)
    t, there, real, clock, length, _, fresh, keep, _ = chunk(c, b, mask, document, time, HAS_MASK, PACKED, BT)
    exponent = (clock - length / 2)[:, None] * rate[None, :]
    queries = tile(q + b * q_b + h * q_h, q_t, t, there, f, f_ok) * tl.exp(-exponent)
    keys = tile(k + b * k_b + h * k_h, k_t, t, real, f, f_ok) * tl.exp(exponent)
    to = b * to_b + h * to_h + t[:, None].to(tl.int64) * to_t + f[None, :]
    both = there[:, None] & f_ok[None, :]
    queries, keys = queries.to(scaled_q.dtype.element_ty), keys.to(scaled_k.dtype.element_ty)
    tl.store(scaled_q + to, queries, mask=both)
    tl.store(scaled_k + to, keys, mask=both)
    sums = (bh * tl.num_programs(1) + c) * feature + f
    kept = keys.to(tl.float32)
    if PACKED:
        kept = tl.where(keep[:, None], kept, 0.0)
    tl.store(z_sums + sums, tl.sum(kept, 0), mask=f_ok)
    if BACK:
        g_den = tl.load(g_dens + bh * time + t, mask=there, other=0.0)
        read = queries.to(tl.float32) * g_den[:, None]
        if PACKED:
            read = tl.where(fresh[:, None], read, 0.0)
        tl.store(dz_sums + sums, tl.sum(read, 0), mask=f_ok)


@triton.jit
def begin(
    s_first, z_first, bh, segment, slots, s_slot, z_slot, value, f, f_ok, d, d_ok,
    HAS_FIRST: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Load the state of a segment, or its gradient."""
    s = tl.zeros([BF, BV], tl.float32)
    z = tl.zeros([BF], tl.float32)
    if HAS_FIRST:
        where = bh * slots + segment
        s += tile(s_first + where * s_slot, value, f, f_ok, d, d_ok)
        z += tl.load(z_first + where * z_slot + f, mask=f_ok, other=0.0)
    return s, z


@triton.jit(do_not_specialize=SIZES)
def outputs(
    q, k, v, z_sums, decay, mask, document, s_first, z_first, s_last, z_last, out, dens,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, out_b, out_h, out_t,
    heads, time, feature, value, chunks, per, slots, s_slot, z_slot,
    HAS_FIRST: tl.constexpr, LAST: tl.constexpr, NORMALIZED: tl.constexpr,
    DECAY: tl.constexpr, HAS_MASK: tl.constexpr, PACKED: tl.constexpr, HOW: tl.constexpr,
    BT: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute a block of values of the outputs of a segment, and with LAST of the state after it."""
    feature, value = feature * ALIGN, value * ALIGN
    segment = tl.program_id(2)
    bh = tl.program_id(0).to(tl.int64)
    b = bh // heads
    h = bh % heads
    f = tl.arange(0, BF)
    d = tl.program_id(1) * BV + tl.arange(0, BV)
    f_ok, d_ok = f < feature, d < value
    rate = tl.zeros([BF], tl.float32)
    if DECAY:
        rate = tl.load(decay + h * feature + f, mask=f_ok, other=0.0)
    s, z = begin(s_first, z_first, bh, segment, slots, s_slot, z_slot, value, f, f_ok, d, d_ok, HAS_FIRST, BF, BV)
    for c in range(segment * per, tl.minimum(segment * per + per, chunks)):
        t, there, real, _, length, documents, fresh, keep, carried = chunk(
            c, b, mask, document, time, HAS_MASK, PACKED, BT
        )
        half = tl.exp(-rate * (length / 2))
        queries = tile(q + b * q_b + h * q_h, q_t, t, there, f, f_ok)
        keys = tile(k + b * k_b + h * k_h, k_t, t, real, f, f_ok)
        values = tile(v + b * v_b + h * v_h, v_t, t, real, d, d_ok)
        queries, keys, values = narrow(queries, HOW), narrow(keys, HOW), narrow(values, HOW)
        num = dot(queries, s * half[:, None], HOW)
        den = tl.sum(queries.to(tl.float32) * (z * half)[None, :], 1)
        if PACKED:
            num = tl.where(fresh[:, None], num, 0.0)
            den = tl.where(fresh, den, 0.0)
        weights = tl.where(visible(documents, PACKED, BT), dot(queries, tl.trans(keys), HOW), 0.0)
        weights = rounded(weights, HOW)  # numerator and denominator have the same weights
        num = dot(weights, values, HOW, num)
        den += tl.sum(weights, 1)
        if tl.program_id(1) == 0:
            tl.store(dens + bh * time + t, den, mask=there)
        if NORMALIZED:
            num = divide(num, den, den, False)
        here = out + b * out_b + h * out_h + t[:, None].to(tl.int64) * out_t + d[None, :]
        tl.store(here, saturate(num, out.dtype.element_ty), mask=there[:, None] & d_ok[None, :])
        own_z = rate
        if DECAY:
            own_z = tl.load(z_sums + (bh * chunks + c) * feature + f, mask=f_ok, other=0.0)
        s, z = entered(s, z, keys, values, own_z, rate, length, half, keep, carried, DECAY, PACKED, HOW)
    if LAST:
        both = f_ok[:, None] & d_ok[None, :]
        tl.store(s_last + bh * feature * value + f[:, None] * value + d[None, :], s, mask=both)
        if tl.program_id(1) == 0:
            tl.store(z_last + bh * feature + f, z, mask=f_ok)


@triton.jit
def entered(
    s, z, keys, values, own_z, rate, length, half, keep, carried,
    DECAY: tl.constexpr, PACKED: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Compute the state after a chunk from the one before it."""
    if PACKED:
        keys = tl.where(keep[:, None], keys, 0.0)
    own_s = dot(tl.trans(keys), values, HOW)
    if DECAY:
        own_s *= half[:, None]
        own_z *= half
    else:
        own_z = tl.sum(keys.to(tl.float32), 0)
    aged = tl.where(carried, tl.exp(-length * rate), 0.0)
    return s * aged[:, None] + own_s, z * aged + own_z


@triton.jit(do_not_specialize=SIZES)
def query_gradients(
    q, k, v, g, inverse, g_dens, z_sums, decay, mask, document, s_first, z_first, s_chunks, z_chunks, dq, d_decay,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, dq_b, dq_h, dq_t,
    heads, time, feature, value, chunks, per, slots, s_slot, z_slot,
    HAS_FIRST: tl.constexpr, NORMALIZED: tl.constexpr,
    DECAY: tl.constexpr, HAS_MASK: tl.constexpr, PACKED: tl.constexpr, HOW: tl.constexpr,
    BT: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute dq of a segment, and with DECAY the part of queries in the gradient of the rates.

    That is `d_decay [batch, segments, heads, feature]`. The part of keys needs the states before chunks, which are
    written to `s_chunks` and `z_chunks`."""
    feature, value = feature * ALIGN, value * ALIGN
    segment = tl.program_id(2)
    bh = tl.program_id(0).to(tl.int64)
    b = bh // heads
    h = bh % heads
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    d = tl.arange(0, BV)
    f_ok, d_ok = f < feature, d < value
    rate = tl.zeros([BF], tl.float32)
    if DECAY:
        rate = tl.load(decay + h * feature + f, mask=f_ok, other=0.0)
    d_rate = tl.zeros([BF], tl.float32)
    s, z = begin(s_first, z_first, bh, segment, slots, s_slot, z_slot, value, f, f_ok, d, d_ok, HAS_FIRST, BF, BV)
    for c in range(segment * per, tl.minimum(segment * per + per, chunks)):
        t, there, real, clock, length, documents, fresh, keep, carried = chunk(
            c, b, mask, document, time, HAS_MASK, PACKED, BT
        )
        offset = clock - length / 2
        half = tl.exp(-rate * (length / 2))
        if DECAY:
            at = bh * chunks + c
            here = s_chunks + at * feature * value + f[:, None] * value + d[None, :]
            tl.store(here, s.to(s_chunks.dtype.element_ty), mask=f_ok[:, None] & d_ok[None, :])
            tl.store(z_chunks + at * feature + f, z, mask=f_ok)
        row = bh * time + t
        keys = tile(k + b * k_b + h * k_h, k_t, t, real, f, f_ok)
        values = tile(v + b * v_b + h * v_h, v_t, t, real, d, d_ok)
        # Not divided here: the quotient would be rounded for the products, whose difference to g_den can be small.
        given = tile(g + b * g_b + h * g_h, g_t, t, there, d, d_ok)
        g_den = tl.load(g_dens + row, mask=there, other=0.0)
        keys, values, given = narrow(keys, HOW), narrow(values, HOW), narrow(given, HOW)
        d_weights = dot(given, tl.trans(values), HOW)
        dq_state = dot(given, tl.trans(s * half[:, None]), HOW)
        if NORMALIZED:
            inv = tl.load(inverse + row, mask=there, other=0.0)
            d_weights *= inv[:, None]
            dq_state *= inv[:, None]
        d_weights = tl.where(visible(documents, PACKED, BT), d_weights + g_den[:, None], 0.0)
        dq_state += g_den[:, None] * (z * half)[None, :]
        if PACKED:
            dq_state = tl.where(fresh[:, None], dq_state, 0.0)
        dq_pairs = dot(d_weights, keys, HOW)
        total = dq_pairs + dq_state
        if DECAY:
            total *= tl.exp(-offset[:, None] * rate[None, :])
            queries = tile(q + b * q_b + h * q_h, q_t, t, there, f, f_ok)
            d_rate -= tl.sum(queries * (offset[:, None] * dq_pairs + clock[:, None] * dq_state), 0)
        here = dq + b * dq_b + h * dq_h + t[:, None].to(tl.int64) * dq_t + f[None, :]
        tl.store(here, total.to(dq.dtype.element_ty), mask=there[:, None] & f_ok[None, :])
        own_z = rate
        if DECAY:
            own_z = tl.load(z_sums + (bh * chunks + c) * feature + f, mask=f_ok, other=0.0)
        s, z = entered(s, z, keys, values, own_z, rate, length, half, keep, carried, DECAY, PACKED, HOW)
    if DECAY:
        at = (b * tl.num_programs(2) + segment) * heads + h
        tl.store(d_decay + at * feature + f, d_rate, mask=f_ok)


@triton.jit(do_not_specialize=SIZES)
def key_or_value_gradients(
    q, k, v, g, inverse, g_dens, dz_sums, decay, mask, document, ds_last, dz_last, s_chunks, z_chunks, dk, dv, d_decay,
    ds_first, dz_first,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    heads, time, feature, value, chunks, per, slots, s_slot, z_slot,
    KEYS: tl.constexpr, HAS_LAST: tl.constexpr, FIRST: tl.constexpr, NORMALIZED: tl.constexpr,
    DECAY: tl.constexpr, HAS_MASK: tl.constexpr, PACKED: tl.constexpr, HOW: tl.constexpr,
    BT: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute dk of a segment with KEYS, and dv without, from its end to its start.

    One program for both would not have enough registers. With KEYS, each has a block of features, and also computes the
    rest of the gradient of the rates, `d_decay [batch, segments, heads, feature]`, and with FIRST the gradient of the
    state before the segment. Without, it has a block of values."""
    feature, value = feature * ALIGN, value * ALIGN
    segment = tl.program_id(2)
    bh = tl.program_id(0).to(tl.int64)
    b = bh // heads
    h = bh % heads
    f = tl.arange(0, BF)
    d = tl.arange(0, BV)
    if KEYS:
        f += tl.program_id(1) * BF
    else:
        d += tl.program_id(1) * BV
    f_ok, d_ok = f < feature, d < value
    both = f_ok[:, None] & d_ok[None, :]
    rate = tl.zeros([BF], tl.float32)
    if DECAY:
        rate = tl.load(decay + h * feature + f, mask=f_ok, other=0.0)
    d_rate = tl.zeros([BF], tl.float32)
    ds, dz = begin(ds_last, dz_last, bh, segment, slots, s_slot, z_slot, value, f, f_ok, d, d_ok, HAS_LAST, BF, BV)
    first = segment * per
    end = tl.minimum(first + per, chunks)
    for i in range(first, end):
        c = end - 1 - (i - first)
        t, there, real, clock, length, documents, fresh, keep, carried = chunk(
            c, b, mask, document, time, HAS_MASK, PACKED, BT
        )
        offset = clock - length / 2
        half = tl.exp(-rate * (length / 2))
        seen = visible(documents, PACKED, BT)
        queries = tile(q + b * q_b + h * q_h, q_t, t, there, f, f_ok)
        keys = tile(k + b * k_b + h * k_h, k_t, t, real, f, f_ok)
        given = tile(g + b * g_b + h * g_h, g_t, t, there, d, d_ok)
        inv = tl.full([BT], 1.0, tl.float32)
        if NORMALIZED:
            inv = tl.load(inverse + bh * time + t, mask=there, other=0.0)
        queries, keys, given = narrow(queries, HOW), narrow(keys, HOW), narrow(given, HOW)
        aged_ds = narrow(ds * half[:, None], HOW)
        g_num = narrow(given.to(tl.float32) * inv[:, None], HOW)
        if KEYS:
            g_den = tl.load(g_dens + bh * time + t, mask=there, other=0.0)
            values = narrow(tile(v + b * v_b + h * v_h, v_t, t, real, d, d_ok), HOW)
            dk_state = dot(values, tl.trans(aged_ds), HOW) + (dz * half)[None, :]
            if PACKED:
                dk_state = tl.where(keep[:, None], dk_state, 0.0)
            d_weights = dot(given, tl.trans(values), HOW) * inv[:, None] + g_den[:, None]
            d_weights = tl.where(seen, d_weights, 0.0)
            dk_pairs = dot(tl.trans(narrow(d_weights, HOW)), queries, HOW)
            total = dk_pairs + dk_state
            if DECAY:
                at = bh * chunks + c
                s = tile(s_chunks + at * feature * value, value, f, f_ok, d, d_ok)
                passed = tl.sum(s * ds, 1) + tl.load(z_chunks + at * feature + f, mask=f_ok, other=0.0) * dz
                elapsed = offset[:, None] * dk_pairs - (length - clock)[:, None] * dk_state
                d_rate += tl.sum(keys.to(tl.float32) * elapsed, 0)
                d_rate -= tl.where(carried, length * tl.exp(-rate * length) * passed, 0.0)
                total *= tl.exp(offset[:, None] * rate[None, :])
            here = dk + b * dk_b + h * dk_h + t[:, None].to(tl.int64) * dk_t + f[None, :]
            total = tl.where(real[:, None], total, 0.0)
            tl.store(here, total.to(dk.dtype.element_ty), mask=there[:, None] & f_ok[None, :])
        else:
            d_values = dot(keys, aged_ds, HOW)
            if PACKED:
                d_values = tl.where(keep[:, None], d_values, 0.0)
            weights = tl.where(seen, dot(queries, tl.trans(keys), HOW), 0.0)
            d_values = dot(tl.trans(narrow(weights, HOW)), g_num, HOW, d_values)
            here = dv + b * dv_b + h * dv_h + t[:, None].to(tl.int64) * dv_t + d[None, :]
            d_values = tl.where(real[:, None], d_values, 0.0)
            tl.store(here, d_values.to(dv.dtype.element_ty), mask=there[:, None] & d_ok[None, :])
        if PACKED:
            queries = tl.where(fresh[:, None], queries, 0.0)
        aged = tl.where(carried, tl.exp(-length * rate), 0.0)
        ds = ds * aged[:, None] + dot(tl.trans(queries), g_num, HOW) * half[:, None]
        if KEYS:
            if DECAY:
                own_dz = tl.load(dz_sums + (bh * chunks + c) * feature + f, mask=f_ok, other=0.0)
            else:
                own_dz = tl.sum(queries.to(tl.float32) * g_den[:, None], 0)
            dz = dz * aged + own_dz * half
    if KEYS:
        if FIRST:
            tl.store(ds_first + bh * feature * value + f[:, None] * value + d[None, :], ds, mask=both)
            tl.store(dz_first + bh * feature + f, dz, mask=f_ok)
        if DECAY:
            at = (b * tl.num_programs(2) + segment) * heads + h
            tl.store(d_decay + at * feature + f, d_rate, mask=f_ok)
