"""One decoding step of the windows of a layer: attend, store the token, and return what it replaces, in one kernel.

Long rings can be divided among several programs (`Split`). Each stores its sums, and the last one joins them."""

# mypy: ignore-errors

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from t2r.ops import stored
from t2r.ops.triton.blocks import block, inner, on_device, precision
from t2r.ops.triton.math import dot


class Form(NamedTuple):
    """How a program goes through a ring."""

    lanes: bool
    """Each place of a block has a softmax of its own, and all are joined at the end: one program for each query head,
    whose threads exchange nothing on the way. Otherwise scores and averages are matrix products of the query heads that
    share a ring."""
    block: int
    """Keys that are read at a time; with lanes, fewer that have more than 64 dimensions: all are in registers."""
    warps: int
    stages: int
    """Blocks of keys and values that are on their way from memory. With one, each iteration would wait for memory."""
    chunk: int = 0
    """The most keys of a program, a multiple of `block`: a longer ring is divided. 0: a program has a whole ring."""


FORMS = {16: Form(False, 64, 4, 3), 8: Form(True, 128, 8, 3)}
"""By the bits of keys and values. Products of whole numbers, which have to be converted and exchanged between threads
first, were slow: 1.68 ms for a step of SmolLM2 on an H200, and 1.25 in 16 bits."""
ROWS = 16
"""The fewest rows of a matrix product, so the fewest query heads of a program. Missing ones are zeros."""
LOWEST = tl.constexpr(-1e30)
"""The largest score of a lane without tokens: not infinite, since the difference of two must be a number."""
MOST, LEAST, LARGEST = map(tl.constexpr, (float(stored.MOST), stored.LEAST, stored.LARGEST))
SIZES = ["key_heads", "group", "sinks", "chunk", "total"]
PROGRAMS = 256
"""Rings are divided only if there are fewer programs without that: about two for each multiprocessor of a large GPU."""
MOST_PARTS = 64
"""Rings that would have more parts have larger ones: the last program joins all at once."""
AT_ONCE = 8192
"""The numbers that are joined at a time: in registers."""
BESIDE = tl.constexpr(4)
"""Numbers after each partial average: the largest score, the sum of weights, and room that keeps rows aligned."""


class Split(NamedTuple):
    """How the rings of a layer are divided among programs."""

    chunk: int
    """The most keys of a program."""
    total: int
    """The parts of all rings of a row."""
    most: int
    """Those of the longest ring."""


def split_of(windows: tuple[int, ...], sinks: int, rows: int, heads: int, nbits: int) -> Split | None:
    """Return how rings are divided, for the window of each key head and a number of query heads. None: not at all.

    This depends on nothing that changes from step to step: a captured step has the same programs each time."""
    form = FORMS[nbits]
    if not form.chunk or rows * (heads if form.lanes else len(windows)) >= PROGRAMS:
        return None
    return divided(windows, sinks, form.chunk)


