"""Whole sequences: forward and backward kernel launches, and their integration in autograd and torch.compile."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from t2r.ops.common import State, Sums
from t2r.ops.triton import backward as back
from t2r.ops.triton import forward as fore
from t2r.ops.triton import sweep
from t2r.ops.triton.blocks import block, inner, on_device
from t2r.ops.triton.plan import MANY_WARPS, Plan
from t2r.ops.triton.presence import INTERPRETED

SCANNED = 4 if INTERPRETED else 16
"""States that the scan loads at once."""
SCAN_WIDTH = 128
"""Elements of a state in one program of the scan, one for each thread."""


class _Shared(NamedTuple):
    """Inputs of several launches: decay rates, mask and documents. Missing ones are placeholders that are not read."""

    decay: Tensor
    mask: Tensor
    document: Tensor


def _shared(like: Tensor, decay: Tensor | None, mask: Tensor | None, starts: Tensor | None) -> _Shared:
    return _Shared(
        like if decay is None else decay.float().contiguous(),
        like if mask is None else mask.contiguous().view(torch.uint8),
        like if starts is None else starts.cumsum(1, dtype=torch.int32),
    )


# Sequences and heads are the first grid dimension, because only that one may exceed 65,535.


def _strides(*tensors: Tensor) -> list[int]:
    return [x.stride(i) for x in tensors for i in range(3)]


def _empty_state(plan: Plan, like: Tensor, signed: bool) -> State:
    shape = (plan.batch, plan.key_heads, plan.feature)
    s, z = like.new_empty(*shape, plan.value), like.new_empty(shape)
    return State(s, z, torch.empty_like(z) if signed else None)


def _pointers(state: State) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors of a state, with a placeholder for a missing `z_abs`."""
    return state.s, state.z, state.z if state.z_abs is None else state.z_abs


