"""The kernel of one decoding step of the windows of a layer, and of the states of what has left them."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from t2r.ops import stored as numbers_in_bits
from t2r.ops.triton.decode_kernel import FASTEST, LARGEST, features
from t2r.ops.triton.math import FLOOR, dot, key_of, saturate, stored
from t2r.ops.triton.softmax_step import rows_of

LOWEST = tl.constexpr(-1e30)
"""The largest score of a part without tokens: not infinite, since the difference of two must be a number."""
MOST, LEAST, MOST_SCALE = map(
    tl.constexpr, (float(numbers_in_bits.MOST), numbers_in_bits.LEAST, numbers_in_bits.LARGEST)
)
BESIDE = tl.constexpr(4)
"""Numbers after each partial average: the largest score, the sum of weights, and room that keeps rows aligned."""
SIZES = ["key_heads", "group", "sinks", "most", "seed"]


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
def within(d, size: tl.constexpr, block: tl.constexpr):
    """Return which of the numbers of a block there are. The mask of all is constant."""
    if size == block:
        return tl.full([block], 1, tl.int1)
    else:
        return d < size


@triton.jit
def arrive(counter, adds):
    """Count a program whose part is stored, and return what was counted before."""
    tl.debug_barrier()  # all threads have stored theirs before one of them counts the program
    return tl.atomic_add(counter, adds, sem="acq_rel", scope="gpu")


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
def vector_of(x, cos, sin, d, DIM: tl.constexpr, ROTATED: tl.constexpr):
    """Load a query or key, and rotate it as `rows_of` does."""
    d_ok = d < DIM
    y = tl.load(x + d, mask=d_ok, other=0.0)
    if ROTATED:
        low = d < DIM // 2
        z = tl.load(x + tl.where(low, d + DIM // 2, d - DIM // 2), mask=d_ok, other=0.0).to(tl.float32)
        c = tl.load(cos + d, mask=d_ok, other=0.0).to(tl.float32)
        s = tl.load(sin + d, mask=d_ok, other=0.0).to(tl.float32)
        turned = (y.to(tl.float32) * c).to(y.dtype).to(tl.float32)
        turned += (tl.where(low, -z, z) * s).to(y.dtype).to(tl.float32)
        y = turned.to(y.dtype)
    return y


@triton.jit
def map_of(
    weight, bias, f, f_ok, d, DIM: tl.constexpr, FEATURE: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHS: tl.constexpr
):  # fmt: skip
    """Load the map to the features of a state, and what is added. The last row is the logarithm of a weight."""
    d_ok = d < DIM
    rows = tl.load(weight + f[:, None] * DIM + d[None, :], mask=f_ok[:, None] & d_ok[None, :], other=0.0)
    shift = tl.load(bias + f, mask=f_ok, other=0.0) if HAS_BIAS else rows
    last, last_shift = d, 0.0
    if WEIGHS:
        last = tl.load(weight + FEATURE * DIM + d, mask=d_ok, other=0.0)
        last_shift = tl.load(bias + FEATURE).to(tl.float32) if HAS_BIAS else 0.0
    return rows, shift, last, last_shift


@triton.jit
def slot_of(count, sinks, size):
    """Return the slot of the next token of a ring with `count` tokens: after the sinks, each is written in turn."""
    since, size = count - sinks, tl.maximum(size, 1)
    if since < 2147483648:  # a division of numbers of 64 bits takes ten times as long
        turn = since.to(tl.int32) % size
    else:
        turn = (since % size).to(tl.int32)
    return tl.where(since < 0, count.to(tl.int32), sinks + turn)


@triton.jit
def attend_token(
    q, k, v, cos, sin, keys, values, scales, work, counter, old_k, old_v, valid, s, z, decay,
    q_weight, q_bias, k_weight, k_bias, counts, seed,
    keys_t, values_t, s_f, group, state, held, count, sinks, size, room, scaling,
    DIM: tl.constexpr, VALUE: tl.constexpr, FEATURE: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    BF: tl.constexpr, EIGHT: tl.constexpr, ROTATED: tl.constexpr,
    LEAVES: tl.constexpr, STATE: tl.constexpr, HAS_DECAY: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, WEIGHS: tl.constexpr, WEIGHS_QUERIES: tl.constexpr, STATES: tl.constexpr,
    DRAWN: tl.constexpr, TOKEN: tl.constexpr,
):  # fmt: skip
    """Attend with one query head to the token of its key head, and to the state that what the token replaces has
    entered. Returns how many programs of the key head were counted before.

    All pointers are those of the row and head. `state` is the number of the state, negative for none; it is `held` if
    the sequence has one already. Everything is loaded before anything is computed, because a load does not move before
    a reduction or a store. Each query head of a group advances the state for itself. The last one stores it and the
    token, when all others have read what they replace."""
    d, e, f = tl.arange(0, BD), tl.arange(0, BV), tl.arange(0, BF)
    d_ok, e_ok, f_ok = d < DIM, e < VALUE, f < tl.where(state >= 0, FEATURE, 0)
    has, full = room > 0, (room > 0) & (count >= room)  # otherwise no token of this sequence is there yet
    at = slot_of(count, sinks, size)
    new_k = vector_of(k, cos, sin, d, DIM, ROTATED)
    new_v = tl.load(v + e, mask=e_ok, other=0.0)
    k_here, v_here = keys + at * keys_t + d, values + at * values_t + e
    gone_k = tl.load(k_here, mask=d < tl.where(full, DIM, 0), other=0.0)
    gone_v = tl.load(v_here, mask=e < tl.where(full, VALUE, 0), other=0.0)
    if EIGHT:
        gone_k_scale = tl.load(scales + at * 2, mask=full, other=0.0).to(tl.float32)
        gone_v_scale = tl.load(scales + at * 2 + 1, mask=full, other=0.0).to(tl.float32)
    query = vector_of(q, cos, sin, d, DIM, ROTATED)
    if STATE:
        k_map, k_add, k_last, k_last_add = map_of(k_weight, k_bias, f, f_ok, d, DIM, FEATURE, HAS_BIAS, WEIGHS)
        q_map, q_add, q_last, q_last_add = map_of(q_weight, q_bias, f, f_ok, d, DIM, FEATURE, HAS_BIAS, WEIGHS_QUERIES)
        there = tl.where((state >= 0) & held, FEATURE, 0)
        s_here = s + f[:, None] * s_f + e[None, :]
        before = tl.load(s_here, mask=(f < there)[:, None] & e_ok[None, :], other=0.0)
        sum_k = tl.load(z + f, mask=f < there, other=0.0).to(tl.float32)
        if HAS_DECAY:
            rate = tl.load(decay + f, mask=f_ok, other=0.0).to(tl.float32)
        drawn = tl.zeros([1], tl.uint32)
        if DRAWN:
            one = tl.zeros([1], tl.int64)
            drawn = key_of(tl.load(counts + one), seed + one)

    # What is stored is rounded as the buffers are, and so is what the new token sees of itself.
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
    score = tl.sum(query.to(tl.float32) * seen_k, 0) * scaling
    score = tl.where(has, score, float("-inf"))
    peak = tl.maximum(score, LOWEST)
    acc, weights = tl.exp(score - peak) * seen_v, tl.exp(score - peak)
    if STATE:
        log, far_log = 0.0, 0.0
        if WEIGHS:
            log = tl.sum(k_last.to(tl.float32) * gone_k.to(tl.float32), 0) + k_last_add
        if WEIGHS_QUERIES:
            far_log = tl.sum(q_last.to(tl.float32) * query.to(tl.float32), 0) + q_last_add
        key = features(gone_k, k_map, k_add, f_ok, True, HAS_BIAS, ACTIVATION)
        key = tl.where(leaves, key * tl.exp(tl.minimum(tl.maximum(log, -LARGEST), LARGEST)), 0.0)
        fade = tl.full([BF], 1.0, tl.float32)
        if HAS_DECAY:
            fade = tl.where(leaves, tl.exp(-tl.minimum(tl.maximum(rate, 0.0), FASTEST)), 1.0)
        sum_k = sum_k * fade + key
        after = before.to(tl.float32) * fade[:, None] + key[:, None] * gone_v.to(tl.float32)[None, :]
        read = features(query, q_map, q_add, f_ok, True, HAS_BIAS, ACTIVATION)
        far, den = tl.sum(read[:, None] * after, 0), tl.sum(read * sum_k, 0)
        bounded = tl.maximum(den, FLOOR)
        far_log = tl.where(den > 0, tl.log(bounded) + far_log, float("-inf"))
        peak = tl.maximum(peak, far_log)
        of_far, of_new = tl.exp(far_log - peak), tl.exp(score - peak)
        acc, weights = of_new * seen_v + (of_far / bounded) * far, of_new + of_far
    tl.store(work + e, acc, mask=e_ok)
    tl.store(work + BV, peak)
    tl.store(work + BV + 1, weights)
    counted = arrive(counter, TOKEN + 1)
    if counted // TOKEN == group - 1:
        if LEAVES:
            tl.store(old_k + d, gone_k, mask=d_ok)
            tl.store(old_v + e, gone_v, mask=e_ok)
            tl.store(valid, leaves.to(tl.uint8))
        if STATE:
            own = (state * FEATURE + f[:, None]) * VALUE + e[None, :]  # in the states of all heads, as in `decode`
            kept = stored(after, s.dtype.element_ty, drawn[:, None], own, DRAWN)
            tl.store(s_here, kept, mask=f_ok[:, None] & e_ok[None, :])
            own = STATES * FEATURE * VALUE + state * FEATURE + f
            tl.store(z + f, stored(sum_k, z.dtype.element_ty, drawn, own, DRAWN), mask=f_ok)
        tl.store(k_here, kept_k, mask=d < tl.where(has, DIM, 0))
        tl.store(v_here, kept_v, mask=e < tl.where(has, VALUE, 0))
        if EIGHT:
            tl.store(scales + at * 2, k_scale.to(scales.dtype.element_ty), mask=has)
            tl.store(scales + at * 2 + 1, v_scale.to(scales.dtype.element_ty), mask=has)
    return counted % TOKEN


@triton.jit
def attend_block(
    q, cos, sin, keys, values, pairs, work, counter, q_h, keys_t, values_t, group, start, held, count, sinks, size,
    most, scaling,
    DIM: tl.constexpr, VALUE: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr,
    HOW: tl.constexpr, EIGHT: tl.constexpr, ROTATED: tl.constexpr, TOKEN: tl.constexpr,
):  # fmt: skip
    """Attend to a block of a ring, without what the token replaces. Returns how many programs were counted before.

    All pointers are those of the row and head."""
    d, e, n, g = tl.arange(0, BD), tl.arange(0, BV), tl.arange(0, BN), tl.arange(0, BG)
    t = start + n
    here = tl.minimum(t, held - 1)  # always a token, so that loads have no mask: the weight of a wrong one is zero
    key = tl.load(keys + here[:, None] * keys_t + d[None, :], mask=within(d, DIM, BD)[None, :], other=0.0)
    value = tl.load(values + here[None, :] * values_t + e[:, None], mask=within(e, VALUE, BV)[:, None], other=0.0)
    if EIGHT:
        pair = tl.load(pairs + here)
    g_ok = g < group
    query = rows_of(q, g.to(tl.int64) * q_h, g_ok, cos, sin, d, DIM, ROTATED)
    t_ok = (t < held) & (t != slot_of(count, sinks, size))
    if EIGHT:
        k_scales = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        v_scales = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        if HOW != "bf16":  # which has a fast way from 8 bits
            key, value = key.to(tl.float32), value.to(tl.float32)
        found = dot(key, tl.trans(query), HOW) * (k_scales * scaling)[:, None]
    else:
        found = dot(key, tl.trans(query), HOW) * scaling
    found = tl.where(t_ok[:, None], found, float("-inf"))
    peak = tl.maximum(tl.max(found, 0), LOWEST)
    weight = tl.exp(found - peak[None, :])
    if EIGHT:
        acc = dot(value, weight * v_scales[:, None], HOW)
    else:
        acc = dot(value, weight, HOW)
    total = tl.sum(weight, 0)
    here = work + g * (most * (BV + BESIDE))
    tl.store(here[None, :] + e[:, None], acc, mask=g_ok[None, :] & within(e, VALUE, BV)[:, None])
    tl.store(here + BV, peak, mask=g_ok)
    tl.store(here + BV + 1, total, mask=g_ok)
    return arrive(counter, 1) % TOKEN


@triton.jit(do_not_specialize=SIZES)
def step(
    q, k, v, cos, sin, keys, values, scales, pairs, seen, table, places, work, arrived, out, logs, old_k, old_v, valid,
    s, z, decay, numbers, slots, fresh, q_weight, q_bias, k_weight, k_bias, counts,
    q_b, q_h, k_b, k_h, v_b, v_h, cos_b, keys_b, keys_t, values_b, values_t, scales_b,
    s_b, s_h, s_f, z_b, z_h, decay_h, key_heads, group, sinks, most, seed, scaling,
    DIM: tl.constexpr, VALUE: tl.constexpr, FEATURE: tl.constexpr, STATES: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, BF: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr,
    BP: tl.constexpr, BJ: tl.constexpr, JOINS: tl.constexpr,
    HOW: tl.constexpr, EIGHT: tl.constexpr, PLACED: tl.constexpr, ROTATED: tl.constexpr, LEAVES: tl.constexpr,
    STATE: tl.constexpr, NUMBERED: tl.constexpr, SLOTTED: tl.constexpr, HAS_DECAY: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, WEIGHS: tl.constexpr, WEIGHS_QUERIES: tl.constexpr,
    DRAWN: tl.constexpr, TOKEN: tl.constexpr,
):  # fmt: skip
    """Run the programs of each sequence: first one for each query head, which attends to the token and to the state
    (`attend_token`), then those of the second and later parts of `table`, with BN places of a ring (`attend_block`).

    Each stores the sums of its part in `work` and counts itself in `arrived` with its key head, those of tokens also as
    TOKEN. All know from the number of tokens how many parts of a head, at most `most`, have something to do. The last
    program of a key head joins the parts and sets the count back to zero, for the next step.

    ROTATED, queries and keys are rotated first. PLACED, sequence number b has the buffers number `places[b]`. EIGHT,
    keys and values are stored in 8 bits, with two scales for each token, and are multiplied by them after the products;
    `pairs` are the same scales, as one number of 32 bits for each token. LEAVES, what the token replaces is returned.
    With STATE, heads have states; NUMBERED, key head h has the state `numbers[h]`, or none if that is negative.
    SLOTTED, the states of sequence b are at the place `slots[b]`, and are zero if `fresh[b]`. DRAWN, states are rounded
    at random when they are stored, as in `decode_kernel.decode`."""
    b, i = tl.program_id(1).to(tl.int64), tl.program_id(0)
    tokens = key_heads * group
    own = table + tl.where(i < tokens, i // group, i - tokens + key_heads) * 4
    h, part, first, size = tl.load(own), tl.load(own + 1), tl.load(own + 2).to(tl.int64), tl.load(own + 3)
    count = tl.load(seen + b)
    place = tl.load(places + b).to(tl.int64) if PLACED else b
    room = tl.where(size > 0, size + sinks, 0)
    held = tl.minimum(count, room).to(tl.int32)
    live = 1 + tl.cdiv(held, BN)
    if part >= live:
        return
    head = h.to(tl.int64) * group
    row = b * tokens + head
    cos_here, sin_here = cos + b * cos_b, sin + b * cos_b
    keys_here, values_here = keys + (place * keys_b + first * keys_t), values + (place * values_b + first * values_t)
    counter = arrived + (b * key_heads + h)
    before = live
    if part == 0:
        ring = b * key_heads + h
        state, at_state, has_state = h, b, True
        if NUMBERED:
            state = tl.load(numbers + h).to(tl.int32)
        if SLOTTED:
            at_state, has_state = tl.load(slots + b).to(tl.int64), tl.load(fresh + b) == 0
        of_state, of_query = tl.maximum(state, 0).to(tl.int64), i - h * group
        k_row = of_state * (FEATURE + (1 if WEIGHS else 0))
        q_row = (of_state * group + of_query) * (FEATURE + (1 if WEIGHS_QUERIES else 0))
        before = attend_token(
            q + (b * q_b + i.to(tl.int64) * q_h), k + (b * k_b + h.to(tl.int64) * k_h),
            v + (b * v_b + h.to(tl.int64) * v_h), cos_here, sin_here,
            keys_here, values_here, scales + (place * scales_b + first * 2),
            work + (row + of_query) * most * (BV + BESIDE), counter,
            old_k + ring * DIM, old_v + ring * VALUE, valid + ring,
            s + (at_state * s_b + of_state * s_h), z + (at_state * z_b + of_state * z_h), decay + of_state * decay_h,
            q_weight + q_row * DIM, q_bias + q_row, k_weight + k_row * DIM, k_bias + k_row, counts + b, seed,
            keys_t, values_t, s_f, group, state, has_state, count, sinks, size, room, scaling,
            DIM, VALUE, FEATURE, BD, BV, BF, EIGHT, ROTATED, LEAVES, STATE, HAS_DECAY, HAS_BIAS,
            ACTIVATION, WEIGHS, WEIGHS_QUERIES, STATES, DRAWN, TOKEN,
        )  # fmt: skip
    else:
        before = attend_block(
            q + (b * q_b + head * q_h), cos_here, sin_here, keys_here, values_here,
            pairs + (place * (scales_b // 2) + first), work + (row * most + part) * (BV + BESIDE),
            counter, q_h, keys_t, values_t, group, (part - 1) * BN, held, count, sinks, size, most, scaling,
            DIM, VALUE, BD, BV, BN, BG, HOW, EIGHT, ROTATED, TOKEN,
        )  # fmt: skip
    if before == group + live - 2:
        tl.store(counter, 0)
        join(
            work + row * most * (BV + BESIDE), out + row * VALUE, logs + row, live, most, group,
            VALUE, BV, BP, BJ, JOINS,
        )  # fmt: skip
