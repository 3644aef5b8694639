"""Public functions. They check their arguments, select a backend from the registry, and call it."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, overload

import torch
from torch import Tensor

from t2r.errors import T2RError
from t2r.ops import reference
from t2r.ops.common import HALF, Beside, Features, Slots, State, Sums, accumulator_dtype, bound_decay, clock, fade
from t2r.ops.contract import Backend, Request
from t2r.ops.registry import PREFERENCE, prefer, select
from t2r.ops.rounding import Draws, store

LARGEST_MAPPED = 256
"""The largest input of a feature map that a step computes itself."""


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: State | None = ...,
    mask: Tensor | None = ...,
    starts: Tensor | None = ...,
    decay: Tensor | None = ...,
    causal: bool = ...,
    signed: bool = ...,
    normalized: Literal[True] = ...,
    backend: str = ...,
) -> tuple[Tensor, State]: ...


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: State | None = ...,
    mask: Tensor | None = ...,
    starts: Tensor | None = ...,
    decay: Tensor | None = ...,
    causal: bool = ...,
    signed: bool = ...,
    normalized: Literal[False],
    backend: str = ...,
) -> tuple[Sums, State]: ...


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
    normalized: bool = True,
    backend: str = "auto",
) -> tuple[Tensor | Sums, State]:
    """Compute linear attention over features. Returns the output and the final state.

    Args:
        q, k: features of queries `[batch, heads, time, feature]` and keys `[batch, key_heads, time, feature]`.
            `heads` is a multiple of `key_heads`. Each group of query heads shares a key head and its state.
        v: values `[batch, key_heads, time, value]`. The output has their dtype.
        state: initial state. Gradients flow into it.
        mask: padding mask `[batch, time]`, true for real keys. Masked keys are ignored.
        starts: `[batch, time]`, true where a document begins. The state is reset before that position.
        decay: decay rates `[key_heads, feature]`. Before each unmasked token is added, each row of the state is
            multiplied by exp(-rate). Rates are clamped to [0, `FASTEST_DECAY`].
        causal: each query attends to the keys up to its own position. If False (cross attention), it attends to all
            keys, and the number of queries and keys may differ.
        signed: features may be negative (see `t2r.ops.common.safe_denominator`).
        normalized: return the attention output. If False, return `Sums`, the numerator and denominator, which
            `normalize` divides.
        backend: `auto`, or a name from `backends()`.

    Sums are accumulated in float32 (float64 for float64 inputs) for all input dtypes, also under `torch.autocast`.

    Raises:
        T2RError: shapes or dtypes do not match, or the backend does not support the call.
    """
    _check(q, k, v, state, mask, starts, causal, signed)
    decay = None if decay is None else bound_decay(_checked_decay(decay, k, causal))
    if backend == "auto" and causal and is_open(k.shape[2]):
        how: dict[str, Any] = {"mask": mask, "starts": starts, "decay": decay, "signed": signed}
        return _exportable(q, k, v, state, normalized=normalized, **how)
    request = _request("parallel", q, k, v, state, decay, signed=signed)
    chosen = select(request._replace(starts=starts is not None, causal=causal, normalized=normalized), backend)
    mask = None if mask is None else mask.bool()
    starts = None if starts is None else starts.bool()
    if k.shape[2] == 0 and (causal or q.shape[2] == 0):
        return _nothing(q, k, v, state, signed, normalized)
    with no_autocast(q.device.type):
        return chosen.parallel(
            q,
            k,
            v,
            state=state,
            mask=mask,
            starts=starts,
            decay=decay,
            causal=causal,
            signed=signed,
            normalized=normalized,
        )


def is_open(time: int) -> bool:
    """Return whether `torch.export` may leave the number of tokens open. A loop over chunks would be exported with the
    number of chunks of the example, and an ONNX file does not have the guard that says so."""
    # torch 2.11 answers `is_exporting()` with True inside torch.compile too. The flag itself is right in both.
    if not getattr(torch.compiler, "_is_exporting_flag", False):
        return False
    return isinstance(time, torch.SymInt) or torch.compiler.is_dynamo_compiling()  # strict=True does not tell


def _exportable(
    q: Tensor, k: Tensor, v: Tensor, state: State | None, *, decay: Tensor | None, **how: Any
) -> tuple[Tensor | Sums, State]:
    """Compute the quadratic form with a key head for each query head. Folding queries into groups would require
    comparisons with the length."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    decay = None if decay is None else decay.repeat_interleave(group, dim=0)
    past = None if state is None else state.map(lambda x: x.repeat_interleave(group, dim=1))
    out, new = linear_attention(q, k, v, state=past, decay=decay, **how, backend="quadratic")
    return out, new.map(lambda x: x[:, ::group])


