"""Random inputs for linear attention, and the comparison of results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from t2r import ops
from t2r.ops import State
from t2r.ops.common import Sums, fold_groups
from t2r.ops.reference import forget

# Relative to the largest entry: a few units of rounding of each dtype. Outputs are averages of values of order one,
# rounded once to the dtype, and gradients are sums of such terms.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# Signed weights cancel. The denominator can be as small as SIGNED_FLOOR times the sum of its absolute terms, which
# amplifies rounding by up to 1 / SIGNED_FLOOR, and by its square in gradients.
SIGNED_TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-3, torch.bfloat16: 0.1, torch.float16: 5e-2}


@dataclass
class Case:
    """Random inputs of one call. Gradients are computed for `inputs`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    state: State | None
    mask: torch.Tensor | None
    starts: torch.Tensor | None
    decay: torch.Tensor | None
    causal: bool
    signed: bool

    @property
    def options(self) -> dict[str, Any]:
        options = {"mask": self.mask, "starts": self.starts, "decay": self.decay}
        return options | {"causal": self.causal, "signed": self.signed}

    @property
    def flags(self) -> dict[str, torch.Tensor | None]:
        """Arguments that describe each position."""
        return {"mask": self.mask, "starts": self.starts}

    def to(self, device: str, dtype: torch.dtype | None = None) -> Case:
        """Move the inputs to a device and dtype."""

        def move(x):
            return (
                x if x is None else x.to(device) if dtype is None or not x.is_floating_point() else x.to(device, dtype)
            )

        state = None if self.state is None else State(*map(move, self.state))
        tensors = (move(x) for x in (self.q, self.k, self.v))
        return Case(*tensors, state, move(self.mask), move(self.starts), move(self.decay), self.causal, self.signed)

    @property
    def exact(self) -> Case:
        """Return the same (rounded) inputs in float64 on the CPU, for the reference."""
        return self.to("cpu", torch.float64)

    @property
    def tolerance(self) -> float:
        return (SIGNED_TOLERANCE if self.signed else TOLERANCE)[self.v.dtype]


