"""One decoding step in one kernel launch: compute features, decay, update and read the state in place; or read only."""

from __future__ import annotations

import torch
from torch import Tensor

from t2r.ops.common import Beside, Features, Slots, State, Sums
from t2r.ops.rounding import Draws
from t2r.ops.triton.blocks import block, inner, on_device
from t2r.ops.triton.decode_kernel import decode, read
from t2r.ops.triton.launch import Arguments, Repeated

AT_ONCE = 8192
"""The largest tile of numbers that the query heads of a group have together: in registers, of 128 threads."""
_decode, _read = Repeated(decode), Repeated(read)
_NONE = Features(0, "")


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
    normalized: bool = True,
    beside: Beside | None = None,
    slots: Slots | None = None,
    draws: Draws | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output, or the numerator and the denominator. The output is that of `beside`, if it is given."""
    q, k, v = inner(q), inner(k), inner(v)
    how = _NONE if features is None else features
    flags = None if mask is None else mask.view(torch.uint8)
    rates = None if decay is None else inner(decay)
    (batch, heads, _, _), (_, key_heads, feature, value) = q.shape, s.shape
    if beside is None:
        out = torch.empty(batch, heads, 1, value, dtype=v.dtype if normalized else torch.float32, device=v.device)
    else:
        out = beside.means
    logs, places = (None, None) if beside is None else beside[1:]
    placed = places is not None
    at, new = (None, None) if slots is None else (slots.at, slots.new.view(torch.uint8))
    dens = out if normalized else out.new_empty(batch, heads, 1)
    counts, seed = (None, 0) if draws is None else (inner(draws.counts), draws.seed)

    def arguments() -> Arguments:
        # Key heads of the state for each head of k and v, of which it may have only some.
        k_share = key_heads // (k if places is None else places).shape[places is None]
        v_share = key_heads // v.shape[1] if places is None else k_share
        group = heads // (k.shape[1] * k_share if placed else key_heads)
        rows = block(feature, 256)
        columns = block(value, max(16, 8192 // rows))
        dim = 0 if how.q_weight is None else how.q_weight.shape[2]
        heads_at_once = at_once(group, rows, dim, columns)
        integers = (
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            s.stride(0), s.stride(1), s.stride(2), z.stride(0), z.stride(1),
            0 if z_abs is None else z_abs.stride(0), 0 if z_abs is None else z_abs.stride(1),
            out.stride(0), out.stride(1),
            *((0, 0) if flags is None else (flags.stride(0), flags.stride(1))), 0 if rates is None else rates.stride(0),
            0 if logs is None else logs.stride(0), key_heads, group, k_share, v_share,
            key_heads if flags is None or flags.dim() == 2 else k_share if placed else key_heads // flags.shape[1],
            seed,
        )  # fmt: skip
        constants = dict(
            FEATURE=feature, VALUE=value, DIM=dim,
            HAS_Z_ABS=z_abs is not None, HAS_MASK=flags is not None, HAS_DECAY=rates is not None,
            GROUPED=group > 1, NORMALIZED=normalized and beside is None, BESIDE=beside is not None, PLACED=placed,
            SLOTTED=slots is not None,
            MAPPED=how.q_weight is not None, HAS_BIAS=how.q_bias is not None,
            ACTIVATION=how.activation, WEIGHS=how.weighs_keys, WEIGHS_QUERIES=how.weighs_queries,
            DRAWN=counts is not None,
            BF=rows, BV=columns, BLOCKS=-(-value // columns), BD=block(dim, 256), BG=heads_at_once,
            CHUNKS=-(-group // heads_at_once),
        )  # fmt: skip
        return (batch * key_heads,), integers, constants

    given = (q, k, v, s, z, z_abs, flags, rates, out, dens, logs, places, at, new, *how[4:], counts)
    with on_device(q):
        _decode.launch(given, (*how[:4], normalized, seed), arguments)
    return out, dens


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
    normalized: bool,
    counts: Tensor | None,
    seed: int,
) -> tuple[Tensor, Tensor]:
    draws = None if counts is None else Draws(counts, seed)
    out, dens = _launch(q, k, v, s, z, z_abs, mask, decay, None, normalized, draws=draws)
    return out, dens.new_empty(0) if normalized else dens  # a custom operator may not return a tensor twice


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
    normalized: bool,
    counts: Tensor | None,
    seed: int,
) -> tuple[Tensor, Tensor]:
    out = v.new_empty(q.shape[0], q.shape[1], 1, v.shape[3], dtype=v.dtype if normalized else torch.float32)
    return out, out.new_empty(0) if normalized else out.new_empty(out.shape[:3])


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    mask: Tensor | None,
    decay: Tensor | None,
    features: Features | None = None,
    normalized: bool = True,
    beside: Beside | None = None,
    slots: Slots | None = None,
    draws: Draws | None = None,
) -> Tensor | Sums:
    """Process one token and update the state in place. Eager calls skip the dispatch of the custom operator."""
    if torch.compiler.is_compiling():
        by = (None, 0) if draws is None else draws
        out, dens = _traced(q, k, v, state.s, state.z, state.z_abs, mask, decay, normalized, *by)
    else:
        how = (features, normalized, beside, slots, draws)
        out, dens = _launch(q, k, v, state.s, state.z, state.z_abs, mask, decay, *how)
    return out if normalized else Sums(out, dens)


def at_once(group: int, rows: int, dim: int, columns: int) -> int:
    """Return how many query heads of a group are read at a time, a power of two."""
    most = max(1, AT_ONCE // (rows * max(block(dim, 256) if dim else 1, columns)))
    return 1 << min(most.bit_length() - 1, (group - 1).bit_length())


def look(q: Tensor, state: State, dtype: torch.dtype) -> Tensor:
    """Read a fixed state with one query per sequence and head, `[batch, heads, 1, feature]`."""
    q, (s, z, z_abs) = inner(q), state.map(inner)
    (batch, heads), (key_heads, feature, value) = q.shape[:2], s.shape[1:]
    out = torch.empty(batch, heads, 1, value, dtype=dtype, device=q.device)

    def arguments() -> Arguments:
        rows = block(feature, 256)
        columns = block(value, max(16, 8192 // rows))
        strides = (0, 0) if z_abs is None else z_abs.stride()[:2]
        integers = (
            q.stride(0), q.stride(1), s.stride(0), s.stride(1), s.stride(2), z.stride(0), z.stride(1), *strides,
            heads, heads // key_heads,
        )  # fmt: skip
        constants = dict(FEATURE=feature, VALUE=value, HAS_Z_ABS=z_abs is not None, BF=rows, BV=columns)
        return (batch * heads, -(-value // columns)), integers, constants

    with on_device(q):
        _read.launch((q, s, z, z_abs, out), None, arguments)
    return out