def _nothing(
    q: Tensor, k: Tensor, v: Tensor, state: State | None, signed: bool, normalized: bool
) -> tuple[Tensor | Sums, State]:
    """Return the result for an empty sequence: an empty output and the unchanged state."""
    past = State.zeros(k, v, signed) if state is None else state
    shape = (*q.shape[:3], v.shape[-1])
    if normalized:
        return v.new_zeros(shape), past
    num = past.s.new_zeros(shape)
    return Sums(num, num.new_zeros(shape[:3]), num.new_zeros(shape[:3]) if signed else None), past


def absorb(state: State, k: Tensor, v: Tensor, *, mask: Tensor | None = None, decay: Tensor | None = None) -> State:
    """Add keys and values to a state without computing an output. Returns the new state."""
    with no_autocast(k.device.type):
        k, v = k.to(state.s.dtype), v.to(state.s.dtype)
        if mask is not None:
            k, v = (x.masked_fill(~mask.bool()[:, None, :, None], 0) for x in (k, v))
        if decay is not None:
            decay = bound_decay(_checked_decay(decay, k, True)).to(k.dtype)
            time = clock(None if mask is None else mask.bool(), k.shape[2], k)
            end = time[:, -1:] if k.shape[2] else time.new_zeros(1, 1)
            state, k = state.faded(fade(decay, end)[:, :, 0]), k * fade(decay, end - time)
        return reference.absorb(state, k, v)


