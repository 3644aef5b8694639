"""Linear attention: tensors in, tensors out.

    out, state = linear_attention(phi_q, phi_k, v)              # a whole sequence, in parallel
    out, state = linear_attention(phi_q, phi_k, v, state=state) # its continuation
    out, state = step(phi_q, phi_k, v, state)                   # one more token, as an RNN

The three agree to rounding, for any split of the sequence. Which kernel computes them is decided here and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from t2r.errors import T2RError
from t2r.ops import chunked, reference
from t2r.ops.common import (
    FASTEST_DECAY,
    BoundCount,
    State,
    accumulator_dtype,
    cast_output,
    clock,
    count_bounds,
    fade,
)

__all__ = [
    "FASTEST_DECAY",
    "BoundCount",
    "State",
    "absorb",
    "backends",
    "choose",
    "count_bounds",
    "linear_attention",
    "look",
    "step",
]


@dataclass(frozen=True)
class Backend:
    run: Callable[..., tuple[Tensor, State]]
    missing: Callable[[], str | None] = lambda: None
    """Why it cannot run here, in a few words; None if it can."""


BACKENDS: dict[str, Backend] = {
    "quadratic": Backend(reference.quadratic),
    "recurrent": Backend(reference.recurrent),
    "chunked": Backend(chunked.linear_attention),
}


def backends() -> dict[str, str | None]:
    """Every backend by name: None if it is usable here, else the reason why not."""
    return {name: backend.missing() for name, backend in BACKENDS.items()}


def choose(length: int, device: torch.device, causal: bool = True) -> str:
    """The backend that `auto` takes for a sequence of this length on this device.

    So far always the same: a short sequence is a single chunk, which is no slower than the quadratic form."""
    return "chunked"


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: State | None = None,
    mask: Tensor | None = None,
    starts: Tensor | None = None,
    decay: Tensor | None = None,
    causal: bool = True,
    signed: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, State]:
    """Normalized linear attention over features, and the state after it.

    Args:
        q, k: features of queries `[batch, heads, time, feature]` and keys `[batch, key_heads, time, feature]`;
            `heads` is a multiple of `key_heads`, and each group of queries shares a key head and its state.
        v: values `[batch, key_heads, time, value]`; the output has their dtype.
        state: what came before; its gradient is computed too.
        mask: `[batch, time]`, true where a key counts. A masked key enters neither sum.
        starts: `[batch, time]`, true where a document begins: the state is reset before that position.
        decay: `[key_heads, feature]`, rates of forgetting: with each token that counts, a row of the state shrinks to
            exp(-rate) of what it was before the token is added. From 0 (never) to `FASTEST_DECAY`, and bounded to that.
        causal: a query sees the keys up to its own position; otherwise all of them (cross attention), and
            queries and keys may differ in number.
        signed: the features may be negative (see `t2r.ops.common.safe_denominator`).
        backend: `auto`, or one of `backends()` by name.

    The sums are float32 (float64 for float64 inputs) whatever the inputs are, inside `torch.autocast` too.
    """
    _check(q, k, v, state, mask, starts, causal, signed)
    decay = _bounded(decay, k, causal)
    name = choose(k.shape[2], q.device, causal) if backend == "auto" else backend
    if name not in BACKENDS:
        raise T2RError(f"no backend {name!r}: choose auto or one of {', '.join(BACKENDS)}")
    if (reason := BACKENDS[name].missing()) is not None:
        raise T2RError(f"backend {name!r} cannot run here: {reason}")
    mask = None if mask is None else mask.bool()
    starts = None if starts is None else starts.bool()
    if k.shape[2] == 0 and (causal or q.shape[2] == 0):
        past = State.zeros(k, v, signed) if state is None else state
        return v.new_zeros(*q.shape[:3], v.shape[-1]), past
    with torch.autocast(q.device.type, enabled=False):
        return BACKENDS[name].run(
            q, k, v, state=state, mask=mask, starts=starts, decay=decay, causal=causal, signed=signed
        )


def absorb(state: State, k: Tensor, v: Tensor, *, mask: Tensor | None = None, decay: Tensor | None = None) -> State:
    """Add keys and values to a state without reading it."""
    with torch.autocast(k.device.type, enabled=False):
        k, v = k.to(state.s.dtype), v.to(state.s.dtype)
        if mask is not None:
            k, v = (x.masked_fill(~mask.bool()[:, None, :, None], 0) for x in (k, v))
        if (decay := _bounded(decay, k, True)) is not None:
            decay, time = decay.to(k.dtype), clock(None if mask is None else mask.bool(), k.shape[2], k)
            end = time[:, -1:] if k.shape[2] else time.new_zeros(1, 1)
            state, k = state.faded(fade(decay, end)[:, :, 0]), k * fade(decay, end - time)
        return reference.absorb(state, k, v)


def look(q: Tensor, state: State, dtype: torch.dtype) -> Tensor:
    """Read a state that does not change (cross attention): queries `[batch, heads, time, feature]`."""
    with torch.autocast(q.device.type, enabled=False):
        return cast_output(reference.look(q.to(state.s.dtype), state), dtype)


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State | None = None,
    *,
    mask: Tensor | None = None,
    decay: Tensor | None = None,
    signed: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, State]:
    """One token: absorb its key and value, then read. All tensors as above with a time of 1.

    With `inplace` the given state's own memory is updated and returned: no allocation, and a fixed address,
    as compiled and captured decoding steps want it.
    """
    if k.shape[2] != 1 or q.shape[2] != 1:
        raise T2RError(f"step takes one token, got {q.shape[2]} queries and {k.shape[2]} keys")
    if inplace and state is None:
        raise T2RError("step has no state to update in place: give one, or State.zeros(k, v)")
    _check(q, k, v, state, mask, None, True, signed)
    with torch.autocast(q.device.type, enabled=False):
        dtype = accumulator_dtype(q, k, v)
        keys, values = k.to(dtype), v.to(dtype)
        if mask is not None:
            hidden = ~mask.bool()[:, None, :, None]
            keys, values = keys.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
        if state is None:
            state = State.zeros(k, v, signed)
        if (decay := _bounded(decay, k, True)) is not None:
            left = torch.exp(-decay.to(dtype))[None]
            if mask is not None:
                left = torch.where(mask.bool()[:, :, None], left, 1.0)
            if inplace:
                state.s.mul_(left[..., None])
                state.z.mul_(left)
                if state.z_abs is not None:
                    state.z_abs.mul_(left)
            else:
                state = state.faded(left)
        if inplace:
            state.s.addcmul_(keys.mT, values)
            state.z.add_(keys[:, :, 0])
            if state.z_abs is not None:
                state.z_abs.add_(keys[:, :, 0].abs())
        else:
            state = reference.absorb(state, keys, values)
    return look(q, state, v.dtype), state


def _bounded(decay: Tensor | None, k: Tensor, causal: bool) -> Tensor | None:
    """Rates that every backend can compute with."""
    if decay is None:
        return None
    if not causal:
        raise T2RError("decay (forgetting) needs causal=True: without an order of tokens nothing is older")
    if tuple(decay.shape) != (k.shape[1], k.shape[3]):
        raise T2RError(f"decay has shape {tuple(decay.shape)}, expected {(k.shape[1], k.shape[3])}")
    return decay.clamp(0, FASTEST_DECAY)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State | None,
    mask: Tensor | None,
    starts: Tensor | None,
    causal: bool,
    signed: bool,
) -> None:
    """Say what does not fit, in the caller's own words, before a matrix product says it in its."""

    def shape(name: str, tensor: Tensor, *expected: int) -> None:
        if tuple(tensor.shape) != expected:
            raise T2RError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")

    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4 or not tensor.is_floating_point():
            raise T2RError(f"{name} must be a floating-point tensor [batch, heads, time, size]")
    batch, heads, time, feature = q.shape
    key_heads, keys = k.shape[1:3]
    if heads % key_heads:
        raise T2RError(f"{heads} query heads cannot share {key_heads} key heads evenly")
    shape("k", k, batch, key_heads, time if causal else keys, feature)
    shape("v", v, batch, key_heads, keys, v.shape[-1])
    for name, flags in (("mask", mask), ("starts", starts)):
        if flags is not None:
            shape(name, flags, batch, keys)
            if flags.is_floating_point():
                raise T2RError(f"{name} must be boolean or 0/1 integers, not {flags.dtype}: it is not added")
    if starts is not None and not causal:
        raise T2RError("starts (packed documents) needs causal=True")
    if state is not None:
        shape("state.s", state.s, batch, key_heads, feature, v.shape[-1])
        shape("state.z", state.z, batch, key_heads, feature)
        if state.s.dtype != accumulator_dtype(q, k, v):
            raise T2RError(f"the state must be {accumulator_dtype(q, k, v)}, not {state.s.dtype}")
        if (state.z_abs is not None) != signed:
            raise T2RError(f"signed={signed} needs a state made with signed={signed}")
