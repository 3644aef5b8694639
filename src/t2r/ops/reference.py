"""Two reference implementations of linear attention: with a T x T matrix, and one token at a time.

The conformance tests compare every other backend with these. They use plain autograd and no optimizations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from t2r.ops.common import (
    State,
    Sums,
    accumulator_dtype,
    bound_decay,
    clock,
    fade,
    fold_groups,
    read,
    unfold_groups,
)


def quadratic(
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
) -> tuple[Sums, State]:
    """Compute all weights q k^T as a matrix and mask them."""
    dtype = accumulator_dtype(q, k, v)
    (_, heads, queries, _), (key_heads, keys) = q.shape, k.shape[1:3]
    q, k, v = fold_groups(q.to(dtype), key_heads), k.to(dtype), v.to(dtype)
    past = State.zeros(k, v, signed) if state is None else state
    if mask is not None:
        k, v = (x.masked_fill(~mask[:, None, :, None], 0) for x in (k, v))

    group = heads // key_heads
    if decay is None:
        weights = q @ k.mT
        total = q.detach().abs() @ k.detach().abs().mT if signed else None
        num, den, seen, _ = read(q, past)
    else:
        decay, time = decay.to(dtype), clock(mask, keys, k)
        # Decay of each key feature between its key and each query. Later keys are masked below.
        left = fade(decay, (time[:, :, None] - time[:, None, :]).clamp_min(0).flatten(1))
        left = left.unflatten(2, (keys, keys)).repeat(1, 1, group, 1, 1)
        weights = torch.einsum("bhif,bhjf,bhijf->bhij", q, k, left)
        total = (
            torch.einsum("bhif,bhjf,bhijf->bhij", q.detach().abs(), k.detach().abs(), left.detach()) if signed else None
        )
        num, den, seen, _ = read(q * fade(decay, time).repeat(1, 1, group, 1), past)
        end = time[:, -1].unsqueeze(1)  # of size 1 whatever the length, unlike a slice: torch.export asks
        k = k * fade(decay, end - time)
        past = past.faded(fade(decay, end)[:, :, 0])
    keep = carry = None
    if causal:
        visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril()[None]
        if starts is not None:
            document = starts.cumsum(1)
            visible = visible & (document[:, :, None] == document[:, None, :])
            # The initial state belongs to document 0. The final state contains only the last document.
            before = (document == 0).repeat(1, group)[:, None]
            num, den = num * before[..., None], den * before
            seen = None if seen is None else seen * before
            keep = (document == document[:, -1:])[:, None, :, None]
            carry = (document[:, -1] == 0)[:, None, None]
        hidden = ~visible.repeat(1, group, 1)[:, None]
        weights = weights.masked_fill(hidden, 0)
        total = None if total is None else total.masked_fill(hidden, 0)

    num, den = num + weights @ v, den + weights.sum(-1)
    if total is not None:
        assert seen is not None
        total = seen.detach() + total.sum(-1)

    if keep is not None and carry is not None:
        k = k.masked_fill(~keep, 0)
        past = State(past.s * carry[..., None], past.z * carry, None if past.z_abs is None else past.z_abs * carry)
    new = State(
        past.s + k.mT @ v,
        past.z + k.sum(-2),
        None if past.z_abs is None else past.z_abs + k.detach().abs().sum(-2),
    )
    return unfold_groups(Sums(num, den, total), heads), new


def recurrent(
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
) -> tuple[Sums, State]:
    """Compute the recurrence of the paper, S += k v^T, z += k, out = q S / q z, one position at a time.

    With decay, S and z are decayed before each unmasked token."""
    dtype = accumulator_dtype(q, k, v)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    state = State.zeros(k, v, signed) if state is None else state
    if mask is not None:
        k, v = (x.masked_fill(~mask[:, None, :, None], 0) for x in (k, v))

    found = []
    for t in range(k.shape[2]):
        if starts is not None:
            state = forget(state, starts[:, t])
        if decay is not None:
            state = age(state, decay, None if mask is None else mask[:, t])
        state = absorb(state, k[:, :, t : t + 1], v[:, :, t : t + 1])
        if causal:
            found.append(look(q[:, :, t : t + 1], state))
    if not causal:
        return look(q, state), state
    total = torch.cat([x.magnitude for x in found if x.magnitude is not None], 2) if signed else None
    return Sums(torch.cat([x.numerator for x in found], 2), torch.cat([x.denominator for x in found], 2), total), state


def forget(state: State, where: Tensor) -> State:
    """Reset the state of the sequences where `where [batch]` is true."""
    keep = ~where[:, None, None]
    z_abs = None if state.z_abs is None else state.z_abs * keep
    return State(state.s * keep[..., None], state.z * keep, z_abs)


def age(state: State, decay: Tensor, where: Tensor | None) -> State:
    """Decay the state by one token in the sequences where `where [batch]` is true."""
    left = torch.exp(-decay.to(state.z.dtype))[None]
    if where is not None:
        left = torch.where(where[:, None, None], left, 1.0)
    return state.faded(left)


def absorb(state: State, k: Tensor, v: Tensor) -> State:
    """Add keys and values to the state."""
    z_abs = None if state.z_abs is None else state.z_abs + k.detach().abs().sum(-2)
    return State(state.s + k.mT @ v, state.z + k.sum(-2), z_abs)


def look(q: Tensor, state: State) -> Sums:
    """Read the state with queries `[batch, heads, time, feature]`."""
    return unfold_groups(read(fold_groups(q, state.s.shape[1]), state), q.shape[1])


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    *,
    mask: Tensor | None = None,
    decay: Tensor | None = None,
    inplace: bool = False,
) -> tuple[Sums, State]:
    """Process one token: decay the state, add the key and value, and read. With `inplace`, update the given state."""
    dtype = state.s.dtype
    keys, values = k.to(dtype), v.to(dtype)
    if mask is not None:
        hidden = ~mask[:, None, :, None]
        keys, values = keys.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
    if decay is not None:
        left = torch.exp(-bound_decay(decay).to(dtype))[None]
        if mask is not None:
            left = torch.where(mask[:, :, None], left, 1.0)
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
        state = absorb(state, keys, values)
    return look(q.to(dtype), state), state