def look(q: Tensor, state: State, dtype: torch.dtype, *, backend: str = "auto") -> Tensor:
    """Read a fixed state (cross attention) with queries `[batch, heads, time, feature]`.

    The state may be stored in bfloat16 or float16."""
    if state.s.dtype in HALF:
        state = state.map(lambda x: x.to(accumulator_dtype(q)))
    gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, *state))
    request = Request(
        operation="look",
        device=q.device.type,
        dtypes=(q.dtype, dtype, state.s.dtype),
        feature=q.shape[3],
        value=state.s.shape[3],
        signed=state.z_abs is not None,
        groups=q.shape[1] != state.s.shape[1],
        gradients=gradients,
    )
    with no_autocast(q.device.type):
        return select(request, backend).look(q, state, dtype)


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
    features: Features | None = None,
    beside: Beside | None = None,
    normalized: bool = True,
    slots: Slots | None = None,
    draws: Draws | None = None,
    backend: str = "auto",
) -> tuple[Any, State]:
    """Process one token: add its key and value to the state, then read the state.

    Arguments are those of `linear_attention`, with a time dimension of 1. With `inplace`, the given state is updated
    in place and returned. Its memory address then stays fixed, which compiled and captured decoding steps require.

    With `inplace`, the state may also be stored in bfloat16 or float16. It is computed in float32 and rounded after
    every token: at random with `draws` (`t2r.ops.rounding`), else to the nearest number.

    With `features`, q, k and v are the inputs of a feature map, and the kernel of the step also computes the features.
    A head of k and v may then serve several key heads, and the mask may be one of each head of k, `[batch, heads, 1]`.
    With `beside` too, the output is that of the state and of another memory together. `computes_features` says where
    this is supported.

    With `normalized=False`, the first result are `Sums`, and features must not be signed.

    With `inplace` and `slots`, the tensors of the state have the states of more sequences than rows.
    """
    if signed and not normalized:
        raise T2RError("step with normalized=False does not support signed features")
    if k.shape[2] != 1 or q.shape[2] != 1:
        raise T2RError(f"step requires exactly one token, got {q.shape[2]} queries and {k.shape[2]} keys")
    if inplace and state is None:
        raise T2RError("step with inplace=True requires a state: pass one, for example State.zeros(k, v)")
    if slots is not None and (state is None or not inplace):
        raise T2RError("step with slots requires inplace=True, because only some of the states change")
    if draws is not None and (state is None or state.s.dtype not in HALF):
        raise T2RError("step with draws requires a state in half precision: others are not rounded")
    mask = None if mask is None else mask.bool()
    if beside is not None and (features is None or not normalized):
        raise T2RError("step with beside requires features, and its output is normalized")
    if features is not None:
        if state is None:
            raise T2RError("step with features requires a state: pass one, for example of Rule.empty")
        known = _computing_backend(q, v, features.size) if backend == "auto" and not torch.is_grad_enabled() else None
        if known is None:
            request = _request("step", q, k, v, state, decay, signed=signed)
            known = select(request._replace(feature=features.size, features=True), backend)
        with no_autocast(q.device.type):
            how: dict[str, Any] = {"inplace": inplace, "features": features, "normalized": normalized}
            how |= {} if beside is None else {"beside": beside}
            how |= {} if slots is None else {"slots": slots}
            how |= {} if draws is None else {"draws": draws}
            return known.step(q, k, v, state, mask=mask, decay=decay, **how)
    half = inplace and state is not None and state.s.dtype in HALF
    rows = state if slots is None or state is None else state.map(lambda x: x[:1].expand(len(q), *x.shape[1:]))
    _check(q, k, v, rows, mask, None, True, signed, half=half)
    decay = None if decay is None else _checked_decay(decay, k, True)
    chosen = select(_request("step", q, k, v, state, decay, signed=signed), backend)
    if slots is not None and state is not None:
        how = {"mask": mask, "decay": decay, "normalized": normalized, "inplace": True, "draws": draws}
        if not chosen.abilities.slots or torch.compiler.is_compiling():
            return _step_copies(q, k, v, state, slots, **how, signed=signed, backend=backend), state
        with no_autocast(q.device.type):
            return chosen.step(q, k, v, state, slots=slots, **how)
    with no_autocast(q.device.type):
        past = State.zeros(k, v, signed) if state is None else state
        if not half or chosen.abilities.half_state:
            how = {"mask": mask, "decay": decay, "normalized": normalized, "inplace": inplace, "draws": draws}
            return chosen.step(q, k, v, past, **how)
        full = past.map(lambda x: x.to(accumulator_dtype(q, k, v)))
        out, _ = chosen.step(q, k, v, full, mask=mask, decay=decay, inplace=True, normalized=normalized)
        store(past, full, draws)
        return out, past


def _step_copies(q: Tensor, k: Tensor, v: Tensor, state: State, slots: Slots, **how: Any) -> Any:
    """Advance copies of the states of the rows, and write them back."""

    def copied(x: Tensor) -> Tensor:
        return x[slots.at].masked_fill(slots.new.view(-1, *[1] * (x.dim() - 1)), 0)

    rows = state.map(copied)
    out, rows = step(q, k, v, rows, **how)
    for own, new in zip(state, rows, strict=True):
        if own is not None and new is not None:
            own[slots.at] = new
    return out


