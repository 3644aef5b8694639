"""The kernel of one decoding step of the windows of a layer, and of the states of what has left them."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from t2r.ops import stored as numbers_in_bits
from t2r.ops.triton.decode_kernel import FASTEST, LARGEST, features, group_affine, group_features
from t2r.ops.triton.math import FLOOR, dot, key_of, saturate, stored
from t2r.ops.triton.softmax_step import rows_of

LOWEST = tl.constexpr(-1e30)
"""The largest score of a part without tokens: not infinite, since the difference of two must be a number."""
MOST, LEAST, MOST_SCALE = map(
    tl.constexpr, (float(numbers_in_bits.MOST), numbers_in_bits.LEAST, numbers_in_bits.LARGEST)
)
BESIDE = tl.constexpr(4)
"""Numbers after each partial average: the largest score, the sum of weights, and room that keeps rows aligned."""
SIZES = ["key_heads", "group", "sinks", "total", "most", "seed"]


@triton.jit
def scale_of(x, scales):
    """Return the scale of a vector in 8 bits, as it is stored (`t2r.ops.stored.whole_numbers`)."""
    scale = tl.minimum(tl.maximum(tl.max(tl.abs(x.to(tl.float32)), 0) / MOST, LEAST), MOST_SCALE)
    return scale.to(scales.dtype.element_ty).to(tl.float32)


@triton.jit
def numbers_of(x, scale):
    """Return a vector as whole numbers."""
    return tl.minimum(tl.maximum(tl.floor(x.to(tl.float32) / scale + 0.5), -MOST), MOST).to(tl.int8)


@triton.jit
def store_part(here, ok, e, e_ok, acc, peak, weights, BV: tl.constexpr):
    """Store the sums of the query heads of a part. Those without weight are zeros."""
    tl.store(here[:, None] + e[None, :], acc, mask=ok[:, None] & e_ok[None, :])
    tl.store(here + BV, peak, mask=ok)
    tl.store(here + BV + 1, weights, mask=ok)


@triton.jit
def join(
    work, out, logs, live, most, group,
    VALUE: tl.constexpr, BV: tl.constexpr, BP: tl.constexpr, BJ: tl.constexpr, JOINS: tl.constexpr,
):  # fmt: skip
    """Join the parts of all query heads of a key head, always in the same order: BP parts of BJ heads at a time."""
    e = tl.arange(0, BV)
    for i in range(JOINS):
        g = i * BJ + tl.arange(0, BJ)
        g_ok = g < group
        peak, total = tl.full([BJ], LOWEST, tl.float32), tl.zeros([BJ], tl.float32)
        acc = tl.zeros([BJ, BV], tl.float32)
        for start in range(0, live, BP):
            p = start + tl.arange(0, BP)
            ok = (p < live)[:, None] & g_ok[None, :]
            here = work + (g[None, :] * most + p[:, None]) * (BV + BESIDE)
            peaks = tl.load(here + BV, mask=ok, other=LOWEST)
            weights = tl.load(here + BV + 1, mask=ok, other=0.0)
            sums = tl.load(
                here[:, :, None] + e[None, None, :], mask=ok[:, :, None] & (e < VALUE)[None, None, :], other=0.0
            )
            higher = tl.maximum(peak, tl.max(peaks, 0))
            left, shares = tl.exp(peak - higher), tl.exp(peaks - higher[None, :])
            total = total * left + tl.sum(shares * weights, 0)
            acc = acc * left[:, None] + tl.sum(shares[:, :, None] * sums, 0)
            peak = higher
        some = total > 0
        mean = tl.where(some[:, None], acc / tl.where(some, total, 1.0)[:, None], 0.0)
        to = out + g[:, None] * VALUE + e[None, :]
        tl.store(to, saturate(mean, out.dtype.element_ty), mask=g_ok[:, None] & (e < VALUE)[None, :])
        log = tl.where(some, peak + tl.log(tl.where(some, total, 1.0)), float("-inf"))
        tl.store(logs + g, log, mask=g_ok)


@triton.jit
def affine_rows(
    weight, bias, row, ok, d, DIM: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """Load rows `[heads, rows]` of affine maps, and what is added to their products."""
    rows = tl.load(
        weight + row[:, :, None].to(tl.int64) * DIM + d[None, None, :],
        mask=ok[:, :, None] & (d < DIM)[None, None, :], other=0.0,
    )  # fmt: skip
    shift = tl.load(bias + row, mask=ok, other=0.0) if HAS_BIAS else rows
    return rows, shift


@triton.jit
def of_queries(
    q, q_h, cos, sin, weight, bias, i, ok, state, f, f_ok, d,
    FEATURE: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr, STATE: tl.constexpr, HAS_BIAS: tl.constexpr,
    WEIGHS_QUERIES: tl.constexpr,
):  # fmt: skip
    """Load some query heads of a key head, and what maps them to the features of a state: rows `f` of the map of each,
    and the last row, the logarithm of the factor of its sums. `state` is the number of the first query head among
    those that have a state."""
    query = rows_of(q, i.to(tl.int64) * q_h, ok, cos, sin, d, DIM, ROTATED)
    rows, shift, last, last_shift = query, query, query, query
    if STATE:
        first = (state + i) * (FEATURE + (1 if WEIGHS_QUERIES else 0))
        rows, shift = affine_rows(
            weight, bias, first[:, None] + f[None, :], ok[:, None] & f_ok[None, :], d, DIM, HAS_BIAS
        )
        if WEIGHS_QUERIES:
            one = tl.zeros([1], tl.int32)
            last, last_shift = affine_rows(
                weight, bias, (first + FEATURE)[:, None] + one[None, :], ok[:, None] & (one == 0)[None, :], d,
                DIM, HAS_BIAS,
            )  # fmt: skip
    return query, rows, shift, last, last_shift


@triton.jit
def attend_token(
    q, k, v, cos, sin, keys, values, scales, work, old_k, old_v, valid, s, z, decay,
    q_weight, q_bias, k_weight, k_bias, counts, seed,
    q_h, keys_t, values_t, s_f, group, state, held, count, at, room, most, scaling,
    DIM: tl.constexpr, VALUE: tl.constexpr, FEATURE: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    BF: tl.constexpr, BQ: tl.constexpr, CHUNKS: tl.constexpr, EIGHT: tl.constexpr, ROTATED: tl.constexpr,
    LEAVES: tl.constexpr, STATE: tl.constexpr, HAS_DECAY: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, WEIGHS: tl.constexpr, WEIGHS_QUERIES: tl.constexpr, STATES: tl.constexpr,
    DRAWN: tl.constexpr,
):  # fmt: skip
    """Store the token of a key head in its ring, advance the state by what it replaces, and attend to both.

    All pointers are those of the row and head. `state` is the number of the state, negative for none; it is `held` if
    the sequence has one already. Everything is loaded before anything is computed, because a load does not move before
    a reduction or a store."""
    d, e, f, g = tl.arange(0, BD), tl.arange(0, BV), tl.arange(0, BF), tl.arange(0, BQ)
    d_ok, e_ok, f_ok = d < DIM, e < VALUE, f < tl.where(state >= 0, FEATURE, 0)
    has, full = room > 0, (room > 0) & (count >= room)  # otherwise no token of this sequence is there yet
    one = tl.zeros([1], tl.int64)
    new_k = rows_of(k, one, one == 0, cos, sin, d, DIM, ROTATED)
    new_v = tl.load(v + e, mask=e_ok, other=0.0)
    k_here, v_here = keys + at * keys_t + d, values + at * values_t + e
    gone_k = tl.load(k_here, mask=d < tl.where(full, DIM, 0), other=0.0)
    gone_v = tl.load(v_here, mask=e < tl.where(full, VALUE, 0), other=0.0)
    if EIGHT:
        gone_k_scale = tl.load(scales + at * 2 + one, mask=one < tl.where(full, 1, 0), other=0.0).to(tl.float32)
        gone_v_scale = tl.load(scales + at * 2 + 1 + one, mask=one < tl.where(full, 1, 0), other=0.0).to(tl.float32)
    query, q_map, q_add, q_last, q_last_add = of_queries(
        q, q_h, cos, sin, q_weight, q_bias, g, g < group, state * group, f, f_ok, d,
        FEATURE, DIM, ROTATED, STATE, HAS_BIAS, WEIGHS_QUERIES,
    )  # fmt: skip
    if STATE:
        key_rows: tl.constexpr = FEATURE + (1 if WEIGHS else 0)
        here = state * key_rows + f
        k_map = tl.load(
            k_weight + here[:, None].to(tl.int64) * DIM + d[None, :], mask=f_ok[:, None] & d_ok[None, :], other=0.0
        )
        k_add = tl.load(k_bias + here, mask=f_ok, other=0.0) if HAS_BIAS else k_map
        there = tl.where((state >= 0) & held, FEATURE, 0)
        s_here = s + f[:, None] * s_f + e[None, :]
        before = tl.load(s_here, mask=(f < there)[:, None] & e_ok[None, :], other=0.0)
        sum_k = tl.load(z + f, mask=f < there, other=0.0).to(tl.float32)
        if WEIGHS:
            last = state * key_rows + FEATURE
            w_map = tl.load(k_weight + last.to(tl.int64) * DIM + d, mask=d < tl.where(state >= 0, DIM, 0), other=0.0)
            w_add = tl.load(k_bias + last + one, mask=one < tl.where(state >= 0, 1, 0), other=0.0) if HAS_BIAS else one
        if HAS_DECAY:
            rate = tl.load(decay + f, mask=f_ok, other=0.0).to(tl.float32)
        drawn = one.to(tl.uint32)
        if DRAWN:
            drawn = key_of(tl.load(counts + one), seed + one)

    # What is stored is rounded as the buffers are, and so is what the new token sees of itself.
    new_k = tl.sum(new_k.to(tl.float32), 0)  # of one row
    if EIGHT:
        k_scale, v_scale = scale_of(new_k, scales), scale_of(new_v, scales)
        kept_k, kept_v = numbers_of(new_k, k_scale), numbers_of(new_v, v_scale)
        seen_k, seen_v = kept_k.to(tl.float32) * k_scale, kept_v.to(tl.float32) * v_scale
        gone_k, gone_v = gone_k.to(tl.float32) * gone_k_scale, gone_v.to(tl.float32) * gone_v_scale
    else:
        kept_k, kept_v = new_k.to(keys.dtype.element_ty), new_v.to(values.dtype.element_ty)
        seen_k, seen_v = kept_k.to(tl.float32), kept_v.to(tl.float32)
    # The token of a head without a window leaves at once.
    gone_k = tl.where(has, gone_k.to(tl.float32), seen_k).to(k.dtype.element_ty)
    gone_v = tl.where(has, gone_v.to(tl.float32), seen_v).to(v.dtype.element_ty)
    leaves = full | (room == 0)
    if LEAVES:
        tl.store(old_k + d, gone_k, mask=d_ok)
        tl.store(old_v + e, gone_v, mask=e_ok)
        tl.store(valid + one, (leaves & (one == 0)).to(tl.uint8))
    if STATE:
        log = tl.zeros([1], tl.float32)
        if WEIGHS:
            log = tl.sum(w_map.to(tl.float32) * gone_k.to(tl.float32), 0) + log
            if HAS_BIAS:
                log += w_add.to(tl.float32)
        key = features(gone_k, k_map, k_add, f_ok, True, HAS_BIAS, ACTIVATION)
        key = tl.where(leaves, key * tl.exp(tl.minimum(tl.maximum(log, -LARGEST), LARGEST)), 0.0)
        fade = tl.full([BF], 1.0, tl.float32)
        if HAS_DECAY:
            fade = tl.where(leaves, tl.exp(-tl.minimum(tl.maximum(rate, 0.0), FASTEST)), 1.0)
        sum_k = sum_k * fade + key
        after = before.to(tl.float32) * fade[:, None] + key[:, None] * gone_v.to(tl.float32)[None, :]

    for chunk in tl.static_range(CHUNKS):
        i = chunk * BQ + g
        ok = i < group
        if chunk > 0:
            query, q_map, q_add, q_last, q_last_add = of_queries(
                q, q_h, cos, sin, q_weight, q_bias, i, ok, state * group, f, f_ok, d,
                FEATURE, DIM, ROTATED, STATE, HAS_BIAS, WEIGHS_QUERIES,
            )  # fmt: skip
        score = tl.sum(query.to(tl.float32) * seen_k[None, :], 1) * scaling
        score = tl.where(has, score, float("-inf"))
        peak = tl.maximum(score, LOWEST)
        weights = tl.exp(score - peak)
        acc = weights[:, None] * seen_v[None, :]
        if STATE:
            read = group_features(query, q_map, q_add, f_ok, True, HAS_BIAS, ACTIVATION)
            far = tl.sum(read[:, :, None] * after[None, :, :], 1)
            den = tl.sum(read * sum_k[None, :], 1)
            far_log = tl.zeros([BQ], tl.float32)
            if WEIGHS_QUERIES:
                far_log = tl.sum(group_affine(query, q_last, q_last_add, True, HAS_BIAS), 1)
            bounded = tl.maximum(den, FLOOR)
            far_log = tl.where(den > 0, tl.log(bounded) + far_log, float("-inf"))
            peak = tl.maximum(peak, far_log)
            of_far = tl.exp(far_log - peak)
            weights = tl.exp(score - peak)
            acc = weights[:, None] * seen_v[None, :] + (of_far / bounded)[:, None] * far
            weights += of_far
        store_part(work + i * (most * (BV + BESIDE)), ok, e, e_ok, acc, peak, weights, BV)
    if STATE:
        own = (state * FEATURE + f[:, None]) * VALUE + e[None, :]  # places in the states of all heads, as in `decode`
        kept = stored(after, s.dtype.element_ty, drawn[:, None], own, DRAWN)
        tl.store(s_here, kept, mask=f_ok[:, None] & e_ok[None, :])
        own = STATES * FEATURE * VALUE + state * FEATURE + f
        tl.store(z + f, stored(sum_k, z.dtype.element_ty, drawn, own, DRAWN), mask=f_ok)
    tl.debug_barrier()  # what the token replaces was read by all threads
    tl.store(k_here, kept_k, mask=d < tl.where(has, DIM, 0))
    tl.store(v_here, kept_v, mask=e < tl.where(has, VALUE, 0))
    if EIGHT:
        of = tl.arange(0, 2)
        both = tl.where(of == 0, k_scale, v_scale).to(scales.dtype.element_ty)
        tl.store(scales + at * 2 + of, both, mask=of < tl.where(has, 2, 0))


@triton.jit
def attend_block(
    q, cos, sin, keys, values, pairs, work, q_h, keys_t, values_t, group, start, held, at, most, scaling,
    DIM: tl.constexpr, VALUE: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr,
    HOW: tl.constexpr, EIGHT: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Attend to a block of a ring, without what the token replaces. All pointers are those of the row and head."""
    d, e, n, g = tl.arange(0, BD), tl.arange(0, BV), tl.arange(0, BN), tl.arange(0, BG)
    d_ok, e_ok, g_ok = d < DIM, e < VALUE, g < group
    t = start + n
    t_ok = (t < held) & (t != at)
    key = tl.load(keys + t[:, None] * keys_t + d[None, :], mask=t_ok[:, None] & d_ok[None, :], other=0.0)
    value = tl.load(values + t[:, None] * values_t + e[None, :], mask=t_ok[:, None] & e_ok[None, :], other=0.0)
    if EIGHT:
        pair = tl.load(pairs + t, mask=t_ok, other=0)
    query = rows_of(q, g.to(tl.int64) * q_h, g_ok, cos, sin, d, DIM, ROTATED)
    if EIGHT:
        key, value = key.to(tl.float32), value.to(tl.float32)  # whole numbers up to 127 are exact in any dtype
        k_scales = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        v_scales = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        found = dot(query, tl.trans(key.to(q.dtype.element_ty)), HOW) * (k_scales * scaling)[None, :]
    else:
        found = dot(query, tl.trans(key), HOW) * scaling
    found = tl.where(t_ok[None, :], found, float("-inf"))
    peak = tl.maximum(tl.max(found, 1), LOWEST)
    weight = tl.exp(found - peak[:, None])
    if EIGHT:
        acc = dot(weight * v_scales[None, :], value.to(q.dtype.element_ty), HOW)
    else:
        acc = dot(weight, value, HOW)
    store_part(work + g * (most * (BV + BESIDE)), g_ok, e, e_ok, acc, peak, tl.sum(weight, 1), BV)


