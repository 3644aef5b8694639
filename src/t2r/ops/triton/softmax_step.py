"""One decoding step of softmax attention over a static cache: rotate, store and attend in one or two kernels."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from t2r.ops.triton.blocks import inner, on_device, precision
from t2r.ops.triton.math import dot

BLOCK = 64
"""The number of keys that a program reads at a time."""
ROWS = 16
"""The fewest rows of a matrix product, so the fewest query heads of a program. Missing ones are zeros."""
PROGRAMS = 512
"""Keys are split until there are about this many programs, a few for each multiprocessor of a large GPU."""
MOST_SPLITS = 64
STAGES = 3
"""Blocks of keys and values that are on their way from memory. With one, each iteration would wait for memory."""
SIZES = ["heads", "key_heads", "group"]


@triton.jit
def rows_of(x, offsets, ok, cos, sin, d, DIM: tl.constexpr, ROTATED: tl.constexpr):
    """Load rows of queries or keys, and rotate them with the roundings of three separate operations."""
    ok = ok[:, None] & (d < DIM)[None, :]
    y = tl.load(x + offsets[:, None] + d[None, :], mask=ok, other=0.0).to(tl.float32)
    if ROTATED:
        low = d < DIM // 2
        partner = tl.where(low, d + DIM // 2, d - DIM // 2)
        z = tl.load(x + offsets[:, None] + partner[None, :], mask=ok, other=0.0).to(tl.float32)
        z = tl.where(low[None, :], -z, z)
        c = tl.load(cos + d, mask=d < DIM, other=0.0).to(tl.float32)
        s = tl.load(sin + d, mask=d < DIM, other=0.0).to(tl.float32)
        y = (y * c[None, :]).to(x.dtype.element_ty).to(tl.float32)
        y += (z * s[None, :]).to(x.dtype.element_ty).to(tl.float32)
    return y.to(x.dtype.element_ty)


@triton.jit(do_not_specialize=SIZES)
def attend(
    q, k, v, cos, sin, keys, values, lengths, out, peaks, sums,
    q_b, q_h, k_b, k_h, v_b, v_h, cos_b, keys_b, keys_h, keys_t, values_b, values_h, values_t,
    heads, key_heads, group, scaling,
    DIM: tl.constexpr, ROTATED: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    BG: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Attend to every SPLITS-th block of the keys of one head, for up to BG query heads that share it.

    Only stored keys before the new one are read. The first split adds the new key and value, and stores them."""
    b = (tl.program_id(0) // (key_heads * PARTS)).to(tl.int64)
    h = (tl.program_id(0) // PARTS % key_heads).to(tl.int64)
    part, split = tl.program_id(0) % PARTS, tl.program_id(1)
    d, n = tl.arange(0, BD), tl.arange(0, BN)
    d_ok = d < DIM
    g = part * BG + tl.arange(0, BG)
    g_ok = g < group
    head = h * group + g
    length = tl.load(lengths + b).to(tl.int32)
    query = rows_of(q, b * q_b + head * q_h, g_ok, cos + b * cos_b, sin + b * cos_b, d, DIM, ROTATED)
    peak = tl.full([BG], float("-inf"), tl.float32)
    total = tl.zeros([BG], tl.float32)
    acc = tl.zeros([BG, BD], tl.float32)
    for start in tl.range(split * BN, length, SPLITS * BN, num_stages=STAGES):
        t = start + n
        t_ok = t < length
        ok = t_ok[:, None] & d_ok[None, :]
        key = tl.load(keys + b * keys_b + h * keys_h + t[:, None] * keys_t + d[None, :], mask=ok, other=0.0)
        value = tl.load(values + b * values_b + h * values_h + t[:, None] * values_t + d[None, :], mask=ok, other=0.0)
        score = dot(query, tl.trans(key), HOW) * scaling
        score = tl.where(t_ok[None, :], score, float("-inf"))
        new = tl.maximum(peak, tl.max(score, 1))
        left, weight = tl.exp(peak - new), tl.exp(score - new[:, None])
        acc = acc * left[:, None] + dot(weight, value, HOW)
        total = total * left + tl.sum(weight, 1)
        peak = new
    if split == 0:
        one = tl.zeros([1], tl.int64)
        fresh = rows_of(k, b * k_b + h * k_h + one, one == 0, cos + b * cos_b, sin + b * cos_b, d, DIM, ROTATED)
        value = tl.load(v + b * v_b + h * v_h + one[:, None] + d[None, :], mask=d_ok[None, :], other=0.0).to(tl.float32)
        score = tl.sum(query.to(tl.float32) * fresh.to(tl.float32), 1) * scaling
        new = tl.maximum(peak, score)
        left, weight = tl.exp(peak - new), tl.exp(score - new)
        acc = acc * left[:, None] + weight[:, None] * value
        total = total * left + weight
        peak = new
        if part == 0:
            here = length * keys_t + one[:, None] + d[None, :]
            tl.store(keys + b * keys_b + h * keys_h + here, fresh.to(keys.dtype.element_ty), mask=d_ok[None, :])
            here = length * values_t + one[:, None] + d[None, :]
            tl.store(values + b * values_b + h * values_h + here, value.to(values.dtype.element_ty), mask=d_ok[None, :])
    row = (b * heads + head) * SPLITS + split
    if SPLITS == 1:
        acc = acc / total[:, None]
    else:
        tl.store(peaks + row, peak, mask=g_ok)
        tl.store(sums + row, total, mask=g_ok)
    tl.store(out + row[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty), mask=g_ok[:, None] & d_ok[None, :])


@triton.jit
def combine(parts, peaks, sums, out, DIM: tl.constexpr, SPLITS: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr):
    """Combine the splits of one query head."""
    row = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, BS), tl.arange(0, BD)
    s_ok, d_ok = s < SPLITS, d < DIM
    peak = tl.load(peaks + row * SPLITS + s, mask=s_ok, other=float("-inf"))
    weight = tl.exp(peak - tl.max(peak, 0))
    total = tl.sum(weight * tl.load(sums + row * SPLITS + s, mask=s_ok, other=0.0), 0)
    here = parts + (row * SPLITS + s)[:, None] * DIM + d[None, :]
    part = tl.load(here, mask=s_ok[:, None] & d_ok[None, :], other=0.0)
    y = tl.sum(weight[:, None] * part, 0) / total
    tl.store(out + row * DIM + d, y.to(out.dtype.element_ty), mask=d_ok)


def softmax_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    scaling: float,
    rotation: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Store the key and value of one token for each row, and return attention to them and to those before.

    Args:
        q, k, v: queries `[rows, heads, 1, dim]`, and keys and values `[rows, key_heads, 1, dim]` of one token.
        keys, values: buffers `[rows, key_heads, size, dim]`.
        lengths: how many tokens of each row are stored, which is the position of the new token.
        rotation: cosines and sines `[rows or 1, 1, dim]`, by which queries and keys are rotated. The two halves of a
            head are its real and imaginary parts.
    """
    q, k, v = inner(q), inner(k), inner(v)
    (rows, heads, _, dim), key_heads, size = q.shape, keys.shape[1], keys.shape[2]
    cos, sin = (q, q) if rotation is None else (inner(x.expand(rows, 1, dim)) for x in rotation)
    group, columns = heads // key_heads, triton.next_power_of_2(dim)
    together = max(ROWS, min(triton.next_power_of_2(group), 4 * ROWS))
    parts, programs = triton.cdiv(group, together), rows * key_heads * triton.cdiv(group, together)
    splits = max(1, min(PROGRAMS // programs, triton.cdiv(size, BLOCK), MOST_SPLITS))
    out = torch.empty(rows, heads, 1, dim, dtype=q.dtype, device=q.device)
    partial = peaks = sums = out
    if splits > 1:
        partial = torch.empty(rows, heads, splits, dim, dtype=torch.float32, device=q.device)
        peaks, sums = torch.empty(2, rows, heads, splits, dtype=torch.float32, device=q.device)
    with on_device(q):
        attend[(programs, splits)](
            q, k, v, cos, sin, keys, values, lengths, partial, peaks, sums,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            0 if rotation is None else cos.stride(0), *keys.stride()[:3], *values.stride()[:3],
            heads, key_heads, group, scaling,
            DIM=dim, ROTATED=rotation is not None, SPLITS=splits, PARTS=parts, BG=together, BN=BLOCK,
            BD=max(ROWS, columns), STAGES=STAGES if columns * q.element_size() <= 256 else 2, HOW=precision(q, keys),
            num_warps=4,
        )  # fmt: skip
        if splits > 1:
            combine[(rows * heads,)](
                partial, peaks, sums, out, DIM=dim, SPLITS=splits, BS=triton.next_power_of_2(splits), BD=columns,
                num_warps=4,
            )  # fmt: skip
    return out
