"""One decoding step of the windows of a layer: attend, store the token, and return what it replaces, in one kernel."""

# mypy: ignore-errors

from __future__ import annotations

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


FORMS = {16: Form(False, 64, 4, 3), 8: Form(True, 128, 8, 3)}
"""By the bits of keys and values. Products of whole numbers, which have to be converted and exchanged between threads
first, were slow: 1.68 ms for a step of SmolLM2 on an H200, and 1.25 in 16 bits."""
ROWS = 16
"""The fewest rows of a matrix product, so the fewest query heads of a program. Missing ones are zeros."""
LOWEST = tl.constexpr(-1e30)
"""The largest score of a lane without tokens: not infinite, since the difference of two must be a number."""
MOST, LEAST, LARGEST = map(tl.constexpr, (float(stored.MOST), stored.LEAST, stored.LARGEST))
SIZES = ["key_heads", "group", "sinks"]


@triton.jit
def scale_of(x, scales):
    """Return the scale of a vector in 8 bits, as it is stored (`t2r.ops.stored.whole_numbers`)."""
    scale = tl.minimum(tl.maximum(tl.max(tl.abs(x.to(tl.float32)), 0) / MOST, LEAST), LARGEST)
    return scale.to(scales.dtype.element_ty).to(tl.float32)


@triton.jit
def numbers(x, scale):
    """Return a vector as whole numbers."""
    return tl.minimum(tl.maximum(tl.floor(x.to(tl.float32) / scale + 0.5), -MOST), MOST).to(tl.int8)


@triton.jit(do_not_specialize=SIZES)
def step(
    q, k, v, keys, values, seen, layout, out, logs, old_k, old_v, valid, places, scales, pairs,
    q_b, q_h, k_b, k_h, v_b, v_h, keys_b, keys_t, values_b, values_t,
    scales_b, key_heads, group, sinks, scaling,
    DIM: tl.constexpr, VALUE: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr, HOW: tl.constexpr, PLACED: tl.constexpr, EIGHT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Run one program per sequence and key head or, LANES, per sequence and query head. The first of a key head alone
    writes its ring.

    Only tokens that were stored before are read from the ring, without the one that the new token replaces. PLACED,
    sequence number b has the buffers number `places[b]`. EIGHT, keys and values are stored in 8 bits, with two scales
    for each token, and are multiplied by them after the products. `pairs` are the same scales, as one number of 32 bits
    for each token: fewer bits cannot be on their way while others are used."""
    programs = key_heads * group if LANES else key_heads
    b, own = (tl.program_id(0) // programs).to(tl.int64), (tl.program_id(0) % programs).to(tl.int64)
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
    if LANES:
        peak, total = tl.full([BN], LOWEST, tl.float32), tl.zeros([BN], tl.float32)
        acc = tl.zeros([BN, BV], tl.float32)
        one_query = tl.sum(query.to(tl.float32), 0)
    else:
        peak, total = score, tl.full([BG], 1.0, tl.float32)
        acc = tl.zeros([BG, BV], tl.float32) + seen_v[None, :]
    for start in tl.range(0, held, BN, num_stages=STAGES):
        t = start + n
        t_ok = (t < held) & (t != at)
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
            total = total * left + weight
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
            total = total * left + tl.sum(weight, 1)
        peak = higher
    if LANES:
        highest = tl.maximum(score, tl.max(peak, 0))  # of one query: a vector of one number
        of_lanes, of_new = tl.exp(peak - tl.max(highest, 0)), tl.exp(score - highest)
        acc = tl.sum(acc * of_lanes[:, None], 0)[None, :] + of_new[:, None] * seen_v[None, :]
        total = tl.sum(total * of_lanes, 0) + of_new
        peak = highest

    mean = tl.where(has, acc / total[:, None], 0.0)
    row = b * key_heads * group + head
    ok = g_ok[:, None] & e_ok[None, :]
    tl.store(out + row[:, None] * VALUE + e[None, :], mean.to(out.dtype.element_ty), mask=ok)
    tl.store(logs + row, tl.where(has, peak + tl.log(total), float("-inf")), mask=g_ok)
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
    with on_device(q):
        step[(rows * (heads if form.lanes else key_heads),)](
            q, k, v, keys, values, seen, layout, out, logs, old_k, old_v, valid.view(torch.uint8),
            seen if places is None else places, logs if scales is None else scales, pairs,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            *keys.stride()[:2], *values.stride()[:2], 0 if scales is None else scales.stride(0),
            key_heads, group, sinks, scaling,
            DIM=dim, VALUE=value, BG=1 if form.lanes else max(ROWS, triton.next_power_of_2(group)),
            BN=form.block * 64 // max(64, of_key, of_value) if form.lanes else form.block, BD=of_key, BV=of_value,
            STAGES=form.stages if widest <= 256 else 2, HOW=how, PLACED=places is not None, EIGHT=scales is not None,
            LANES=form.lanes, num_warps=form.warps,
        )  # fmt: skip
    return out, logs, old_k, old_v, valid