@lru_cache
def divided(windows: tuple[int, ...], sinks: int, chunk: int) -> Split | None:
    slots = [size + sinks if size else 0 for size in windows]
    while max(slots) > chunk * MOST_PARTS:
        chunk *= 2
    parts = [max(1, -(-own // chunk)) for own in slots]  # as in `part_of`
    return None if max(parts) == 1 else Split(chunk, sum(parts), max(parts))


@triton.jit
def scale_of(x, scales):
    """Return the scale of a vector in 8 bits, as it is stored (`t2r.ops.stored.whole_numbers`)."""
    scale = tl.minimum(tl.maximum(tl.max(tl.abs(x.to(tl.float32)), 0) / MOST, LEAST), LARGEST)
    return scale.to(scales.dtype.element_ty).to(tl.float32)


@triton.jit
def numbers(x, scale):
    """Return a vector as whole numbers."""
    return tl.minimum(tl.maximum(tl.floor(x.to(tl.float32) / scale + 0.5), -MOST), MOST).to(tl.int8)


@triton.jit
def part_of(number, layout, key_heads, sinks, chunk, BH: tl.constexpr):
    """Return what a program of a row has, which are numbered ring by ring: its key head, the first slot and the window
    of that, the number of its part, and how many the ring has."""
    i = tl.arange(0, BH)
    firsts = tl.load(layout + i, mask=i < key_heads, other=0)
    sizes = tl.load(layout + key_heads + i, mask=i < key_heads, other=0)
    slots = tl.where(sizes > 0, sizes + sinks, 0)
    parts = tl.where(i < key_heads, tl.maximum(tl.cdiv(slots, chunk), 1), 0)
    h = tl.sum((tl.cumsum(parts, 0) <= number).to(tl.int32), 0)
    part = number - tl.sum(tl.where(i < h, parts, 0), 0)
    first, size = tl.sum(tl.where(i == h, firsts, 0), 0), tl.sum(tl.where(i == h, sizes, 0), 0)
    return h.to(tl.int64), first.to(tl.int64), size, part, tl.sum(tl.where(i == h, parts, 0), 0)


@triton.jit
def join(
    work, out, logs, row, live, group,
    VALUE: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr, BJ: tl.constexpr, JOINS: tl.constexpr,
):  # fmt: skip
    """Join the parts of the query heads from `row` on, always in the same order. BJ heads are joined at a time."""
    p, e = tl.arange(0, PARTS), tl.arange(0, BV)
    for i in range(JOINS):
        g = i * BJ + tl.arange(0, BJ)
        g_ok = g < group
        ok = (p < live)[:, None] & g_ok[None, :]
        here = work + ((row + g)[None, :] * PARTS + p[:, None]) * (BV + BESIDE)
        peaks = tl.load(here + BV, mask=ok, other=float("-inf"))
        totals = tl.load(here + BV + 1, mask=ok, other=0.0)
        sums = tl.load(here[:, :, None] + e[None, None, :], mask=ok[:, :, None] & (e < VALUE)[None, None, :], other=0.0)
        peak = tl.where(g_ok, tl.max(peaks, 0), 0.0)
        weights = tl.exp(peaks - peak[None, :])
        total = tl.where(g_ok, tl.sum(weights * totals, 0), 1.0)
        mean = tl.sum(weights[:, :, None] * sums, 0) / total[:, None]
        to = out + (row + g)[:, None] * VALUE + e[None, :]
        tl.store(to, mean.to(out.dtype.element_ty), mask=g_ok[:, None] & (e < VALUE)[None, :])
        tl.store(logs + row + g, peak + tl.log(total), mask=g_ok)


@triton.jit(do_not_specialize=SIZES)
def step(
    q, k, v, keys, values, seen, layout, out, logs, old_k, old_v, valid, places, scales, pairs, work, arrived,
    q_b, q_h, k_b, k_h, v_b, v_h, keys_b, keys_t, values_b, values_t,
    scales_b, key_heads, group, sinks, chunk, total, scaling,
    DIM: tl.constexpr, VALUE: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr, HOW: tl.constexpr, PLACED: tl.constexpr, EIGHT: tl.constexpr, LANES: tl.constexpr,
    PARTS: tl.constexpr, BH: tl.constexpr, BJ: tl.constexpr, JOINS: tl.constexpr,
):  # fmt: skip
    """Run one program per sequence and key head or, LANES, per sequence and query head. The first of a key head alone
    writes its ring.

    Only tokens that were stored before are read from the ring, without the one that the new token replaces. PLACED,
    sequence number b has the buffers number `places[b]`. EIGHT, keys and values are stored in 8 bits, with two scales
    for each token, and are multiplied by them after the products. `pairs` are the same scales, as one number of 32 bits
    for each token: fewer bits cannot be on their way while others are used.

    With PARTS, each of these programs is divided into up to so many, `total` for a row (times query heads, LANES). The
    first has the new token, and writes. All know from the number of tokens how many have something to do: each of these
    stores its sums in `work` and counts itself in `arrived`, and the last one joins them and sets the count back to
    zero, for the next step."""
    programs = (total if PARTS else key_heads) * (group if LANES else 1)
    b, own = (tl.program_id(0) // programs).to(tl.int64), (tl.program_id(0) % programs).to(tl.int64)
    if PARTS:
        h, first, size, part, parts = part_of(own // group if LANES else own, layout, key_heads, sinks, chunk, BH)
        own = h * group + own % group if LANES else h
        writes = (own % group == 0 if LANES else own >= 0) & (part == 0)
    else:
        h = own // group if LANES else own
        writes = own % group == 0 if LANES else own >= 0
        first, size = tl.load(layout + h).to(tl.int64), tl.load(layout + key_heads + h)
    count = tl.load(seen + b)
    place = tl.load(places + b).to(tl.int64) if PLACED else b
    keys_here, values_here = keys + place * keys_b, values + place * values_b
    has = size > 0
    slots = tl.where(has, size + sinks, 0)
    at = tl.where(count < sinks, count, sinks + (count - sinks) % tl.maximum(size, 1))
    held = tl.minimum(count, slots)
    begin, end = 0, held
    if PARTS:
        share = tl.maximum(tl.cdiv(tl.cdiv(slots, parts), BN), 1) * BN
        live = tl.maximum(tl.cdiv(held.to(tl.int32), share), 1)  # so many have something to do
        begin, end = part * share, tl.minimum(held, (part + 1) * share)
    d, e, n, g = tl.arange(0, BD), tl.arange(0, BV), tl.arange(0, BN), tl.arange(0, BG)
    d_ok, e_ok, g_ok = d < DIM, e < VALUE, g < (1 if LANES else group)
    head = own + g if LANES else h * group + g
    query = tl.load(q + b * q_b + head[:, None] * q_h + d[None, :], mask=g_ok[:, None] & d_ok[None, :], other=0.0)
    new_k = tl.load(k + b * k_b + h * k_h + d, mask=d_ok, other=0.0)
    new_v = tl.load(v + b * v_b + h * v_h + e, mask=e_ok, other=0.0)
    k_here, v_here = keys_here + (first + at) * keys_t + d, values_here + (first + at) * values_t + e
    d_kept, e_kept = d < tl.where(has & writes, DIM, 0), e < tl.where(has & writes, VALUE, 0)
    full = has & writes & (count >= slots)  # otherwise no token of this sequence is there yet
    gone_k = tl.load(k_here, mask=d < tl.where(full, DIM, 0), other=0.0)
    gone_v = tl.load(v_here, mask=e < tl.where(full, VALUE, 0), other=0.0)

    # What is stored is rounded as the buffers are, and so is what the new token sees of itself.
    if EIGHT:
        scale_here, zero = scales + (place * scales_b + (first + at) * 2), tl.zeros([1], tl.int64)
        k_scale, v_scale = scale_of(new_k, scales), scale_of(new_v, scales)
        kept_k, kept_v = numbers(new_k, k_scale), numbers(new_v, v_scale)
        seen_k, seen_v = kept_k.to(tl.float32) * k_scale, kept_v.to(tl.float32) * v_scale
        gone_k = gone_k.to(tl.float32) * tl.load(scale_here + zero).to(tl.float32)
        gone_v = gone_v.to(tl.float32) * tl.load(scale_here + 1 + zero).to(tl.float32)
    else:
        kept_k, kept_v = new_k.to(keys.dtype.element_ty), new_v.to(values.dtype.element_ty)
        seen_k, seen_v = kept_k.to(tl.float32), kept_v.to(tl.float32)
    score = tl.sum(query.to(tl.float32) * seen_k[None, :], 1) * scaling
    if PARTS:  # others begin with it, too, but next to any other score this one has no weight
        score = tl.where(part == 0, score, LOWEST)
    if LANES:
        peak, weights = tl.full([BN], LOWEST, tl.float32), tl.zeros([BN], tl.float32)
        acc = tl.zeros([BN, BV], tl.float32)
        one_query = tl.sum(query.to(tl.float32), 0)
    else:
        peak, weights = score, tl.full([BG], 1.0, tl.float32)
        acc = tl.zeros([BG, BV], tl.float32) + seen_v[None, :]
    for start in tl.range(begin, end, BN, num_stages=STAGES):
        t = start + n
        t_ok = (t < end) & (t != at)
        here = first + t
        key = tl.load(keys_here + here[:, None] * keys_t + d[None, :], mask=t_ok[:, None] & d_ok[None, :], other=0.0)
        value = tl.load(
            values_here + here[:, None] * values_t + e[None, :], mask=t_ok[:, None] & e_ok[None, :], other=0.0
        )
        if EIGHT:
            pair = tl.load(pairs + (place * (scales_b // 2) + here), mask=t_ok, other=0)
            k_scales = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            v_scales = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            key, value = key.to(tl.float32), value.to(tl.float32)  # whole numbers up to 127 are exact
        if LANES:
            found = tl.sum(key.to(tl.float32) * one_query[None, :], 1) * scaling
            found = tl.where(t_ok, found * k_scales if EIGHT else found, float("-inf"))
            higher = tl.maximum(peak, found)
            left, weight = tl.exp(peak - higher), tl.exp(found - higher)
            more = weight * v_scales if EIGHT else weight
            acc = acc * left[:, None] + more[:, None] * value.to(tl.float32)
            weights = weights * left + weight
        else:
            if EIGHT:
                key, value = key.to(q.dtype.element_ty), value.to(q.dtype.element_ty)
                found = dot(query, tl.trans(key), HOW) * k_scales[None, :] * scaling
            else:
                found = dot(query, tl.trans(key), HOW) * scaling
            found = tl.where(t_ok[None, :], found, float("-inf"))
            higher = tl.maximum(peak, tl.max(found, 1))
            left, weight = tl.exp(peak - higher), tl.exp(found - higher[:, None])
            acc = acc * left[:, None] + dot(weight * v_scales[None, :] if EIGHT else weight, value, HOW)
            weights = weights * left + tl.sum(weight, 1)
        peak = higher
    if LANES:
        highest = tl.maximum(score, tl.max(peak, 0))  # of one query: a vector of one number
        of_lanes, of_new = tl.exp(peak - tl.max(highest, 0)), tl.exp(score - highest)
        acc = tl.sum(acc * of_lanes[:, None], 0)[None, :] + of_new[:, None] * seen_v[None, :]
        weights = tl.sum(weights * of_lanes, 0) + of_new
        peak = highest

    row = b * key_heads * group + head
    if PARTS:
        heads = 1 if LANES else group
        if (live > 1) & (part < live):
            ok = g_ok[:, None] & e_ok[None, :]
            here = work + (row * PARTS + part) * (BV + BESIDE)
            tl.store(here[:, None] + e[None, :], acc, mask=ok)
            tl.store(here + BV, peak, mask=g_ok)
            tl.store(here + BV + 1, weights, mask=g_ok)
            tl.debug_barrier()  # all threads have stored theirs before one of them counts the program
            counter = arrived + (b * key_heads * (group if LANES else 1) + own)
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == live - 1:
                tl.store(counter, 0)
                join(work, out, logs, b * key_heads * group + own * heads, live, heads, VALUE, BV, PARTS, BJ, JOINS)
        g_ok = g < tl.where((live == 1) & (part == 0), heads, 0)  # nothing to join
    mean = tl.where(has, acc / weights[:, None], 0.0)
    ok = g_ok[:, None] & e_ok[None, :]
    tl.store(out + row[:, None] * VALUE + e[None, :], mean.to(out.dtype.element_ty), mask=ok)
    tl.store(logs + row, tl.where(has, peak + tl.log(weights), float("-inf")), mask=g_ok)
    ring = b * key_heads + h
    # The token of a head without a window leaves at once.
    gone_k = tl.where(has, gone_k.to(tl.float32), seen_k if EIGHT else new_k.to(tl.float32))
    gone_v = tl.where(has, gone_v.to(tl.float32), seen_v if EIGHT else new_v.to(tl.float32))
    d_own, e_own = d < tl.where(writes, DIM, 0), e < tl.where(writes, VALUE, 0)
    tl.store(old_k + ring * DIM + d, gone_k.to(old_k.dtype.element_ty), mask=d_own)
    tl.store(old_v + ring * VALUE + e, gone_v.to(old_v.dtype.element_ty), mask=e_own)
    one = tl.zeros([1], tl.int64)
    tl.store(
        valid + ring + one,
        ((one + count >= sinks + size) | (size == 0)).to(tl.uint8),
        mask=one == tl.where(writes, 0, 1),
    )
    tl.debug_barrier()  # what the new token replaces was read by all threads
    tl.store(k_here, kept_k, mask=d_kept)
    tl.store(v_here, kept_v, mask=e_kept)
    if EIGHT:
        of = tl.arange(0, 2)
        both = tl.where(of == 0, k_scale, v_scale).to(scales.dtype.element_ty)
        tl.store(scale_here + of, both, mask=of < tl.where(has & writes, 2, 0))


def window_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    layout: Tensor,
    sinks: int,
    scaling: float,
    places: Tensor | None = None,
    scales: Tensor | None = None,
    split: Split | None = None,
    arrived: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Store the key and value of one token for each row, and attend to the window of each key head.

    Args:
        q, k, v: queries `[rows, heads, 1, dim]`, and keys and values `[rows, key_heads, 1, …]` of one token.
        keys, values: buffers `[rows, slots, …]`, the ring of one head after the other.
        seen: how many tokens each row has read before.
        layout: `[2, key_heads]`, the first slot of the ring of each head, and the window of each.
        sinks: sinks of heads with a window.
        places: `[rows]`, where the buffers of each row are, if there are those of more sequences. None: in their order.
        scales: `[rows, slots, 2]`, of keys and values that are stored in 8 bits.
        split: how rings are divided, as `split_of` says for these windows. None: not at all.
        arrived: with it, zeros in int32, one for each row and head. Zeros again after the step, so that the next one
            can have the same. Steps that run at the same time cannot.

    Returns averages and logarithms of sums as `t2r.ops.windows.softmax_sums`, the keys and values that left, and
    whether they did.
    """
    q, k, v = inner(q), inner(k), inner(v)
    (rows, heads, _, dim), key_heads, value = q.shape, k.shape[1], v.shape[3]
    out = torch.empty(rows, heads, 1, value, dtype=v.dtype, device=q.device)
    logs = torch.empty(rows, heads, 1, dtype=torch.float32, device=q.device)
    old_k, old_v = (torch.empty(x.shape, dtype=x.dtype, device=q.device) for x in (k, v))
    valid = torch.empty(rows, key_heads, 1, dtype=torch.bool, device=q.device)
    how = precision(q, keys) if scales is None else precision(q)
    group, widest = heads // key_heads, max(dim, value) * q.element_size()
    of_key, of_value = block(dim, 256), block(value, 256)
    form, pairs = FORMS[16 if scales is None else 8], logs if scales is None else scales.view(torch.int32)
    parts, work, together = 0, logs, 1
    if split is not None:
        parts = triton.next_power_of_2(split.most)
        work = torch.empty(rows * heads * parts * (of_value + BESIDE.value), dtype=torch.float32, device=q.device)
        if not form.lanes:
            together = min(max(1, AT_ONCE // (parts * of_value)), triton.next_power_of_2(group))
    programs = rows * (key_heads if split is None else split.total) * (group if form.lanes else 1)
    with on_device(q):
        step[(programs,)](
            q, k, v, keys, values, seen, layout, out, logs, old_k, old_v, valid.view(torch.uint8),
            seen if places is None else places, logs if scales is None else scales, pairs,
            work, layout if split is None else arrived,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            *keys.stride()[:2], *values.stride()[:2], 0 if scales is None else scales.stride(0),
            key_heads, group, sinks, *((0, 0) if split is None else split[:2]), scaling,
            DIM=dim, VALUE=value, BG=1 if form.lanes else max(ROWS, triton.next_power_of_2(group)),
            BN=form.block * 64 // max(64, of_key, of_value) if form.lanes else form.block, BD=of_key, BV=of_value,
            STAGES=form.stages if widest <= 256 else 2, HOW=how, PLACED=places is not None, EIGHT=scales is not None,
            LANES=form.lanes, PARTS=parts, BH=block(key_heads, 1024) if parts else 1, BJ=together,
            JOINS=1 if form.lanes else triton.cdiv(group, together), num_warps=form.warps,
        )  # fmt: skip
    return out, logs, old_k, old_v, valid
