"""Every form of linear attention is the same function: quadratic = loop = chunked = steps, in outputs,
final state and every gradient, for any shape, mask, packing and precision."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from t2r import ops
from t2r.errors import T2RError
from t2r.ops import State, chunked, reference
from t2r.ops.common import SIGNED_FLOOR, fold_groups

# Outputs are averages of values of order one, rounded once to the dtype on the way out; gradients are sums of
# such terms. Relative to the largest entry: a few units of rounding of each dtype.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# Signed weights cancel: the denominator can be as small as SIGNED_FLOOR of the sum of its terms, which
# magnifies rounding by up to 1 / SIGNED_FLOOR, and twice so in gradients.
SIGNED_TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-2, torch.bfloat16: 0.1, torch.float16: 5e-2}


@dataclass
class Case:
    """One random problem; `inputs` are what a gradient is asked for."""

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
        # A dead relu gives whole rows of zeros: queries that see nothing, keys that are nothing.
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
    if decay and causal:  # from none at all to the fastest there is
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        rates = (torch.rand(key_heads, feature, generator=generator) * 1.2 - 0.1).clamp(0, 1).to(exact)
    return Case(q, k, v, given, mask, starts, rates, causal, signed)


@st.composite
def cases(draw, dtypes=(torch.float64,), causal=None, **fixed) -> Case:
    size = st.integers(1, 5)
    arguments = {
        "batch": draw(st.integers(1, 3)),
        "key_heads": draw(st.integers(1, 3)),
        "group": draw(st.integers(1, 3)),
        "time": draw(st.integers(1, 20)),
        "keys": draw(st.integers(1, 9)),
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


def steps(q, k, v, *, state=None, mask=None, starts=None, decay=None, causal=True, signed=False):
    """The sequence as a user of the RNN runs it: one call of `step` a token."""
    if not causal:
        out, state = ops.linear_attention(q, k, v, state=state, mask=mask, causal=False, signed=signed)
        return ops.look(q, state, v.dtype), state
    outputs = []
    state = State.zeros(k, v, signed) if state is None else state
    for t in range(k.shape[2]):
        now = slice(t, t + 1)
        if starts is not None:
            state = reference.forget(state, starts[:, t])
        out, state = ops.step(
            q[:, :, now],
            k[:, :, now],
            v[:, :, now],
            state,
            mask=None if mask is None else mask[:, now],
            decay=decay,
            signed=signed,
        )
        outputs.append(out)
    return torch.cat(outputs, 2), state


def outputs_and_gradients(run, case: Case, **options) -> dict[str, torch.Tensor]:
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
    results = {"out": out, "s": new.s, "z": new.z}
    generator = torch.Generator().manual_seed(1)
    loss = sum(
        (x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in results.values()
    )
    gradients = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    for (name, x), gradient in zip(inputs.items(), gradients, strict=True):
        results[name] = torch.zeros_like(x) if gradient is None else gradient
    if new.z_abs is not None:
        results["z_abs"] = new.z_abs
    return results


def assert_same(actual, expected, tolerance, what=""):
    for name in expected:
        a, b = actual[name].double(), expected[name].double()
        # A float16 gradient overflows where, and only where, the true one does not fit.
        fits = b.abs() < 0.99 * torch.finfo(actual[name].dtype).max
        a, b = a[fits], b[fits]
        assert a.isfinite().all(), f"{what}{name} is not finite"
        if b.numel():
            error, scale = (a - b).abs().max().item(), max(1.0, b.abs().max().item())
            assert error <= tolerance * scale, f"{what}{name}: off by {error:.2e} of {scale:.2e}"


def smallest_denominator(case: Case) -> float:
    """Gradients are differences of terms as large as 1 / den: rounding is relative to those."""
    q, k = (case.q.abs(), case.k.abs()) if case.signed else (case.q, case.k)
    weights = fold_groups(q, k.shape[1]) @ k.mT
    return min(1.0, weights[weights > 0].min().item()) if (weights > 0).any() else 1.0


FORMS = {
    "recurrent": reference.recurrent,
    "chunked": chunked.linear_attention,
    "steps": steps,
    "auto": ops.linear_attention,
}


@settings(max_examples=200)
@given(cases(), st.integers(1, 8), st.integers(1, 5))
def test_all_forms_agree_with_the_quadratic_one(case, chunk_size, at_once):
    expected = outputs_and_gradients(reference.quadratic, case)
    for name, run in FORMS.items():
        options = {"chunk_size": chunk_size, "chunks_at_once": at_once} if name == "chunked" else {}
        assert_same(outputs_and_gradients(run, case, **options), expected, case.tolerance, f"{name}: ")


@settings(max_examples=200)
@given(cases(dtypes=(torch.float32, torch.bfloat16, torch.float16)), st.integers(1, 8), st.integers(1, 5))
def test_all_forms_agree_in_lower_precision(case, chunk_size, at_once):
    """The judge is the float64 result of the very same (rounded) inputs."""
    assume(not (case.signed and case.v.dtype != torch.float32))  # cancellation: tested below, for bounds only
    exact = Case(
        *(x.double() for x in (case.q, case.k, case.v)),
        None if case.state is None else State(*(None if x is None else x.double() for x in case.state)),
        case.mask,
        case.starts,
        None if case.decay is None else case.decay.double(),
        case.causal,
        case.signed,
    )
    expected = outputs_and_gradients(reference.quadratic, exact)
    for name, run in FORMS.items():
        options = {"chunk_size": chunk_size, "chunks_at_once": at_once} if name == "chunked" else {}
        actual = outputs_and_gradients(run, case, **options)
        assert actual["out"].dtype == case.v.dtype
        assert actual["s"].dtype == actual["z"].dtype == torch.float32
        forward = {n: x for n, x in expected.items() if not n.startswith("d")}
        assert_same(actual, forward, case.tolerance, f"{name}: ")
        if (den := smallest_denominator(exact)) > 1e-2:
            assert_same(actual, expected, case.tolerance / den, f"{name}: ")


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("mask", [None, "holes"])
@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("at_once", [1, 2])
def test_gradcheck(signed, starts, mask, decay, at_once):
    case = make_case(time=6, feature=3, value=2, signed=signed, starts=starts, mask=mask, state=True)
    rates = torch.linspace(0, 1, 6, dtype=torch.float64).view(2, 3)
    # Finite differences cannot see kinks: keep relu features off zero, and signed ones where no bound acts.
    q, k = (case.q + 4, case.k + 4) if signed else (case.q + 0.1, case.k + 0.1)
    if case.mask is not None:
        case.mask[:, 0] = True
        case.mask |= case.starts if case.starts is not None else False
    with ops.count_bounds() as count:
        ops.linear_attention(q, k, case.v, state=case.state, **case.options)
    assert count.bounded == 0
    inputs = [x.clone().requires_grad_() for x in (q, k, case.v, case.state.s, case.state.z)]
    inputs += [rates.requires_grad_()] if decay else []

    def run(q, k, v, s, z, rates=None):
        options = {**case.options, "decay": rates, "chunk_size": 6 // (at_once + 1), "chunks_at_once": at_once}
        out, new = chunked.linear_attention(q, k, v, state=State(s, z, case.state.z_abs), **options)
        return out, new.s, new.z

    assert torch.autograd.gradcheck(run, inputs)


@settings(max_examples=200)
@given(cases(causal=True, starts=False), st.integers(0, 20), st.sampled_from(["quadratic", "chunked", "auto"]))
def test_a_sequence_can_be_split_anywhere(case, cut, backend):
    time = case.k.shape[2]
    cut = min(cut, time)
    whole, end = ops.linear_attention(case.q, case.k, case.v, state=case.state, backend=backend, **case.options)
    state, parts = case.state, []
    for part in (slice(0, cut), slice(cut, time)):
        options = {**case.options, "mask": None if case.mask is None else case.mask[:, part]}
        out, state = ops.linear_attention(
            case.q[:, :, part],
            case.k[:, :, part],
            case.v[:, :, part],
            state=state,
            backend=backend,
            **options,
        )
        parts.append(out)
    assert_same(
        {"out": torch.cat(parts, 2), "s": state.s, "z": state.z},
        {"out": whole, "s": end.s, "z": end.z},
        case.tolerance,
    )


@settings(max_examples=200)
@given(cases(causal=True, starts=False, batch=1, mask=None), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_packed_documents_equal_separate_ones(case, lengths):
    time = case.k.shape[2]
    edges = sorted({0, *(min(e, time) for e in itertools.accumulate(lengths)), time})
    starts = torch.zeros(1, time, dtype=torch.bool)
    starts[:, edges[1:-1]] = True
    for backend in ("quadratic", "recurrent", "chunked"):
        run = ops.BACKENDS[backend].run
        options = {"chunk_size": 4, "chunks_at_once": len(lengths)} if backend == "chunked" else {}
        packed, end = run(
            case.q,
            case.k,
            case.v,
            state=case.state,
            signed=case.signed,
            starts=starts,
            decay=case.decay,
            causal=True,
            **options,
        )
        state = case.state
        for a, b in itertools.pairwise(edges):
            out, state = ops.linear_attention(
                *(x[:, :, a:b] for x in (case.q, case.k, case.v)), state=state, signed=case.signed, decay=case.decay
            )
            assert_same({"out": packed[:, :, a:b]}, {"out": out}, case.tolerance, f"{backend} {a}:{b} ")
            last, state = state, None
        assert_same({"s": end.s, "z": end.z}, {"s": last.s, "z": last.z}, case.tolerance, backend)


@settings(max_examples=200)
@given(cases(mask="holes"), st.sampled_from(["quadratic", "recurrent", "chunked"]))
def test_padding_changes_no_real_position(case, backend):
    """What stands under a mask, be it NaN, and whether it stands there at all, makes no difference."""
    out, end = ops.linear_attention(case.q, case.k, case.v, state=case.state, backend=backend, **case.options)
    hidden = ~case.mask[:, None, :, None]
    k, v = case.k.masked_fill(hidden, float("nan")), case.v.masked_fill(hidden, float("inf"))
    again, end_again = ops.linear_attention(case.q, k, v, state=case.state, backend=backend, **case.options)
    assert torch.equal(out, again)
    assert torch.equal(end.s, end_again.s)
    assert torch.equal(end.z, end_again.z)
    if not case.causal or case.starts is not None:
        return
    for row in range(case.q.shape[0]):  # the same sequence with the padding cut out
        real = case.mask[row]
        state = None if case.state is None else State(*(None if x is None else x[row : row + 1] for x in case.state))
        q, k, v = (x[row : row + 1, :, real] for x in (case.q, case.k, case.v))
        options = {"signed": case.signed, "decay": case.decay, "backend": backend}
        alone, alone_end = ops.linear_attention(q, k, v, state=state, **options)
        assert_same(
            {"out": out[row : row + 1, :, real], "s": end.s[row : row + 1]},
            {"out": alone, "s": alone_end.s},
            case.tolerance,
        )


@pytest.mark.parametrize("backend", ["quadratic", "recurrent", "chunked"])
@given(cases(causal=True))
def test_the_future_never_leaks_into_the_past(backend, case):
    options = {"chunk_size": 4} if backend == "chunked" else {}
    run = ops.BACKENDS[backend].run
    out, _ = run(case.q, case.k, case.v, state=case.state, **case.options, **options)
    for cut in range(1, case.k.shape[2]):
        q, k, v = case.q.clone(), case.k.clone(), case.v.clone()
        for x in (q, k, v):
            x[:, :, cut:] = 7 + 3 * x[:, :, cut:]
        changed, _ = run(q, k, v, state=case.state, **case.options, **options)
        assert torch.equal(out[:, :, :cut], changed[:, :, :cut])


@pytest.mark.parametrize("backend", ["quadratic", "recurrent", "chunked", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(backend, dtype, lower):
    """Autocast lowers float32 matrix products; the state and the normalizer must not be among them."""
    case = make_case(time=200, feature=8, value=16, dtype=dtype, state=True)

    def run(q, k, v, **options):
        return ops.linear_attention(q, k, v, backend=backend, **options)

    def lower_precision(run):
        return torch.autocast("cpu", dtype=lower)(run)

    expected = outputs_and_gradients(run, case)
    actual = outputs_and_gradients(lower_precision(run), case)
    with torch.autocast("cpu", dtype=lower):
        if backend in (
            "chunked",
            "auto",
        ):  # our own backward holds inside autocast too; PyTorch's own does not
            actual = outputs_and_gradients(run, case)
        out, state = ops.step(case.q[:, :, :1], case.k[:, :, :1], case.v[:, :, :1], case.state)
    assert actual["s"].dtype == actual["z"].dtype == state.s.dtype == state.z.dtype == torch.float32
    assert out.dtype == dtype
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("form", ["quadratic", *FORMS])
def test_nothing_to_see_gives_zeros_forward_and_backward(form, signed, dtype):
    run = reference.quadratic if form == "quadratic" else FORMS[form]
    case = make_case(dtype=dtype, signed=signed, mask=torch.zeros(2, 9, dtype=torch.bool))
    for name, x in outputs_and_gradients(run, case).items():
        assert (x == 0).all(), name
    case = make_case(dtype=dtype, signed=signed)
    case.q.zero_()
    results = outputs_and_gradients(run, case)
    assert (results["out"] == 0).all()
    assert (results["dq"] == 0).all()
    assert all(x.isfinite().all() for x in results.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["quadratic", *FORMS])
@pytest.mark.parametrize("offset", [1e-4, -1e-4, 1e-8, 0.0])
def test_a_signed_denominator_near_zero_stays_bounded(form, offset, dtype):
    """Two keys whose weights cancel to within 1e-4: the output is bounded by the values, not by luck."""
    run = reference.quadratic if form == "quadratic" else FORMS[form]
    q = torch.ones(1, 1, 2, 1, dtype=dtype)
    k = torch.tensor([1.0, -1.0 + offset], dtype=dtype).view(1, 1, 2, 1)
    v = torch.tensor([[1.0, 300.0], [-1.0, -300.0]], dtype=dtype).view(1, 1, 2, 2)
    results = outputs_and_gradients(run, Case(q, k, v, None, None, None, None, True, True))
    assert all(x.isfinite().all() for x in results.values())
    assert results["out"].abs().max() <= 300 / SIGNED_FLOOR * 1.01
    with ops.count_bounds() as count:
        run(q, k, v, signed=True)
    assert count.bounded >= 1
    assert count.queries >= 2


@given(cases(dtypes=(torch.bfloat16, torch.float16), signed=True), st.sampled_from(["quadratic", "chunked"]))
def test_signed_features_in_half_precision_are_finite_and_bounded(case, backend):
    out, state = ops.linear_attention(case.q, case.k, case.v, backend=backend, **case.options)
    assert out.isfinite().all()
    assert state.s.isfinite().all()
    assert out.abs().max() <= case.v.abs().max() / SIGNED_FLOOR * 1.01


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e3, 6e4])
@pytest.mark.parametrize("form", ["quadratic", *FORMS])
def test_extreme_float16_features_stay_finite(form, scale):
    run = reference.quadratic if form == "quadratic" else FORMS[form]
    case = make_case(time=30)
    q, k = (case.q * scale).clamp(max=6e4).half(), (case.k * scale).clamp(max=6e4).half()
    out, state = run(q, k, case.v.half())
    assert out.isfinite().all()
    assert state.s.isfinite().all()


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("mask", [None, torch.tensor([[True], [False]])])
def test_step_in_place_updates_the_given_memory(decay, mask):
    case = make_case(time=1, state=True, signed=True, decay=decay)
    options = {"signed": True, "decay": case.decay, "mask": mask}
    expected, after = ops.step(case.q, case.k, case.v, case.state, **options)
    state = State(*(x.clone() for x in case.state))
    out, same = ops.step(case.q, case.k, case.v, state, inplace=True, **options)
    assert same is state
    assert all(torch.allclose(a, b) for a, b in zip(state, after, strict=True))
    assert torch.allclose(out, expected)
    assert not torch.equal(state.s, case.state.s)


@pytest.mark.parametrize("backend", ["quadratic", "recurrent", "chunked", "auto"])
@pytest.mark.parametrize("causal", [True, False])
def test_an_empty_sequence_leaves_the_state_alone(backend, causal):
    case = make_case(time=3, state=True)
    q = case.q if not causal else case.q[:, :, :0]
    out, state = ops.linear_attention(
        q, case.k[:, :, :0], case.v[:, :, :0], state=case.state, causal=causal, backend=backend
    )
    assert out.shape == (*q.shape[:3], case.v.shape[-1])
    assert torch.equal(state.s, case.state.s)
    if not causal:
        assert torch.equal(out, ops.look(q, case.state, out.dtype))


def at_once(*args, **options):
    """As on an accelerator."""
    return chunked.linear_attention(*args, **options, chunks_at_once=chunked.MANY_CHUNKS)


@settings(max_examples=100)
@given(cases(causal=True, starts=False, state=True))
def test_absorb_is_attention_that_nobody_reads(case):
    _, expected = ops.linear_attention(case.q, case.k, case.v, state=case.state, **case.options)
    state = ops.absorb(case.state, case.k, case.v, mask=case.mask, decay=case.decay)
    assert_same({"s": state.s, "z": state.z}, {"s": expected.s, "z": expected.z}, case.tolerance)


@pytest.mark.parametrize("run", [reference.recurrent, chunked.linear_attention, at_once], ids=lambda run: run.__name__)
def test_the_fastest_decay_over_many_chunks(run):
    """Powers of the decay reach from exp(64) down to nothing: no overflow, and rounding as without."""
    case = make_case(time=600, dtype=torch.float32, state=True, mask="holes")
    case.decay = torch.tensor([[0.0, 1e-4, 0.5, 1.0], [1.0, 1.0, 1.0, 1.0]])
    exact = make_case(time=600, dtype=torch.float64, state=True, mask="holes")
    exact.decay = case.decay.double()
    expected = outputs_and_gradients(reference.recurrent, exact)
    assert_same(outputs_and_gradients(run, case), expected, 5e-3)


def test_rates_are_bounded_alike_in_every_form():
    case = make_case(decay=True)
    wild = torch.tensor([[-1.0, 0.2, 3.0, 100.0]] * 2, dtype=torch.float64)
    tame = wild.clamp(0, ops.FASTEST_DECAY)
    for backend in ("quadratic", "recurrent", "chunked"):
        a, b = (ops.linear_attention(case.q, case.k, case.v, decay=d, backend=backend)[0] for d in (wild, tame))
        assert torch.equal(a, b)


def test_without_forgetting_a_decay_changes_nothing():
    case = make_case(time=300, state=True)
    for backend in ("quadratic", "recurrent", "chunked"):
        a, b = (
            ops.linear_attention(case.q, case.k, case.v, state=case.state, decay=d, backend=backend)[0]
            for d in (None, torch.zeros(2, 4, dtype=torch.float64))
        )
        assert torch.allclose(a, b, atol=1e-12)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest number of elements that any operation inside gives back."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.untyped_storage().size() // x.element_size())
        return result


@pytest.mark.parametrize("decay", [None, torch.full((1, 16), 0.1)])
@pytest.mark.parametrize("run", [chunked.linear_attention, at_once], ids=lambda run: run.__name__)
def test_chunked_forms_neither_t_by_t_nor_t_by_k_by_d(decay, run):
    time, feature, value = 4096, 16, 32
    q, k = (torch.rand(1, 1, time, feature, requires_grad=True) for _ in "qk")
    v = torch.rand(1, 1, time, value, requires_grad=True)
    with LargestTensor() as seen:
        out, _ = run(q, k, v, decay=decay)
        out.sum().backward()
    weights = (1 if run is chunked.linear_attention else chunked.MANY_CHUNKS) * chunked.CHUNK_SIZE**2
    assert seen.largest <= max(time * max(feature, value), weights)  # the second is the same for any time
    assert max(time * value, weights) < min(time * time, time * feature * value)


@pytest.mark.parametrize("backend", ["quadratic", "recurrent", "chunked"])
def test_gradient_checkpointing_changes_nothing(backend):
    def checkpointed(*args, **options):
        return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False, **options)

    case, run = make_case(state=True), ops.BACKENDS[backend].run
    assert_same(outputs_and_gradients(checkpointed, case), outputs_and_gradients(run, case), case.tolerance)


@pytest.mark.parametrize(("causal", "decay"), [(True, False), (True, True), (False, False)])
def test_compiles_to_one_graph(causal, decay):
    case = make_case(time=100, dtype=torch.float32, mask="left", state=True, causal=causal, decay=decay)

    def run(q, k, v, s, z):
        out, state = ops.linear_attention(q, k, v, state=State(s, z), **case.options)
        return out.sum() + state.s.sum()

    inputs = [x.clone().requires_grad_() for x in (case.q, case.k, case.v, *case.state[:2])]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(run(*inputs), inputs)
    actual = torch.autograd.grad(compiled(*inputs), inputs)
    for a, b in zip(actual, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "cuda"}, "no backend 'cuda'"),
        ({"mask": torch.ones(2, 9)}, "must be boolean"),
        ({"mask": torch.ones(2, 8, dtype=torch.bool)}, r"mask has shape \(2, 8\)"),
        ({"starts": torch.ones(2, 9, dtype=torch.bool), "causal": False}, "needs causal=True"),
        ({"decay": torch.ones(2, 4), "causal": False}, "nothing is older"),
        ({"decay": torch.ones(2, 3)}, r"decay has shape \(2, 3\), expected \(2, 4\)"),
        ({"k": torch.rand(2, 3, 9, 4)}, "cannot share"),
        ({"v": torch.rand(2, 2, 8, 3)}, "v has shape"),
        ({"q": torch.ones(2, 4, 9, 4, dtype=torch.long)}, "floating-point"),
        ({"state": State(torch.rand(2, 2, 4, 3), torch.rand(2, 2, 4))}, "state must be torch.float64"),
    ],
)
def test_what_does_not_fit_is_said(change, message):
    case = make_case()
    arguments = {"q": case.q, "k": case.k, "v": case.v, **change}
    with pytest.raises(T2RError, match=message):
        ops.linear_attention(**arguments)


def test_a_backend_that_cannot_run_here_says_why(monkeypatch):
    monkeypatch.setitem(ops.BACKENDS, "warp", ops.Backend(chunked.linear_attention, lambda: "no warp core"))
    case = make_case()
    with pytest.raises(T2RError, match="'warp' cannot run here: no warp core"):
        ops.linear_attention(case.q, case.k, case.v, backend="warp")
    assert ops.backends()["warp"] == "no warp core"
    assert ops.backends()["chunked"] is None


@settings(max_examples=20)
@given(st.integers(0, 300), st.booleans())
def test_choose_names_a_usable_backend(length, causal):
    name = ops.choose(length, torch.device("cpu"), causal)
    assert ops.backends()[name] is None