def make_case(
    batch=2,
    key_heads=2,
    group=2,
    time=9,
    keys=None,
    feature=4,
    value=3,
    dtype=torch.float64,
    signed=False,
    causal=True,
    mask=None,
    starts=False,
    state=False,
    decay=False,
    zeros=False,
    seed=0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def features(*shape):
        x = draw(*shape)
        x = x if signed else x.relu()
        # A dead relu gives rows of zeros: queries and keys whose weights are all zero.
        return x * (draw(*shape[:3], 1) > -0.5) if zeros else x

    keys = time if causal or keys is None else keys
    q = features(batch, key_heads * group, time, feature).to(dtype)
    k = features(batch, key_heads, keys, feature).to(dtype)
    v = draw(batch, key_heads, keys, value).to(dtype)
    given = None
    if state:
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        past = features(batch, key_heads, 5, feature).to(exact)
        given = State(
            past.mT @ draw(batch, key_heads, 5, value).to(exact),
            past.sum(2),
            past.abs().sum(2) if signed else None,
        )
    column = torch.arange(keys)
    if mask == "left":
        mask = column >= torch.randint(0, keys + 1, (batch, 1), generator=generator)
    elif mask == "right":
        mask = column < torch.randint(0, keys + 1, (batch, 1), generator=generator)
    elif mask == "holes":
        mask = torch.rand(batch, keys, generator=generator) > 0.4
    starts = (torch.rand(batch, keys, generator=generator) > 0.7) if starts and causal else None
    rates = None
    if decay and causal:  # from no decay to the fastest
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        rates = (torch.rand(key_heads, feature, generator=generator) * 1.2 - 0.1).clamp(0, 1).to(exact)
    return Case(q, k, v, given, mask, starts, rates, causal, signed)


TIMES, SIZES = st.integers(1, 20), st.integers(1, 5)


@st.composite
def cases(draw, dtypes=(torch.float64,), causal=None, times=TIMES, size=SIZES, **fixed) -> Case:
    arguments = {
        "batch": draw(st.integers(1, 3)),
        "key_heads": draw(st.integers(1, 3)),
        "group": draw(st.integers(1, 3)),
        "time": draw(times),
        "keys": draw(st.integers(0, 9)),
        "feature": draw(size),
        "value": draw(size),
        "dtype": draw(st.sampled_from(dtypes)),
        "signed": draw(st.booleans()),
        "causal": draw(st.booleans()) if causal is None else causal,
        "mask": draw(st.sampled_from([None, "left", "right", "holes"])),
        "starts": draw(st.booleans()),
        "state": draw(st.booleans()),
        "decay": draw(st.booleans()),
        "zeros": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }
    return make_case(**{**arguments, **fixed})


def steps(q, k, v, *, state=None, mask=None, starts=None, decay=None, causal=True, signed=False, backend="auto"):
    """Process the sequence with one call of `step` per token."""
    if not causal:
        _, state = ops.linear_attention(q, k, v, state=state, mask=mask, causal=False, signed=signed, backend=backend)
        return ops.look(q, state, v.dtype), state
    outputs = [v.new_zeros(*q.shape[:2], 0, v.shape[-1])]
    state = State.zeros(k, v, signed) if state is None else state
    for t in range(k.shape[2]):
        now = slice(t, t + 1)
        if starts is not None:
            state = forget(state, starts[:, t])
        out, state = ops.step(
            q[:, :, now],
            k[:, :, now],
            v[:, :, now],
            state,
            mask=None if mask is None else mask[:, now],
            decay=decay,
            signed=signed,
            backend=backend,
        )
        outputs.append(out)
    return torch.cat(outputs, 2), state


def outputs_and_gradients(run, case: Case, **options) -> dict[str, torch.Tensor]:
    """Compute the outputs, the final state, and the gradient of each input through both."""
    q, k, v = (x.clone().requires_grad_() for x in (case.q, case.k, case.v))
    inputs, state = {"dq": q, "dk": k, "dv": v}, None
    if case.state is not None:
        s, z = (x.clone().requires_grad_() for x in case.state[:2])
        inputs |= {"ds": s, "dz": z}
        state = State(s, z, case.state.z_abs)
    options = {**case.options, **options}
    if case.decay is not None:
        options["decay"] = inputs["d_decay"] = case.decay.clone().requires_grad_()
    out, new = run(q, k, v, state=state, **options)
    if isinstance(out, Sums):
        results = {"num": out.numerator, "den": out.denominator, "s": new.s, "z": new.z}
    else:
        results = {"out": out, "s": new.s, "z": new.z}
    generator = torch.Generator().manual_seed(1)
    loss = q.double().sum() * 0  # the outputs of an empty sequence have no gradient
    for x in results.values():
        weight = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
        loss = loss + (x.double() * weight).sum()
    gradients = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    for (name, x), gradient in zip(inputs.items(), gradients, strict=True):
        results[name] = torch.zeros_like(x) if gradient is None else gradient
    if new.z_abs is not None:
        results["z_abs"] = new.z_abs
    if isinstance(out, Sums) and out.magnitude is not None:
        results["magnitude"] = out.magnitude
    return results


def assert_same(actual, expected, tolerance, what=""):
    for name in expected:
        a, b = actual[name].double().cpu(), expected[name].double().cpu()
        # A float16 gradient may overflow only where the exact one is out of range.
        fits = b.abs() < 0.99 * torch.finfo(actual[name].dtype).max
        a, b = a[fits], b[fits]
        assert a.isfinite().all(), f"{what}{name} is not finite"
        if b.numel():
            error, scale = (a - b).abs().max().item(), max(1.0, b.abs().max().item())
            assert error <= tolerance * scale, f"{what}{name}: off by {error:.2e} of {scale:.2e}"


def smallest_denominator(case: Case) -> float:
    """Return the smallest denominator. Gradients are differences of terms as large as its inverse."""
    q, k = (case.q.abs(), case.k.abs()) if case.signed else (case.q, case.k)
    weights = fold_groups(q, k.shape[1]) @ k.mT
    return min(1.0, weights[weights > 0].min().item()) if (weights > 0).any() else 1.0