def _scan(
    plan: Plan, states: Tensor, slot: int, first: State | None, shared: _Shared, elapsed: Tensor, *, reverse: bool
) -> State:
    """Run the scan over `states`, starting from the first state, and return the last state."""
    signed = plan.signed and not reverse
    last = _empty_state(plan, states, signed)
    begin = last if first is None else first.map(torch.Tensor.contiguous)
    fore.scan[(plan.batch * plan.key_heads, -(-slot // SCAN_WIDTH))](
        states, *_pointers(begin), *_pointers(last), shared.decay, elapsed,
        plan.key_heads, *plan.units, plan.segments, slot,
        HAS_FIRST=first is not None, SIGNED=signed, AGES=plan.flags["DECAY"] or plan.flags["PACKED"],
        DECAY=plan.flags["DECAY"], REVERSE=reverse, BC=SCANNED, BE=SCAN_WIDTH,
        ALIGN=plan.align, num_warps=4,
    )  # fmt: skip
    return last


def _states(
    plan: Plan, k: Tensor, v: Tensor, z_sums: Tensor, first: State | None, shared: _Shared
) -> tuple[Tensor, Tensor, State]:  # fmt: skip
    """Compute the states before each segment and after the last, the tokens of each segment, and the final state."""
    shape = (plan.batch, plan.key_heads, plan.segments + 1, plan.state_slot)
    states = torch.empty(shape, dtype=torch.float32, device=k.device)
    elapsed = states.new_empty(plan.batch, plan.segments)
    fore.segment_states[(plan.batch * plan.key_heads, plan.row_blocks * plan.column_blocks, plan.segments)](
        k, v, z_sums, *shared, states, elapsed, *_strides(k, v),
        plan.key_heads, plan.time, *plan.units, plan.chunks, plan.per, plan.state_slot,
        SCALED=plan.scaled, SIGNED=plan.signed, **plan.flags, **plan.blocks,
    )  # fmt: skip
    return states, elapsed, _scan(plan, states, plan.state_slot, first, shared, elapsed, reverse=False)


class _Begin(NamedTuple):
    """Where a sweep finds the states, or gradients, with which its segments begin."""

    s: Tensor
    z: Tensor
    slots: int
    s_slot: int
    z_slot: int
    given: bool

    @classmethod
    def whole(cls, plan: Plan, state: State | None, otherwise: State) -> _Begin:
        """Return that of a whole sequence: `state`, if given. Otherwise nothing is read."""
        s, z, _ = otherwise if state is None else state.map(torch.Tensor.contiguous)
        return cls(s, z, 1, plan.feature * plan.value, plan.feature, state is not None)

    @classmethod
    def segments(cls, plan: Plan, states: Tensor) -> _Begin:
        """Return those of several segments: slots of `states`."""
        z = states[..., plan.feature * plan.value :]
        return cls(states, z, plan.segments + 1, plan.slot, plan.slot, True)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.slots, self.s_slot, self.z_slot


class _Scaled(NamedTuple):
    """Queries and keys with their decay factors, as the sweeps multiply them, and what chunks add to z and dz."""

    q: Tensor
    k: Tensor
    z_sums: Tensor
    dz_sums: Tensor


def _scaled(plan: Plan, q: Tensor, k: Tensor, shared: _Shared, g_den: Tensor | None = None) -> _Scaled:
    """Return them for the sweeps with decay, and placeholders for others. Only a backward pass has g_den."""
    if not plan.scaled:
        return _Scaled(q, k, q, q)
    scaled_q, scaled_k = q.new_empty(2, plan.batch, plan.heads, plan.time, plan.feature, dtype=torch.bfloat16)
    shape = (2, plan.batch, plan.heads, plan.chunks, plan.feature)
    z_sums, dz_sums = torch.empty(shape, dtype=torch.float32, device=q.device)
    flags = {name: plan.flags[name] for name in ("HAS_MASK", "PACKED")}
    sweep.scale[(plan.batch * plan.heads, plan.chunks)](
        q, k, z_sums if g_den is None else g_den, *shared, scaled_q, scaled_k, z_sums, dz_sums,
        *_strides(q, k, scaled_q), plan.heads, plan.time, plan.units[0],
        BACK=g_den is not None, **flags, BT=plan.size, BF=block(plan.feature, 128), ALIGN=plan.align, num_warps=4,
    )  # fmt: skip
    return _Scaled(scaled_q, scaled_k, z_sums, dz_sums)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor | None, z: Tensor | None, z_abs: Tensor | None, decay: Tensor | None,
    mask: Tensor | None, starts: Tensor | None, signed: bool, normalized: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return output or numerator, denominator, magnitude, s, z, z_abs. Magnitude and z_abs are empty if not signed."""
    q, k, v = inner(q), inner(k), inner(v)
    plan = Plan.of(q, k, v, decay, mask, starts, signed)
    shared = _shared(q, decay, mask, starts)
    out = v.new_empty(plan.batch, plan.heads, plan.time, plan.value, dtype=v.dtype if normalized else torch.float32)
    dens = torch.empty(plan.batch, plan.heads, plan.time, dtype=torch.float32, device=v.device)
    totals = torch.empty_like(dens) if signed else dens.new_empty(0)
    first = None if s is None or z is None else State(s, z, z_abs)
    with on_device(q):
        q, k, z_sums, _ = _scaled(plan, q, k, shared)
        if plan.segments == 1 and plan.swept:
            last = _empty_state(plan, dens, signed=False)
            begin = _Begin.whole(plan, first, last)
        else:
            states, _, last = _states(plan, k, v, z_sums, first, shared)
            begin = _Begin.segments(plan, states)
        if plan.swept:
            sweep.outputs[(plan.batch * plan.heads, plan.swept_column_blocks, plan.segments)](
                q, k, v, z_sums, *shared, begin.s, begin.z, last.s, last.z, out, dens, *_strides(q, k, v, out),
                plan.heads, plan.time, *plan.units, plan.chunks, plan.per, *begin.sizes,
                HAS_FIRST=begin.given, LAST=plan.segments == 1, NORMALIZED=normalized,
                **plan.flags, **{**plan.sweep_blocks, "BV": plan.swept_columns},
            )  # fmt: skip
        else:
            fore.outputs[(plan.batch * plan.heads, plan.column_blocks, plan.chunks)](
                q, k, v, *shared, states, out, dens, totals, *_strides(q, k, v, out),
                plan.heads, plan.group, plan.time, *plan.units, plan.chunks, plan.state_slot,
                SIGNED=signed, NORMALIZED=normalized, **plan.flags, **plan.blocks,
            )  # fmt: skip
    return out, dens, totals, last.s, last.z, dens.new_empty(0) if last.z_abs is None else last.z_abs


def _backward(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor | None, z: Tensor | None, z_abs: Tensor | None, decay: Tensor | None,
    mask: Tensor | None, starts: Tensor | None, signed: bool, normalized: bool,
    out: Tensor, dens: Tensor, totals: Tensor,
    g: Tensor, g_den: Tensor | None, ds: Tensor | None, dz: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, s, z and decay. The last is empty without decay."""
    q, k, v, g = inner(q), inner(k), inner(v), inner(g)
    plan = Plan.of(q, k, v, decay, mask, starts, signed)
    shared = _shared(q, decay, mask, starts)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    rows, columns = plan.row_blocks, plan.column_blocks
    sizes = (plan.key_heads, plan.group, plan.time, *plan.units, plan.chunks)
    normal = {"NORMALIZED": normalized, **plan.flags, **plan.blocks}
    with on_device(q):
        inverse = dens
        if normalized:
            inverse, g_den = torch.empty_like(dens), torch.empty_like(dens)
            back.division[(plan.batch * plan.heads, plan.chunks)](
                g, out, dens, totals, inverse, g_den, *_strides(g, out), plan.heads, plan.time, plan.units[1],
                SIGNED=signed, BT=plan.size, BV=plan.columns, ALIGN=plan.align, num_warps=4,
            )  # fmt: skip
        g_den = torch.zeros_like(dens) if g_den is None else g_den.contiguous()
        scaled = _scaled(plan, q, k, shared, g_den)
        q, k, z_sums, dz_sums = scaled
        first = None if s is None or z is None else State(s, z, z_abs)
        last = None
        if ds is not None or dz is not None:
            zeros = State.zeros(k, v)
            last = State(zeros.s if ds is None else ds, zeros.z if dz is None else dz)
        if plan.segments == 1 and plan.swept:
            begin = _empty_state(plan, dens, signed=False)
            before, after = _Begin.whole(plan, first, begin), _Begin.whole(plan, last, begin)
        else:
            states, elapsed, _ = _states(plan, k, v, z_sums, first, shared)
            gradients = states.new_empty(plan.batch, plan.key_heads, plan.segments + 1, plan.slot)
            back.segment_gradients[(plan.batch * plan.key_heads, rows * columns, plan.segments)](
                q, g, inverse, g_den, dz_sums, *shared, gradients, *_strides(q, g), *sizes, plan.per, plan.slot,
                SCALED=plan.scaled, **normal,
            )  # fmt: skip
            begin = _scan(plan, gradients, plan.slot, last, shared, elapsed, reverse=True)
            before, after = _Begin.segments(plan, states), _Begin.segments(plan, gradients[:, :, 1:])
        if plan.swept:
            d_decay = _sweep_back(
                plan, scaled, v, g, inverse, g_den, shared, normalized, before, after, begin, dq, dk, dv
            )
        else:
            shape = (plan.batch, plan.chunks, plan.key_heads, plan.feature) if decay is not None else (0,)
            d_decay = dens.new_empty(shape)
            back.feature_gradients[(plan.batch * plan.key_heads, rows, plan.chunks)](
                q, k, v, g, inverse, g_den, *shared, states, gradients, dq, dk, d_decay,
                *_strides(q, k, v, g, dq, dk), *sizes, plan.state_slot, plan.slot,
                **{**normal, "num_warps": MANY_WARPS},
            )  # fmt: skip
            back.value_gradients[(plan.batch * plan.key_heads, columns, plan.chunks)](
                q, k, g, inverse, *shared, gradients, dv, *_strides(q, k, g, dv), *sizes, plan.slot, **normal
            )
            d_decay = d_decay if decay is None else d_decay.sum((0, 1))
    return dq, dk, dv, begin.s, begin.z, d_decay


def _sweep_back(
    plan: Plan, scaled: _Scaled, v: Tensor, g: Tensor, inverse: Tensor, g_den: Tensor, shared: _Shared,
    normalized: bool, before: _Begin, after: _Begin, begin: State, dq: Tensor, dk: Tensor, dv: Tensor,
) -> Tensor:  # fmt: skip
    """Compute dq, dk, dv and the gradient of the first state, and return that of the decay rates."""
    q, k, z_sums, dz_sums = scaled
    sizes = (plan.heads, plan.time, *plan.units, plan.chunks, plan.per)
    decay = plan.flags["DECAY"]
    # The gradient of the rates, and nothing else, needs the states before all chunks.
    count = plan.batch * plan.heads * plan.chunks if decay else 0
    s_chunks = q.new_empty(count, plan.feature, plan.value, dtype=torch.bfloat16)
    z_chunks = begin.z.new_empty(count, plan.feature)
    d_queries, d_keys = begin.z.new_empty(2, plan.batch, plan.segments, plan.heads, plan.feature if decay else 0)
    part = {**plan.flags, **plan.sweep_blocks, "NORMALIZED": normalized}
    if decay:
        part["num_stages"] = 1  # these sweeps need their registers for other tiles
    features = part | {"BF": plan.rows}
    sweep.query_gradients[(plan.batch * plan.heads, plan.row_blocks, plan.segments)](
        q, k, v, g, inverse, g_den, z_sums, *shared, before.s, before.z, s_chunks, z_chunks, dq, d_queries,
        *_strides(q, k, v, g, dq), *sizes, *before.sizes, HAS_FIRST=before.given, **features,
    )  # fmt: skip
    values = part | {"BV": plan.swept_columns}
    for keys, blocks, how in ((True, plan.row_blocks, features), (False, plan.swept_column_blocks, values)):
        sweep.key_or_value_gradients[(plan.batch * plan.heads, blocks, plan.segments)](
            q, k, v, g, inverse, g_den, dz_sums, *shared, after.s, after.z, s_chunks, z_chunks, dk, dv, d_keys,
            begin.s, begin.z, *_strides(q, k, v, g, dk, dv), *sizes, *after.sizes,
            KEYS=keys, HAS_LAST=after.given, FIRST=plan.segments == 1, **how,
        )  # fmt: skip
    rates: Tensor = (d_queries + d_keys).sum((0, 1)) if decay else d_keys.new_empty(0)
    return rates


# torch.compile treats the launches as two custom operators. Eager calls skip their dispatch.
_forward_traced = torch.library.custom_op("t2r::linear_attention", _forward, mutates_args=())
_backward_traced = torch.library.custom_op("t2r::linear_attention_backward", _backward, mutates_args=())


@_forward_traced.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor | None, z: Tensor | None, z_abs: Tensor | None, decay: Tensor | None,
    mask: Tensor | None, starts: Tensor | None, signed: bool, normalized: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    out = v.new_empty(*q.shape[:3], v.shape[3], dtype=v.dtype if normalized else torch.float32)
    dens = q.new_empty(q.shape[:3], dtype=torch.float32)
    nothing = dens.new_empty(0)
    last = State.zeros(k, v, signed)
    if last.z_abs is None:
        return out, dens, nothing, last.s, last.z, dens.new_empty(0)
    return out, dens, torch.empty_like(dens), last.s, last.z, last.z_abs


@_backward_traced.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor | None, z: Tensor | None, z_abs: Tensor | None, decay: Tensor | None,
    mask: Tensor | None, starts: Tensor | None, signed: bool, normalized: bool,
    out: Tensor, dens: Tensor, totals: Tensor,
    g: Tensor, g_den: Tensor | None, ds: Tensor | None, dz: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    state = State.zeros(k, v)
    d_decay = dens.new_empty(0 if decay is None else decay.shape)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), state.s, state.z, d_decay


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        """Inputs and outputs are those of `_forward`."""
        run: Any = _forward_traced if torch.compiler.is_compiling() else _forward
        results: tuple[Tensor, ...] = run(*inputs)
        out, dens, totals, _, _, z_abs = results
        *tensors, ctx.signed, ctx.normalized = inputs
        ctx.save_for_backward(*tensors, out if ctx.normalized else None, dens, totals)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(totals, z_abs, *((dens,) if ctx.normalized else ()))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        g, g_den, _, ds, dz, _ = grads
        *tensors, out, dens, totals = ctx.saved_tensors
        q, _, v, s, _, _, decay = tensors[:7]
        if g is None:
            g = v.new_zeros(*q.shape[:3], v.shape[3])
        g_den = None if ctx.normalized else g_den
        run: Any = _backward_traced if torch.compiler.is_compiling() else _backward
        how = (ctx.signed, ctx.normalized, g if out is None else out, dens, totals, g, g_den, ds, dz)
        dq, dk, dv, ds, dz, d_decay = run(*tensors, *how)
        if s is None:
            ds = dz = None
        return dq, dk, dv, ds, dz, None, None if decay is None else d_decay.to(decay.dtype), *(None,) * 4


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State | None,
    mask: Tensor | None,
    starts: Tensor | None,
    decay: Tensor | None,
    *,
    signed: bool,
    normalized: bool,
) -> tuple[Tensor | Sums, State]:
    """Compute causal linear attention, as `t2r.ops.linear_attention`."""
    past = (None, None, None) if state is None else state
    inputs = (q, k, v, *past, decay, mask, starts, signed, normalized)
    out, dens, totals, s, z, z_abs = _LinearAttention.apply(*inputs)
    new = State(s, z, z_abs if signed else None)
    return out if normalized else Sums(out, dens, totals if signed else None), new
