"""Shared by all backends: the state, the accumulator dtype, decay, and the bounded denominator."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

DENOMINATOR_FLOOR = 1e-6
"""Lower bound of the denominator for non-negative features."""

SIGNED_FLOOR = 0.1
"""Lower bound of the denominator's magnitude for signed features, as a fraction of the sum of absolute weights.
Outputs are then at most `max|v| / SIGNED_FLOOR`. With a bound of 0.01, weights that nearly cancel make the gradients of
RFA a hundred times as large, and it does not learn to translate (docs/log/2026-11.md)."""


FASTEST_DECAY = 1.0
"""Upper bound of the decay rate. At this rate a row of the state shrinks by a factor of e per token. The bound limits
the exponents that appear when a chunk of tokens is computed at once."""


NOTHING = -1e30
"""The logarithm of a weight of zero, where minus infinity would make a softmax undefined."""

HALF = (torch.bfloat16, torch.float16)
"""Dtypes in which a state may be stored between steps."""

ON_ARM = platform.machine() in ("aarch64", "arm64")

LARGEST_LOG_WEIGHT = 8.0
"""Key weights are limited to the range exp(-8) to exp(8), which float16 can represent."""


class Features(NamedTuple):
    """How a step computes the features of its queries and keys: an affine map per head, then an activation.

    Without weights, the inputs of the step are the outputs of the affine maps."""

    size: int
    activation: str
    """`relu` or `softmax`."""
    weighs_keys: bool = False
    """Whether the last row of the key map is the logarithm of a factor of the key's features."""
    weighs_queries: bool = False
    """Whether the last row of the query map is the logarithm of a factor of the query's sums (`Beside`)."""
    q_weight: Tensor | None = None
    """`[heads, size, dim]`, or `size + 1` rows with `weighs_queries`."""
    q_bias: Tensor | None = None
    k_weight: Tensor | None = None
    """`[key_heads, size, dim]`, or `size + 1` rows with `weighs_keys`."""
    k_bias: Tensor | None = None


class Beside(NamedTuple):
    """What another memory, such as a window, has for the same queries. A step adds it to what the state has.

    The heads of keys and values are then those of the other memory, and the state has all or some of them."""

    means: Tensor
    """The averages of values, `[batch, heads, 1, value]`, contiguous. They become the output of the step."""
    logs: Tensor
    """The logarithms of the sums of weights, `[batch, heads, 1]` in float32. Minus infinity: none."""
    places: Tensor | None = None
    """The heads of keys and values that have a state. None: all."""


class Slots(NamedTuple):
    """Where the states of the rows of a step are, if the tensors of the state have those of more sequences."""

    at: Tensor
    """The place of each row, `[batch]`, in int32 or int64. Rows whose output is not used may have the same one."""
    new: Tensor
    """`[batch]`: whether a row has no state yet. What is at its place is then not read."""


class State(NamedTuple):
    """The recurrent state of linear attention, per key head.

    `s` is the sum of outer products of key features and values, `[batch, key_heads, feature, value]`.
    `z` is the sum of key features, `[batch, key_heads, feature]`. `z_abs` is the sum of their absolute values, kept
    only for signed features, where it bounds the denominator. All are float32 or float64, except that a static cache
    may store them in half precision.
    """

    s: Tensor
    z: Tensor
    z_abs: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> State:
        """Apply a function to each tensor."""
        return State(function(self.s), function(self.z), None if self.z_abs is None else function(self.z_abs))

    def check(self) -> None:
        """Raise ValueError unless these tensors, from a file, can be a state."""
        if self.s.dim() != 4 or self.s.dtype not in (torch.float32, torch.float64):
            raise ValueError("not a state")
        if self.z.shape != self.s.shape[:3]:
            raise ValueError("not a state")

    def faded(self, left: Tensor) -> State:
        """Multiply each row by the factor `left [batch or 1, key_heads, feature]`."""
        z_abs = None if self.z_abs is None else self.z_abs * left.detach()
        return State(self.s * left[..., None], self.z * left, z_abs)

    @classmethod
    def zeros(cls, k: Tensor, v: Tensor, signed: bool = False) -> State:
        """Return the zero state for keys and values of these shapes."""
        batch, heads, _, feature = k.shape
        dtype = accumulator_dtype(k, v)
        z = torch.zeros(batch, heads, feature, dtype=dtype, device=k.device)
        s = torch.zeros(batch, heads, feature, v.shape[-1], dtype=dtype, device=k.device)
        return cls(s, z, torch.zeros_like(z) if signed else None)


class Sums(NamedTuple):
    """Numerator and denominator of attention before the division, so that further terms can be added to both.

    Always in the accumulator dtype (float32, or float64 for float64 inputs).
    """

    numerator: Tensor  # [batch, heads, time, value]
    denominator: Tensor  # [batch, heads, time]
    magnitude: Tensor | None = None
    """`[batch, heads, time]`: sum of absolute weights, for signed features only. It has no gradient."""
    peak: Tensor | None = None
    """`[batch, heads, time]`: the logarithm of a factor of numerator and denominator. None: 0."""


def transposed(x: Tensor) -> Tensor:
    """Return `x.mT`, to be the second factor of a matrix product.

    On ARM, torch passes float32 products with a transposed second factor to oneDNN, which is slow for small matrices
    and uses one thread (pytorch/pytorch#195629). A copy avoids this."""
    return x.mT.contiguous() if ON_ARM and x.device.type == "cpu" else x.mT


