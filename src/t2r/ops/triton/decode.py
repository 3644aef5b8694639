"""One decoding step in one kernel launch: compute features, decay, update and read the state in place; or read only."""

from __future__ import annotations

import torch
from torch import Tensor

from t2r.ops.common import Features, State
from t2r.ops.triton.blocks import block, inner, on_device
from t2r.ops.triton.decode_kernel import decode, read
from t2r.ops.triton.launch import Numbers, Repeated

_decode, _read = Repeated(decode), Repeated(read)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    z: Tensor,
    z_abs: Tensor | None,
    mask: Tensor | None,
    decay: Tensor | None,
    features: Features | None = None,
) -> Tensor:
    batch, heads = q.shape[:2]
    key_heads, feature, value = s.shape[1:]
    q, k, v = inner(q), inner(k), inner(v)
    out = torch.empty(batch, heads, 1, value, dtype=v.dtype, device=v.device)
    flags = None if mask is None else mask.view(torch.uint8)
    rates = None if decay is None else inner(decay)
    how = Features(feature, "") if features is None else features
    mapped, dim = how.q_weight is not None, 0 if how.q_weight is None else how.q_weight.shape[2]

    def numbers() -> Numbers:
        group, rows = heads // key_heads, block(feature, 256)
        columns = block(value, max(16, 8192 // rows))
        integers = (
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            s.stride(0), s.stride(1), s.stride(2), z.stride(0), z.stride(1),
            0 if z_abs is None else z_abs.stride(0), 0 if z_abs is None else z_abs.stride(1),
            out.stride(0), out.stride(1),
            0 if flags is None else flags.stride(0), 0 if rates is None else rates.stride(0),
            key_heads, group, key_heads // k.shape[1], key_heads // v.shape[1],
        )  # fmt: skip
        constants = dict(
            FEATURE=feature, VALUE=value, DIM=dim,
            HAS_Z_ABS=z_abs is not None, HAS_MASK=flags is not None, HAS_DECAY=rates is not None,
            GROUPED=group > 1, MAPPED=mapped, HAS_BIAS=how.q_bias is not None, ACTIVATION=how.activation,
            WEIGHS=how.weighs_keys, BF=rows, BV=columns, BLOCKS=-(-value // columns), BD=block(dim, 256),
        )  # fmt: skip
        return integers, constants

    states = (s, z) if z_abs is None else (s, z, z_abs)
    given = (q, k, v, *states, *(x for x in (flags, rates, *how[3:]) if x is not None))
    tensors = (
        q, k, v, s, z, z if z_abs is None else z_abs, q if flags is None else flags, q if rates is None else rates, out,
        *(q if x is None else x for x in how[3:]),
    )  # fmt: skip
    # Which of the optional tensors are given follows from the flags and from `how`.
    layout = (flags is None, rates is None, how[:3], how.q_bias is None, q.get_device(), *map(_layout, given))
    with on_device(q):
        _decode.launch((batch * key_heads,), tensors, layout, numbers)
    return out


def _layout(x: Tensor) -> tuple[object, ...]:
    return x.shape, x.stride(), x.dtype


@torch.library.custom_op("t2r::step", mutates_args=("s", "z", "z_abs"))
def _traced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    z: Tensor,
    z_abs: Tensor | None,
    mask: Tensor | None,
    decay: Tensor | None,
) -> Tensor:
    return _launch(q, k, v, s, z, z_abs, mask, decay)


@_traced.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    z: Tensor,
    z_abs: Tensor | None,
    mask: Tensor | None,
    decay: Tensor | None,
) -> Tensor:
    return v.new_empty(q.shape[0], q.shape[1], 1, v.shape[3])


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    mask: Tensor | None,
    decay: Tensor | None,
    features: Features | None = None,
) -> Tensor:
    """Process one token and update the state in place. Eager calls skip the dispatch of the custom operator."""
    if torch.compiler.is_compiling():
        traced: Tensor = _traced(q, k, v, state.s, state.z, state.z_abs, mask, decay)
        return traced
    return _launch(q, k, v, state.s, state.z, state.z_abs, mask, decay, features)


def look(q: Tensor, state: State, dtype: torch.dtype) -> Tensor:
    """Read a fixed state with one query per sequence and head, `[batch, heads, 1, feature]`."""
    q, (s, z, z_abs) = inner(q), state.map(inner)
    (batch, heads), (key_heads, feature, value) = q.shape[:2], s.shape[1:]
    out = torch.empty(batch, heads, 1, value, dtype=dtype, device=q.device)
    rows = block(feature, 256)
    columns = block(value, max(16, 8192 // rows))

    def numbers() -> Numbers:
        strides = (0, 0) if z_abs is None else z_abs.stride()[:2]
        integers = (
            q.stride(0), q.stride(1), s.stride(0), s.stride(1), s.stride(2), z.stride(0), z.stride(1), *strides,
            heads, heads // key_heads,
        )  # fmt: skip
        return integers, dict(FEATURE=feature, VALUE=value, HAS_Z_ABS=z_abs is not None, BF=rows, BV=columns)

    given = (q, s, z) if z_abs is None else (q, s, z, z_abs)
    with on_device(q):
        _read.launch(
            (batch * heads, -(-value // columns)),
            (q, s, z, z if z_abs is None else z_abs, out),
            (dtype, q.get_device(), *map(_layout, given)),
            numbers,
        )
    return out
