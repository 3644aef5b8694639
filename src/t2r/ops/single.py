"""An in-place decoding step with few tensor operations. On a CPU the overhead per operation exceeds its arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from t2r.ops.common import DENOMINATOR_FLOOR, State, _counts, bound_decay, cast_output
from t2r.ops.constants import derived


def can_do(state: State, *, mask: Tensor | None, decay: Tensor | None, inplace: bool) -> bool:
    """Return whether `step` supports this call. It requires `inplace` and supports no mask, gradients, signed features,
    or counting of bounds."""
    return inplace and mask is None and state.z_abs is None and not torch.is_grad_enabled() and not _counts


def step(q: Tensor, k: Tensor, v: Tensor, state: State, decay: Tensor | None) -> Tensor:
    """Compute `reference.step` for non-negative features. Where the denominator is zero, so is the numerator."""
    s, z = state.s, state.z
    batch, heads, feature, value = s.shape
    keys, values, queries = k.type_as(s), v.type_as(s), q.type_as(s)
    if decay is not None:
        rates = decay
        left = derived(decay, s.dtype, lambda: bound_decay(rates).to(s.dtype).neg().exp())
        s.mul_(left[None, :, :, None])
        z.mul_(left)
    s.addcmul_(keys.mT, values)
    z.add_(keys[:, :, 0])
    queries = queries.reshape(batch * heads, -1, feature)
    num = torch.bmm(queries, s.view(batch * heads, feature, value))
    den = torch.bmm(queries, z.view(batch * heads, feature, 1))
    out = num.div_(den.clamp_min_(DENOMINATOR_FLOOR))
    return cast_output(out, v.dtype).view(batch, q.shape[1], 1, value)