@triton.jit(do_not_specialize=SIZES)
def step(
    q, k, v, cos, sin, keys, values, scales, pairs, seen, table, places, work, arrived, out, logs, old_k, old_v, valid,
    s, z, decay, numbers, slots, fresh, q_weight, q_bias, k_weight, k_bias, counts,
    q_b, q_h, k_b, k_h, v_b, v_h, cos_b, keys_b, keys_t, values_b, values_t, scales_b,
    s_b, s_h, s_f, z_b, z_h, decay_h, key_heads, group, sinks, total, most, seed, scaling,
    DIM: tl.constexpr, VALUE: tl.constexpr, FEATURE: tl.constexpr, STATES: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr,
    BQ: tl.constexpr, CHUNKS: tl.constexpr, BP: tl.constexpr, BJ: tl.constexpr, JOINS: tl.constexpr,
    HOW: tl.constexpr, EIGHT: tl.constexpr, PLACED: tl.constexpr, ROTATED: tl.constexpr, LEAVES: tl.constexpr,
    STATE: tl.constexpr, NUMBERED: tl.constexpr, SLOTTED: tl.constexpr, HAS_DECAY: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, WEIGHS: tl.constexpr, WEIGHS_QUERIES: tl.constexpr,
    DRAWN: tl.constexpr,
):  # fmt: skip
    """Run `total` programs per sequence, of which `table` says what they have: part 0 of each key head is the token
    (`attend_token`), and the others are BN places of its ring (`attend_block`).

    Each stores the sums of its part in `work` and counts itself in `arrived`. All know from the number of tokens how
    many parts of a head, at most `most`, have something to do. The last one joins them and sets the count back to
    zero, for the next step.

    ROTATED, queries and keys are rotated first. PLACED, sequence number b has the buffers number `places[b]`. EIGHT,
    keys and values are stored in 8 bits, with two scales for each token, and are multiplied by them after the products;
    `pairs` are the same scales, as one number of 32 bits for each token. LEAVES, what the token replaces is returned.
    With STATE, heads have states; NUMBERED, key head h has the state `numbers[h]`, or none if that is negative.
    SLOTTED, the states of sequence b are at the place `slots[b]`, and are zero if `fresh[b]`. DRAWN, states are rounded
    at random when they are stored, as in `decode_kernel.decode`."""
    b = (tl.program_id(0) // total).to(tl.int64)
    own = table + (tl.program_id(0) % total) * 4
    h, part, first, size = tl.load(own), tl.load(own + 1), tl.load(own + 2).to(tl.int64), tl.load(own + 3)
    count = tl.load(seen + b)
    place = tl.load(places + b).to(tl.int64) if PLACED else b
    room = tl.where(size > 0, size + sinks, 0)
    at = tl.where(count < sinks, count, sinks + (count - sinks) % tl.maximum(size, 1))
    held = tl.minimum(count, room).to(tl.int32)
    live = 1 + tl.cdiv(held, BN)
    head = h.to(tl.int64) * group
    row = b * key_heads * group + head
    q_here, cos_here, sin_here = q + (b * q_b + head * q_h), cos + b * cos_b, sin + b * cos_b
    keys_here, values_here = keys + (place * keys_b + first * keys_t), values + (place * values_b + first * values_t)
    work_here = work + (row * most + part) * (BV + BESIDE)
    if part == 0:
        ring = b * key_heads + h
        state, at_state, has_state = h, b, True
        if NUMBERED:
            state = tl.load(numbers + h).to(tl.int32)
        if SLOTTED:
            at_state, has_state = tl.load(slots + b).to(tl.int64), tl.load(fresh + b) == 0
        of_state = tl.maximum(state, 0).to(tl.int64)
        attend_token(
            q_here, k + (b * k_b + h.to(tl.int64) * k_h), v + (b * v_b + h.to(tl.int64) * v_h), cos_here, sin_here,
            keys_here, values_here, scales + (place * scales_b + first * 2), work_here,
            old_k + ring * DIM, old_v + ring * VALUE, valid + ring,
            s + (at_state * s_b + of_state * s_h), z + (at_state * z_b + of_state * z_h), decay + of_state * decay_h,
            q_weight, q_bias, k_weight, k_bias, counts + b, seed,
            q_h, keys_t, values_t, s_f, group, state, has_state, count, at, room, most, scaling,
            DIM, VALUE, FEATURE, BD, BV, BF, BQ, CHUNKS, EIGHT, ROTATED, LEAVES, STATE, HAS_DECAY, HAS_BIAS,
            ACTIVATION, WEIGHS, WEIGHS_QUERIES, STATES, DRAWN,
        )  # fmt: skip
    elif part < live:
        attend_block(
            q_here, cos_here, sin_here, keys_here, values_here, pairs + (place * (scales_b // 2) + first), work_here,
            q_h, keys_t, values_t, group, (part - 1) * BN, held, at, most, scaling,
            DIM, VALUE, BD, BV, BN, BG, HOW, EIGHT, ROTATED,
        )  # fmt: skip
    if part < live:
        tl.debug_barrier()  # all threads have stored theirs before one of them counts the program
        counter = arrived + (b * key_heads + h)
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == live - 1:
            tl.store(counter, 0)
            join(
                work + row * most * (BV + BESIDE), out + row * VALUE, logs + row, live, most, group,
                VALUE, BV, BP, BJ, JOINS,
            )  # fmt: skip
