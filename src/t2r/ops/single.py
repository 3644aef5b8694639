"""An in-place decoding step with few tensor operations. On a CPU the overhead per operation exceeds its arithmetic."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from t2r.ops.common import DENOMINATOR_FLOOR, State, Sums, bound_decay, cast_output
from t2r.ops.constants import derived


def can_do(state: State, *, inplace: bool) -> bool:
    """Return whether `step` supports this call. It requires `inplace` and supports no gradients or signed features."""
    return inplace and state.z_abs is None and not torch.is_grad_enabled()


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    mask: Tensor | None,
    decay: Tensor | None,
    normalized: bool = True,
) -> Tensor | Sums:
    """Compute `reference.step` for non-negative features. Where the denominator is zero, so is the numerator."""
    s, dtype = state.s, v.dtype
    (batch, heads, feature, value), queries = s.shape, q.shape[1]
    if not q.dtype == k.dtype == dtype == s.dtype:
        q, k, v = q.to(s.dtype), k.to(s.dtype), v.to(s.dtype)
    k, z = k.mT, state.z.unsqueeze(-1)  # [batch, heads, feature, 1], so that decay factors suit both S and z
    left = None if decay is None else derived(decay, s.dtype, functools.partial(factors, decay, s.dtype))
    if mask is not None:
        hidden = ~mask[:, :, None, None]
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
        left = None if left is None else left.masked_fill(hidden, 1)
    if left is None:
        z.add_(k)
    else:
        s.mul_(left)
        torch.addcmul(k, z, left, out=z)
    s.addcmul_(k, v)
    q = q.reshape(batch * heads, -1, feature)
    num, den = torch.bmm(q, s.view(batch * heads, feature, value)), torch.bmm(q, z.view(batch * heads, feature, 1))
    if not normalized:
        return Sums(num.view(batch, queries, 1, value), den.view(batch, queries, 1))
    out = num.div_(den.clamp_min_(DENOMINATOR_FLOOR))
    return cast_output(out, dtype).view(batch, queries, 1, value)


def factors(decay: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factors `[heads, feature, 1]` by which a token decays the state."""
    return bound_decay(decay).to(dtype).neg().exp().unsqueeze(-1)
