"""The forward pass in three launches: the contribution of each segment to the state, the scan over states, the outputs.

The first and the last run in parallel over segments, so that a single long sequence fills a GPU. Only the scan is
sequential, over states and not over tokens. A slot of `states [batch, key_heads, segments + 1, slot]` holds s, z and,
if signed, z_abs, concatenated. Slot i is the state before segment i. Here a segment is one chunk; `sweep` has the
outputs of segments of several chunks.
"""
# Kernel arguments have no annotations except constexpr, because their types are internal to Triton.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from t2r.ops.triton.math import SIZES, chunk, divide, dot, rounded, saturate, tile, visible


@triton.jit(do_not_specialize=SIZES)
def segment_states(
    k, v, z_sums, decay, mask, document, states, elapsed,
    k_b, k_h, k_t, v_b, v_h, v_t,
    key_heads, time, feature, value, chunks, per, slot,
    DECAY: tl.constexpr, SCALED: tl.constexpr, HAS_MASK: tl.constexpr, PACKED: tl.constexpr, SIGNED: tl.constexpr,
    HOW: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Write the contribution of segment i, of `per` chunks, to the state, decayed to its end, to slot i + 1.

    With SCALED, keys have been multiplied by `sweep.scale`. Also write its number of unmasked tokens, or -1 if a
    document starts in it, to `elapsed [batch, segments]`."""
    feature, value = feature * ALIGN, value * ALIGN
    segment = tl.program_id(2)
    segments = tl.num_programs(2)
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
    s = tl.zeros([BF, BV], tl.float32)
    z = tl.zeros([BF], tl.float32)
    z_abs = tl.zeros([BF], tl.float32)
    age = 0.0
    whole = segment >= 0
    for c in range(segment * per, tl.minimum(segment * per + per, chunks)):
        t, _, real, clock, length, _, _, keep, carried = chunk(c, b, mask, document, time, HAS_MASK, PACKED, BT)
        keys = tile(k + b * k_b + h * k_h, k_t, t, real & keep, f, f_ok)
        values = tile(v + b * v_b + h * v_h, v_t, t, real & keep, d, d_ok)
        if DECAY and not SCALED:
            keys *= tl.exp(-(length - clock)[:, None] * rate[None, :])
        own_s = dot(tl.trans(keys), values, HOW)
        if SCALED:
            half = tl.exp(-rate * (length / 2))
            own_s *= half[:, None]
            own_z = tl.load(z_sums + ((b * key_heads + h) * chunks + c) * feature + f, mask=f_ok, other=0.0) * half
        else:
            own_z = tl.sum(keys, 0)
        aged = tl.where(carried, tl.exp(-length * rate), 0.0)
        s = s * aged[:, None] + own_s
        z = z * aged + own_z
        if SIGNED:
            z_abs = z_abs * aged + tl.sum(tl.abs(keys), 0)
        age += length
        whole = whole & carried
    here = states + ((b * key_heads + h) * (segments + 1) + segment + 1) * slot
    tl.store(here + f[:, None] * value + d[None, :], s, mask=f_ok[:, None] & d_ok[None, :])
    if v_block == 0:
        tl.store(here + feature * value + f, z, mask=f_ok)
        if SIGNED:
            tl.store(here + feature * value + feature + f, z_abs, mask=f_ok)
    if DECAY or PACKED:  # noqa: SIM102 (this condition is a compile-time constant, the next is not)
        if (tl.program_id(1) == 0) & (h == 0):
            tl.store(elapsed + b * segments + segment, tl.where(whole, age, -1.0))


@triton.jit(do_not_specialize=SIZES)
def scan(
    states, s_first, z_first, a_first, s_last, z_last, a_last, decay, elapsed,
    key_heads, feature, value, segments, slot,
    HAS_FIRST: tl.constexpr, SIGNED: tl.constexpr, AGES: tl.constexpr, DECAY: tl.constexpr, REVERSE: tl.constexpr,
    BC: tl.constexpr, BE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Turn the contributions of segments into the states before each, or in reverse into their gradients.

    Elements of a slot are independent: each thread has its own, and adds up one segment after the other. `BC` of them
    are loaded before the first is written, because a single load per step would be bound by latency."""
    feature, value = feature * ALIGN, value * ALIGN
    b = (tl.program_id(0) // key_heads).to(tl.int64)
    h = (tl.program_id(0) % key_heads).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    size = feature * value
    in_s = e < size
    in_z = (e >= size) & (e < size + feature)
    in_a = (e >= size + feature) & (e < slot)
    ok = e < slot
    f = tl.where(in_s, e // value, (e - size) % feature)
    bh = b * key_heads + h
    running = tl.zeros([BE], tl.float32)
    if HAS_FIRST:
        running += tl.load(s_first + bh * size + e, mask=in_s, other=0.0)
        running += tl.load(z_first + bh * feature + e - size, mask=in_z, other=0.0)
        if SIGNED:
            running += tl.load(a_first + bh * feature + e - size - feature, mask=in_a, other=0.0)
    rate = tl.zeros([BE], tl.float32)
    if DECAY:
        rate = tl.load(decay + h * feature + f, mask=ok, other=0.0)
    base = states + bh * (segments + 1) * slot
    if REVERSE:
        tl.store(states + (bh * (segments + 1) + segments) * slot + e, running, mask=ok)
    else:
        tl.store(base + e, running, mask=ok)
    for start in range(0, segments, BC):
        owns = ()
        ages = ()
        for j in tl.static_range(BC):
            i = tl.minimum(start + j, segments - 1)  # beyond the last one nothing is written
            c = segments - 1 - i if REVERSE else i
            to = c if REVERSE else c + 1
            owns += (tl.load(base + to.to(tl.int64) * slot + e, mask=ok, other=0.0),)
            if AGES:
                ages += (tl.load(elapsed + b * segments + c),)
        for j in tl.static_range(BC):
            i = start + j
            if i < segments:
                to = segments - 1 - i if REVERSE else i + 1
                if AGES:
                    running *= tl.where(ages[j] < 0, 0.0, tl.exp(-ages[j] * rate))
                running += owns[j]
                tl.store(base + to.to(tl.int64) * slot + e, running, mask=ok)
    tl.store(s_last + bh * size + e, running, mask=in_s)
    tl.store(z_last + bh * feature + e - size, running, mask=in_z)
    if SIGNED:
        tl.store(a_last + bh * feature + e - size - feature, running, mask=in_a)


@triton.jit(do_not_specialize=SIZES)
def outputs(
    q, k, v, decay, mask, document, states, out, dens, totals,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, out_b, out_h, out_t,
    heads, group, time, feature, value, chunks, slot,
    DECAY: tl.constexpr, HAS_MASK: tl.constexpr, PACKED: tl.constexpr, SIGNED: tl.constexpr, NORMALIZED: tl.constexpr,
    HOW: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of a chunk from its own keys and from the state before it.

    Decay factors are relative to the middle of the chunk, which keeps exponents small (see `t2r.ops.chunks`)."""
    feature, value = feature * ALIGN, value * ALIGN
    c = tl.program_id(2)
    b = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    h = head // group
    t, there, real, clock, length, documents, fresh, _, _ = chunk(c, b, mask, document, time, HAS_MASK, PACKED, BT)
    d = tl.program_id(1) * BV + tl.arange(0, BV)
    d_ok = d < value
    before = states + ((b * (heads // group) + h) * (chunks + 1) + c) * slot
    offset = clock - length / 2
    weights = tl.zeros([BT, BT], tl.float32)
    sizes = tl.zeros([BT, BT], tl.float32)
    num = tl.zeros([BT, BV], tl.float32)
    den = tl.zeros([BT], tl.float32)
    total = tl.zeros([BT], tl.float32)
    for start in range(0, feature, BF):
        f = start + tl.arange(0, BF)
        f_ok = f < feature
        queries = tile(q + b * q_b + head * q_h, q_t, t, there, f, f_ok)
        keys = tile(k + b * k_b + h * k_h, k_t, t, real, f, f_ok)
        s = tile(before, value, f, f_ok, d, d_ok)
        z = tl.load(before + feature * value + f, mask=f_ok, other=0.0)
        half = tl.full([BF], 1.0, tl.float32)
        if DECAY:
            rate = tl.load(decay + h * feature + f, mask=f_ok, other=0.0)
            queries *= tl.exp(-offset[:, None] * rate[None, :])
            keys *= tl.exp(offset[:, None] * rate[None, :])
            half = tl.exp(-rate * (length / 2))
        weights += dot(queries, tl.trans(keys), HOW)
        num += dot(queries, s * half[:, None], HOW)
        den += tl.sum(queries * (z * half)[None, :], 1)
        if SIGNED:
            sizes += dot(tl.abs(queries), tl.trans(tl.abs(keys)), HOW)
            z_abs = tl.load(before + feature * value + feature + f, mask=f_ok, other=0.0)
            total += tl.sum(tl.abs(queries) * (z_abs * half)[None, :], 1)
    seen = visible(documents, PACKED, BT)
    if PACKED:
        num = tl.where(fresh[:, None], num, 0.0)
        den = tl.where(fresh, den, 0.0)
        total = tl.where(fresh, total, 0.0)
    weights = rounded(tl.where(seen, weights, 0.0), HOW)  # numerator and denominator have the same weights
    values = tile(v + b * v_b + h * v_h, v_t, t, real, d, d_ok)
    num += dot(weights, values, HOW)
    den += tl.sum(weights, 1)
    if SIGNED:
        total += tl.sum(tl.where(seen, sizes, 0.0), 1)
    if tl.program_id(1) == 0:
        row = (b * heads + head) * time + t
        tl.store(dens + row, den, mask=there)
        if SIGNED:
            tl.store(totals + row, total, mask=there)
    if NORMALIZED:
        num = divide(num, den, total, SIGNED)
    here = out + b * out_b + head * out_h + t[:, None].to(tl.int64) * out_t + d[None, :]
    tl.store(here, saturate(num, out.dtype.element_ty), mask=there[:, None] & d_ok[None, :])