def accumulator_dtype(*tensors: Tensor) -> torch.dtype:
    """Return float64 if any tensor is float64, otherwise float32. Half precision is too small for long sums."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


class Denominator(NamedTuple):
    """A denominator that is safe to divide by, where it was bounded, and where all weights are zero."""

    safe: Tensor
    bounded: Tensor
    empty: Tensor


def safe_denominator(den: Tensor, total: Tensor | None) -> Denominator:
    """Bound the denominator away from zero.

    `total` is the sum of absolute weights, for signed features only. For these the sign is kept and the magnitude is
    bounded relative to `total`. No gradient flows through the bound. Where all weights are zero (the query features
    are zero, or all keys are masked), output and gradients are zero. `empty` marks these positions, because dividing
    by the floor would give a zero output but a nonzero gradient.
    """
    if total is None:
        floor = torch.full_like(den, DENOMINATOR_FLOOR)
        bounded, empty = den < floor, den <= 0
    else:
        floor = (SIGNED_FLOOR * total.detach()).clamp_min(DENOMINATOR_FLOOR)
        bounded, empty = den.abs() < floor, total == 0
        floor = torch.copysign(floor, den.detach())
    return Denominator(torch.where(bounded, floor, den), bounded, empty)


def normalize(sums: Sums, dtype: torch.dtype) -> Tensor:
    """Divide numerator by denominator, with the bounds that every backend uses, and cast to `dtype`."""
    safe, _, empty = safe_denominator(sums.denominator, sums.magnitude)
    return cast_output((sums.numerator / safe[..., None]).masked_fill(empty[..., None], 0), dtype)


class Windows(NamedTuple):
    """The window of each key head of a layer, and the sinks of all that have one."""

    sizes: Tensor
    """`[key_heads]`: tokens that a token attends to exactly, including itself. 0: none, not even sinks. Floating-point
    sizes have soft edges and a gradient (`soft_windows`)."""
    sinks: int = 0
    bound: int | None = None
    """With soft edges: tokens at this distance or beyond are not seen."""


def combine(parts: Sequence[Sums], dtype: torch.dtype) -> Tensor:
    """Add the sums that several memories have for the same queries, divide once, and cast to `dtype`.

    Weights must not be negative. Where a part has no weight, it has no effect."""
    logs, means = [], []
    for part in parts:
        empty = part.denominator <= 0
        log = part.denominator.masked_fill(empty, 1.0).log()
        logs.append((log if part.peak is None else log + part.peak).masked_fill(empty, -torch.inf))
        means.append(part.numerator / part.denominator.clamp_min(DENOMINATOR_FLOOR)[..., None])
    shares = torch.stack(logs).nan_to_num(neginf=NOTHING).softmax(0)
    mixed = [share[..., None] * mean for share, mean in zip(shares, means, strict=True)]
    return cast_output(sum(mixed[1:], mixed[0]), dtype)


def bound_decay(decay: Tensor) -> Tensor:
    """Clamp decay rates to the supported range."""
    return decay.clamp(0.0, FASTEST_DECAY)  # bounds of one type, as torch.onnx.export requires


def clock(mask: Tensor | None, time: int, like: Tensor) -> Tensor:
    """Count the unmasked tokens up to and including each position: `[batch, time]`, or `[1, time]` without a mask.

    Decay uses this count as time, so that padding does not decay the state."""
    if mask is None:
        return torch.arange(1, time + 1, dtype=like.dtype, device=like.device)[None]
    return mask.cumsum(1).to(like.dtype)


def fade(decay: Tensor, elapsed: Tensor) -> Tensor:
    """Return the decay factors after `elapsed [batch, time]` tokens: `[batch, key_heads, time, feature]`."""
    return torch.exp(-decay[None, :, None] * elapsed[:, None, :, None])


def cast_output(out: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to the dtype of the values. float16 saturates, because a signed average can exceed the averaged values."""
    if dtype == torch.float16:
        out = out.clamp(-65504.0, 65504.0)
    return out.to(dtype)


def fold_groups(x: Tensor, key_heads: int) -> Tensor:
    """Reshape `[batch, heads, time, size]` to `[batch, key_heads, group * time, size]`.

    The queries that share a key head become rows of one matrix, so that keys and states are not repeated."""
    batch, heads, time, size = x.shape
    return x.reshape(batch, key_heads, heads // key_heads * time, size)


def read(q: Tensor, state: State) -> Sums:
    """Read a state with folded queries."""
    num = q @ state.s
    den = (q @ state.z.unsqueeze(-1)).squeeze(-1)
    if state.z_abs is None:
        return Sums(num, den)
    return Sums(num, den, (q.detach().abs() @ state.z_abs.unsqueeze(-1)).squeeze(-1))


def unfold_groups(sums: Sums, heads: int) -> Sums:
    """Invert `fold_groups` for the sums of folded queries."""
    batch, _, _, value = sums.numerator.shape
    num = sums.numerator.reshape(batch, heads, -1, value)
    den = sums.denominator.reshape(batch, heads, -1)
    return Sums(num, den, None if sums.magnitude is None else sums.magnitude.reshape(batch, heads, -1))