def computes_features(q: Tensor, v: Tensor, size: int) -> bool:
    """Return whether the backend that `auto` selects for a step can compute `size` features per head itself.

    A compiled step computes them outside, where the compiler fuses them with other operations."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or q.shape[3] > LARGEST_MAPPED:
        return False
    return _computing_backend(q, v, size) is not None


def _computing_backend(q: Tensor, v: Tensor, size: int) -> Backend | None:
    device = q.device.type
    preference = PREFERENCE.get(device)
    return None if preference is None else _find_computing(preference, device, (q.dtype, v.dtype), size, v.shape[3])


@functools.cache  # every layer asks for every token
def _find_computing(
    preference: tuple[str, ...], device: str, dtypes: tuple[torch.dtype, ...], size: int, value: int
) -> Backend | None:
    """Return the preferred backend that computes features in a step. It depends on nothing but the arguments."""
    return prefer(Request("step", device, dtypes, size, value, state=True, features=True), preference)


def no_autocast(device: str) -> AbstractContextManager[object]:
    """Disable autocast for a device type. A step is short, so a context that changes nothing is not entered."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _request(
    operation: str, q: Tensor, k: Tensor, v: Tensor, state: State | None, decay: Tensor | None, *, signed: bool
) -> Request:
    """Describe a call, as far as its tensors determine it."""
    inputs = [q, k, v, *(() if state is None else state[:2]), *(() if decay is None else (decay,))]
    return Request(
        operation=operation,
        device=q.device.type,
        dtypes=(q.dtype, k.dtype, v.dtype),
        feature=k.shape[3],
        value=v.shape[3],
        decay=decay is not None,
        signed=signed,
        groups=q.shape[1] != k.shape[1],
        state=state is not None,
        gradients=torch.is_grad_enabled() and any(x.requires_grad for x in inputs),
    )


def _checked_decay(decay: Tensor, k: Tensor, causal: bool) -> Tensor:
    if not causal:
        raise T2RError("decay requires causal=True: non-causal attention has no token order")
    if tuple(decay.shape) != (k.shape[1], k.shape[3]):
        raise T2RError(f"decay has shape {tuple(decay.shape)}, expected {(k.shape[1], k.shape[3])}")
    return decay


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State | None,
    mask: Tensor | None,
    starts: Tensor | None,
    causal: bool,
    signed: bool,
    half: bool = False,
) -> None:
    """Check shapes and dtypes. Raises T2RError naming the argument that does not match.

    With `half`, the state may be in half precision."""

    def shape(name: str, tensor: Tensor, *expected: int) -> None:
        if tensor.shape != expected:
            raise T2RError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")

    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4 or not tensor.is_floating_point():
            raise T2RError(f"{name} must be a floating-point tensor [batch, heads, time, size]")
        if not tensor.shape[0] * tensor.shape[1] * tensor.shape[3]:
            raise T2RError(f"{name} has shape {tuple(tensor.shape)}: only the time may be 0")
    batch, heads, time, feature = q.shape
    key_heads, keys = k.shape[1:3]
    if heads % key_heads:
        raise T2RError(f"the number of query heads, {heads}, must be a multiple of that of key heads, {key_heads}")
    shape("k", k, batch, key_heads, time if causal else keys, feature)
    shape("v", v, batch, key_heads, keys, v.shape[-1])
    for name, flags in (("mask", mask), ("starts", starts)):
        if flags is not None:
            shape(name, flags, batch, keys)
            if flags.is_floating_point():
                raise T2RError(f"{name} must be boolean or 0/1 integers, not {flags.dtype}: it is not additive")
    if starts is not None and not causal:
        raise T2RError("starts (packed documents) requires causal=True")
    if state is not None:
        shape("state.s", state.s, batch, key_heads, feature, v.shape[-1])
        shape("state.z", state.z, batch, key_heads, feature)
        if not half and state.s.dtype != accumulator_dtype(q, k, v):
            raise T2RError(f"the state must have dtype {accumulator_dtype(q, k, v)}, not {state.s.dtype}")
        if (state.z_abs is not None) != signed:
            raise T2RError(f"signed={signed} requires a state created with signed={signed}")
