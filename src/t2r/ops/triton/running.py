"""States and their gradients for many short sequences. Each program holds a tile of a state and iterates over chunks.

`chunk_states` and `scan` take two launches that write every state twice and read it once. The kernels here take one
launch that writes every state once. They require enough sequences and heads to fill the GPU.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from t2r.ops.triton.backward import asked
from t2r.ops.triton.forward import added
from t2r.ops.triton.math import SIZES, chunk, tile


@triton.jit(do_not_specialize=SIZES)
def states_before(
    k, v, decay, mask, document, states, s_first, z_first, a_first, s_last, z_last, a_last,
    k_b, k_h, k_t, v_b, v_h, v_t,
    key_heads, time, feature, value, chunks, slot,
    HAS_FIRST: tl.constexpr, SIGNED: tl.constexpr,
    DECAY: tl.constexpr, HAS_MASK: tl.constexpr, PACKED: tl.constexpr, HOW: tl.constexpr,
    BT: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Write the state before chunk c to slot c, and the final state."""
    feature, value = feature * ALIGN, value * ALIGN
    value_blocks = (value + BV - 1) // BV
    v_block = tl.program_id(1) % value_blocks
    bh = tl.program_id(0).to(tl.int64)
    b = bh // key_heads
    h = bh % key_heads
    f = (tl.program_id(1) // value_blocks) * BF + tl.arange(0, BF)
    d = v_block * BV + tl.arange(0, BV)
    f_ok, d_ok = f < feature, d < value
    both = f_ok[:, None] & d_ok[None, :]
    inside = f[:, None] * value + d[None, :]
    rate = tl.zeros([BF], tl.float32)
    if DECAY:
        rate = tl.load(decay + h * feature + f, mask=f_ok, other=0.0)
    s = tl.zeros([BF, BV], tl.float32)
    z = tl.zeros([BF], tl.float32)
    z_abs = tl.zeros([BF], tl.float32)
    if HAS_FIRST:
        s += tile(s_first + bh * feature * value, value, f, f_ok, d, d_ok)
        z += tl.load(z_first + bh * feature + f, mask=f_ok, other=0.0)
        if SIGNED:
            z_abs += tl.load(a_first + bh * feature + f, mask=f_ok, other=0.0)
    for c in range(0, chunks):
        here = states + (bh * (chunks + 1) + c) * slot
        tl.store(here + inside, s, mask=both)
        if v_block == 0:
            tl.store(here + feature * value + f, z, mask=f_ok)
            if SIGNED:
                tl.store(here + feature * value + feature + f, z_abs, mask=f_ok)
        t, _, real, clock, length, _, _, keep, carried = chunk(c, b, mask, document, time, HAS_MASK, PACKED, BT)
        keys, own = added(
            k + b * k_b + h * k_h, k_t, v + b * v_b + h * v_h, v_t, t, real & keep, f, f_ok, d, d_ok, rate,
            length - clock, DECAY, HOW,
        )  # fmt: skip
        aged = tl.where(carried, tl.exp(-length * rate), 0.0)
        s = s * aged[:, None] + own
        z = z * aged + tl.sum(keys, 0)
        if SIGNED:
            z_abs = z_abs * aged + tl.sum(tl.abs(keys), 0)
    tl.store(s_last + bh * feature * value + inside, s, mask=both)
    if v_block == 0:
        tl.store(z_last + bh * feature + f, z, mask=f_ok)
        if SIGNED:
            tl.store(a_last + bh * feature + f, z_abs, mask=f_ok)


@triton.jit(do_not_specialize=SIZES)
def gradients_after(
    q, g, inverse, g_dens, decay, mask, document, gradients, ds_last, dz_last, ds_first, dz_first,
    q_b, q_h, q_t, g_b, g_h, g_t,
    key_heads, group, time, feature, value, chunks, slot,
    HAS_LAST: tl.constexpr, NORMALIZED: tl.constexpr,
    DECAY: tl.constexpr, HAS_MASK: tl.constexpr, PACKED: tl.constexpr, HOW: tl.constexpr,
    BT: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the state after chunk c to slot c + 1, and the gradient of the first state."""
    feature, value = feature * ALIGN, value * ALIGN
    value_blocks = (value + BV - 1) // BV
    v_block = tl.program_id(1) % value_blocks
    bh = tl.program_id(0).to(tl.int64)
    b = bh // key_heads
    h = bh % key_heads
    f = (tl.program_id(1) // value_blocks) * BF + tl.arange(0, BF)
    d = v_block * BV + tl.arange(0, BV)
    f_ok, d_ok = f < feature, d < value
    both = f_ok[:, None] & d_ok[None, :]
    inside = f[:, None] * value + d[None, :]
    rate = tl.zeros([BF], tl.float32)
    if DECAY:
        rate = tl.load(decay + h * feature + f, mask=f_ok, other=0.0)
    ds = tl.zeros([BF, BV], tl.float32)
    dz = tl.zeros([BF], tl.float32)
    if HAS_LAST:
        ds += tile(ds_last + bh * feature * value, value, f, f_ok, d, d_ok)
        dz += tl.load(dz_last + bh * feature + f, mask=f_ok, other=0.0)
    for i in range(0, chunks):
        c = chunks - 1 - i
        here = gradients + (bh * (chunks + 1) + c + 1) * slot
        tl.store(here + inside, ds, mask=both)
        if v_block == 0:
            tl.store(here + feature * value + f, dz, mask=f_ok)
        t, there, _, clock, length, _, fresh, _, carried = chunk(c, b, mask, document, time, HAS_MASK, PACKED, BT)
        own_s, own_z = asked(
            q, g, inverse, g_dens, q_b, q_h, q_t, g_b, g_h, g_t, b, h, key_heads, group, time,
            t, there & fresh, f, f_ok, d, d_ok, rate, clock, DECAY, NORMALIZED, HOW, BF, BV,
        )  # fmt: skip
        aged = tl.where(carried, tl.exp(-length * rate), 0.0)
        ds = ds * aged[:, None] + own_s
        dz = dz * aged + own_z
    tl.store(ds_first + bh * feature * value + inside, ds, mask=both)
    if v_block == 0:
        tl.store(dz_first + bh * feature + f, dz, mask=f_ok)
