"""Every backend computes the same function, on every device and in every dtype that it declares.

The reference is the quadratic form in float64 on a CPU. The tests compare outputs, the final state, and the gradient of
every input through both. `pytest -m cuda tests/ops` runs the suite on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.cases import Case, assert_same, cases, make_case, outputs_and_gradients, smallest_denominator, steps
from t2r import ops
from t2r.ops import State, reference
from t2r.ops.common import SIGNED_FLOOR
from t2r.ops.registry import BACKENDS

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
no_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


class Subject:
    """A backend on a device."""

    def __init__(self, backend: str, device: str) -> None:
        self.backend, self.device = backend, device
        self.abilities = BACKENDS[backend].abilities
        self.interpreted = backend == "triton" and device == "cpu"

    def supported(self, *dtypes: torch.dtype) -> list[torch.dtype]:
        return [dtype for dtype in dtypes if dtype in self.abilities.dtypes]

    def run(self, q, k, v, **options):
        return ops.linear_attention(q, k, v, backend=self.backend, **options)

    def steps(self, q, k, v, **options):
        # If the fused step has no gradient, `auto` selects a backend that has one.
        backend = self.backend if "step" in self.abilities.gradients else "auto"
        return steps(q, k, v, backend=backend, **options)

    def cases(self, *dtypes: torch.dtype, **fixed) -> st.SearchStrategy[Case]:
        """Return cases whose sizes are not multiples of a block, from empty to several blocks."""
        few = st.integers(0, 20)
        many = st.sampled_from([33, 47] if self.backend == "recurrent" else [63, 64, 65, 131])
        sizes = st.one_of(st.integers(1, 5), st.sampled_from([16, 33]))
        sampled = {"times": st.one_of(few, few, many), "size": sizes}
        if self.interpreted:  # each kernel operation takes milliseconds: use blocks of 16 and small inputs
            sampled = {"times": st.sampled_from([20, 33, 1, 0]), "size": st.sampled_from([3, 17, 1]), "key_heads": 1}
        return cases(dtypes=dtypes or (self.finest,), **{**sampled, **fixed}).map(lambda case: case.to(self.device))

    @property
    def finest(self) -> torch.dtype:
        return self.supported(*DTYPES)[0]

    def check(self, strategy, property_, examples: int = 20) -> None:
        """Check the property for examples of the strategy, with fewer examples in the interpreter."""
        examples = 3 if self.interpreted else examples

        @settings(max_examples=examples, deadline=None)
        @given(strategy)
        def holds(example):
            property_(example)

        holds()

    def case(self, **arguments) -> Case:
        return make_case(**{"dtype": self.finest, **arguments}).to(self.device)


def subjects() -> list:
    found = []
    for name, device in itertools.product(BACKENDS, ("cpu", "cuda")):
        devices = BACKENDS[name].abilities.devices
        if name == "triton" and device == "cpu" and not torch.cuda.is_available():
            devices = ("cpu",)  # interpreted, or skipped with the reason
        marks = [pytest.mark.cuda, no_cuda] if device == "cuda" else []
        if name == "triton" and device == "cpu":
            marks = [pytest.mark.slow]  # interpreted; test_triton.py has a few fixed cases that are fast
        if devices is not None and device not in devices:
            continue
        if device == "cpu" and (reason := BACKENDS[name].missing()) is not None:
            marks = [pytest.mark.skip(reason=reason)]
        found.append(pytest.param((name, device), id=f"{name}-{device}", marks=marks))
    return found


@pytest.fixture(params=subjects())
def subject(request) -> Subject:
    return Subject(*request.param)


def compare(run, case: Case, **options) -> dict[str, torch.Tensor]:
    """Compare values at the precision of the dtype, and gradients relative to the terms that they subtract."""
    exact = case.exact
    expected = outputs_and_gradients(quadratic, exact, **options)
    actual = outputs_and_gradients(run, case, **options)
    forward = {name: x for name, x in expected.items() if not name.startswith("d")}
    half = case.v.dtype in (torch.bfloat16, torch.float16)
    if case.signed and half and options.get("normalized", True):
        # Signed weights cancel. Only SIGNED_FLOOR bounds their rounding, which another test checks.
        forward.pop("out", None)
        expected = forward
    assert_same(actual, forward, case.tolerance)
    den = 1.0 if case.v.dtype == torch.float64 else smallest_denominator(exact)
    if den > 1e-2:
        assert_same(actual, expected, case.tolerance / den)
    return actual


def quadratic(q, k, v, **options):
    return ops.linear_attention(q, k, v, backend="quadratic", **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients(subject, dtype):
    if dtype not in subject.abilities.dtypes:
        pytest.skip(f"{subject.backend} does not declare {dtype}")
    if (subject.backend, subject.device, dtype) == ("quadratic", "cpu", torch.float64):
        pytest.skip("this is the reference")

    def agrees(case):
        actual = compare(subject.run, case)
        assert actual["out"].dtype == case.v.dtype
        accumulator = torch.float64 if dtype == torch.float64 else torch.float32
        assert actual["s"].dtype == actual["z"].dtype == accumulator
        assert actual["out"].device.type == subject.device

    subject.check(subject.cases(dtype), agrees, examples=40)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_equal_the_sequence(subject, dtype):
    if dtype not in subject.abilities.dtypes:
        pytest.skip(f"{subject.backend} does not declare {dtype}")
    if "step" not in subject.abilities.gradients:
        pytest.skip(f"the step of {subject.backend} has no gradient: test_a_step_without_gradients compares its values")
    subject.check(subject.cases(dtype, times=st.integers(0, 9)), lambda case: compare(subject.steps, case), examples=20)


def test_numerator_and_denominator(subject):
    def agrees(case):
        compare(subject.run, case, normalized=False)
        out, _ = subject.run(case.q, case.k, case.v, state=case.state, **case.options)
        sums, _ = subject.run(case.q, case.k, case.v, state=case.state, normalized=False, **case.options)
        divided = ops.normalize(sums, case.v.dtype)
        assert_same({"out": divided}, {"out": out}, case.tolerance)

    subject.check(subject.cases(), agrees)


def test_mixed_dtypes(subject):
    """Features are float32 and values have lower precision, as under autocast."""
    for dtype in subject.supported(torch.bfloat16, torch.float16):
        case = subject.case(time=40, state=True, decay=True, dtype=dtype)
        case.q, case.k = case.q.float(), case.k.float()
        compare(subject.run, case)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_step_without_gradients(subject, inplace):
    """Decoding steps match, and update the given state in place if requested."""

    def agrees(case):
        options = {"mask": case.mask, "decay": case.decay, "signed": case.signed}
        exact = case.exact
        expected, after = ops.step(
            exact.q, exact.k, exact.v, exact.state, **{**options, "decay": exact.decay, "mask": exact.mask}
        )
        state = case.state.map(torch.clone)
        out, new = ops.step(case.q, case.k, case.v, state, inplace=inplace, backend=subject.backend, **options)
        assert out.dtype == case.v.dtype
        if inplace:
            assert new is state
        else:
            assert torch.equal(state.s, case.state.s)
        tolerance = case.tolerance
        if not case.signed or case.v.dtype in (torch.float64, torch.float32):
            assert_same({"out": out}, {"out": expected}, tolerance)
        assert_same(new._asdict() if new.z_abs is not None else {"s": new.s, "z": new.z}, _tensors(after), tolerance)

    with torch.no_grad():
        subject.check(
            subject.cases(*subject.supported(*DTYPES), times=st.just(1), causal=True, starts=False, state=True), agrees
        )


def _tensors(state: State) -> dict[str, torch.Tensor]:
    return {name: x for name, x in state._asdict().items() if x is not None}


def test_look_reads_without_changing(subject):
    def agrees(case):
        exact = case.exact
        before = case.state.map(torch.clone)
        for q, exactly in ((case.q, exact.q), (case.q[:, :, -1:], exact.q[:, :, -1:])):  # one query, as in decoding
            out = ops.look(q, case.state, case.v.dtype, backend=subject.backend)
            assert all(torch.equal(a, b) for a, b in zip(before, case.state, strict=True) if a is not None)
            assert_same({"out": out}, {"out": ops.look(exactly, exact.state, torch.float64)}, case.tolerance)

    with torch.no_grad():
        subject.check(subject.cases(*subject.supported(torch.float64, torch.float32), state=True), agrees)


def test_a_sequence_can_be_split_anywhere(subject):
    def splits(case, cut):
        time = case.k.shape[2]
        cut = min(cut, time)
        whole, end = subject.run(case.q, case.k, case.v, state=case.state, **case.options)
        state, parts = case.state, []
        for part in (slice(0, cut), slice(cut, time)):
            flags = {
                name: None if x is None else x[:, part] for name, x in (("mask", case.mask), ("starts", case.starts))
            }
            tensors = (x[:, :, part] for x in (case.q, case.k, case.v))
            out, state = subject.run(*tensors, state=state, **{**case.options, **flags})
            parts.append(out)
        assert_same(
            {"out": torch.cat(parts, 2), "s": state.s, "z": state.z},
            {"out": whole, "s": end.s, "z": end.z},
            case.tolerance,
        )

    strategy = st.tuples(subject.cases(causal=True), st.integers(0, 50))
    subject.check(strategy, lambda both: splits(*both))


def test_packed_documents_equal_separate_ones(subject):
    def separates(case, lengths):
        time = case.k.shape[2]
        edges = sorted({0, *(min(e, time) for e in itertools.accumulate(lengths)), time})
        starts = torch.zeros(1, time, dtype=torch.bool, device=subject.device)
        starts[:, edges[1:-1]] = True
        options = {"signed": case.signed, "decay": case.decay}
        packed, end = subject.run(case.q, case.k, case.v, state=case.state, starts=starts, **options)
        state = last = case.state
        for a, b in itertools.pairwise(edges):
            out, state = quadratic(*(x[:, :, a:b] for x in (case.q, case.k, case.v)), state=state, **options)
            assert_same({"out": packed[:, :, a:b]}, {"out": out}, case.tolerance, f"{a}:{b} ")
            last, state = state, None
        if last is not None:
            assert_same({"s": end.s, "z": end.z}, {"s": last.s, "z": last.z}, case.tolerance)

    strategy = st.tuples(
        subject.cases(causal=True, starts=False, batch=1, mask=None),
        st.lists(st.integers(1, 30), min_size=1, max_size=4),
    )
    subject.check(strategy, lambda both: separates(*both))


def test_padding_changes_no_real_position(subject):
    """Masked positions have no effect, even if they hold NaN, and can be removed."""

    def ignores(case):
        out, end = subject.run(case.q, case.k, case.v, state=case.state, **case.options)
        hidden = ~case.mask[:, None, :, None]
        k, v = case.k.masked_fill(hidden, float("nan")), case.v.masked_fill(hidden, float("inf"))
        again, end_again = subject.run(case.q, k, v, state=case.state, **case.options)
        assert torch.equal(out, again)
        assert torch.equal(end.s, end_again.s)
        assert torch.equal(end.z, end_again.z)
        gradients = outputs_and_gradients(subject.run, Case(case.q, k, v, case.state, **case.options))
        for name in ("dk", "dv"):
            assert (gradients[name].masked_select(hidden) == 0).all(), name
        if not case.causal or case.starts is not None:
            return
        for row in range(case.q.shape[0]):  # the same sequence without padding
            real = case.mask[row]
            state = (
                None if case.state is None else State(*(None if x is None else x[row : row + 1] for x in case.state))
            )
            q, k, v = (x[row : row + 1, :, real] for x in (case.q, case.k, case.v))
            alone, alone_end = subject.run(q, k, v, state=state, signed=case.signed, decay=case.decay)
            assert_same(
                {"out": out[row : row + 1, :, real], "s": end.s[row : row + 1]},
                {"out": alone, "s": alone_end.s},
                case.tolerance,
            )

    subject.check(subject.cases(mask="holes"), ignores)


def test_the_future_never_leaks_into_the_past(subject):
    def is_causal(case, cut):
        out, _ = subject.run(case.q, case.k, case.v, state=case.state, **case.options)
        q, k, v = case.q.clone(), case.k.clone(), case.v.clone()
        for x in (q, k, v):
            x[:, :, cut:] = 7 + 3 * x[:, :, cut:]
        changed, _ = subject.run(q, k, v, state=case.state, **case.options)
        assert torch.equal(out[:, :, :cut], changed[:, :, :cut])

    subject.check(st.tuples(subject.cases(causal=True), st.integers(0, 70)), lambda both: is_causal(*both))


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing(subject, lower):
    """Autocast lowers the precision of float32 matrix products, but not that of the state and the normalizer."""
    for dtype in subject.supported(torch.float32, torch.bfloat16, torch.float16):
        case = subject.case(time=40 if subject.interpreted else 200, feature=8, value=16, dtype=dtype, state=True)
        expected = outputs_and_gradients(subject.run, case)
        actual = outputs_and_gradients(torch.autocast(subject.device, dtype=lower)(subject.run), case)
        with torch.autocast(subject.device, dtype=lower):
            if subject.backend not in ("quadratic", "recurrent"):  # their backward is plain autograd
                actual = outputs_and_gradients(subject.run, case)
            out, state = ops.step(case.q[:, :, :1], case.k[:, :, :1], case.v[:, :, :1], case.state)
        assert actual["s"].dtype == actual["z"].dtype == state.s.dtype == state.z.dtype == torch.float32
        assert out.dtype == dtype
        for name in expected:
            assert torch.equal(actual[name], expected[name]), (dtype, name)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("form", ["run", "steps"])
def test_zero_weights_give_zeros_forward_and_backward(subject, form, signed):
    run = getattr(subject, form)
    for dtype in subject.supported(*DTYPES):
        case = subject.case(dtype=dtype, signed=signed, mask=torch.zeros(2, 9, dtype=torch.bool))
        for name, x in outputs_and_gradients(run, case).items():
            assert (x == 0).all(), name
        case = subject.case(dtype=dtype, signed=signed)
        case.q.zero_()
        results = outputs_and_gradients(run, case)
        assert (results["out"] == 0).all()
        assert (results["dq"] == 0).all()
        assert all(x.isfinite().all() for x in results.values())


@pytest.mark.parametrize("form", ["run", "steps"])
@pytest.mark.parametrize("offset", [1e-4, -1e-4, 1e-8, 0.0])
def test_a_signed_denominator_near_zero_stays_bounded(subject, form, offset):
    """The output stays bounded by the values if the weights of two keys cancel to within 1e-4."""
    run = getattr(subject, form)
    for dtype in subject.supported(*DTYPES):
        q = torch.ones(1, 1, 2, 1, dtype=dtype)
        k = torch.tensor([1.0, -1.0 + offset], dtype=dtype).view(1, 1, 2, 1)
        v = torch.tensor([[1.0, 300.0], [-1.0, -300.0]], dtype=dtype).view(1, 1, 2, 2)
        case = Case(q, k, v, None, None, None, None, True, True).to(subject.device)
        results = outputs_and_gradients(run, case)
        assert all(x.isfinite().all() for x in results.values())
        assert results["out"].abs().max() <= 300 / SIGNED_FLOOR * 1.01
        assert ops.attention_weights(case.q, case.k, signed=True).bounded.flatten().tolist() == [False, True]


def test_signed_features_in_half_precision_are_finite_and_bounded(subject):
    def bounded(case):
        out, state = subject.run(case.q, case.k, case.v, **case.options)
        assert out.isfinite().all()
        assert state.s.isfinite().all()
        if out.numel() and case.v.numel():
            assert out.abs().max() <= case.v.abs().max() / SIGNED_FLOOR * 1.01

    subject.check(subject.cases(torch.bfloat16, torch.float16, signed=True, state=False), bounded)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e3, 6e4])
@pytest.mark.parametrize("form", ["run", "steps"])
def test_extreme_float16_features_stay_finite(subject, form, scale):
    case = subject.case(time=30, dtype=torch.float64 if subject.backend != "triton" else torch.float32, decay=True)
    q, k = (case.q * scale).clamp(max=6e4).half(), (case.k * scale).clamp(max=6e4).half()
    for decay in (None, case.decay.float()):
        out, state = getattr(subject, form)(q, k, case.v.half(), decay=decay)
        assert out.isfinite().all()
        assert state.s.isfinite().all()


@pytest.mark.parametrize("causal", [True, False])
def test_an_empty_sequence_leaves_the_state_alone(subject, causal):
    case = subject.case(time=3, state=True)
    q = case.q if not causal else case.q[:, :, :0]
    out, state = subject.run(q, case.k[:, :, :0], case.v[:, :, :0], state=case.state, causal=causal)
    assert out.shape == (*q.shape[:3], case.v.shape[-1])
    assert torch.equal(state.s, case.state.s)
    if not causal:
        assert torch.allclose(out, ops.look(q, case.state, out.dtype), rtol=1e-4, atol=1e-5)


def test_the_fastest_decay_over_many_blocks(subject):
    """Powers of the decay range from exp(64) to zero without overflow or additional rounding error."""
    time = 150 if subject.interpreted else 600
    arguments = {"time": time, "state": True, "mask": "holes"}
    case = make_case(dtype=torch.float32, **arguments)
    case.decay = torch.tensor([[0.0, 1e-4, 0.5, 1.0], [1.0, 1.0, 1.0, 1.0]])
    expected = outputs_and_gradients(reference_recurrent, case.exact)
    assert_same(outputs_and_gradients(subject.run, case.to(subject.device)), expected, 5e-3)


def reference_recurrent(q, k, v, **options):
    return ops.linear_attention(q, k, v, backend="recurrent", **options)


def test_rates_are_bounded(subject):
    case = subject.case(decay=True)
    wild = torch.tensor([[-1.0, 0.2, 3.0, 100.0]] * 2, dtype=case.decay.dtype, device=subject.device)
    tame = wild.clamp(0, ops.FASTEST_DECAY)
    a, b = (subject.run(case.q, case.k, case.v, decay=d)[0] for d in (wild, tame))
    assert torch.equal(a, b)
    a, b = (subject.steps(case.q, case.k, case.v, decay=d)[0] for d in (wild, tame))
    assert torch.equal(a, b)


def test_decay_rates_of_zero_change_nothing(subject):
    case = subject.case(time=40 if subject.interpreted else 300, state=True)
    rates = torch.zeros(2, 4, dtype=case.state.s.dtype, device=subject.device)
    a, b = (subject.run(case.q, case.k, case.v, state=case.state, decay=d)[0] for d in (None, rates))
    assert torch.allclose(a.double(), b.double(), atol=1e-12 if a.dtype == torch.float64 else 1e-4)


def test_memory_that_is_not_contiguous(subject):
    """Projections return transposed views, and expanded tensors have strides of zero."""
    case = subject.case(time=40, state=True)
    expected = outputs_and_gradients(subject.run, case)

    def transposed(q, k, v, **options):
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        return subject.run(q, k, v, **options)

    assert_same(outputs_and_gradients(transposed, case), expected, case.tolerance)
    value = case.v[:, :1].expand_as(case.v)
    a, _ = subject.run(case.q, case.k, value)
    b, _ = subject.run(case.q, case.k, value.contiguous())
    assert torch.equal(a, b)

    def summed(out):
        (gradient,) = torch.autograd.grad(out.sum(), [v])  # the gradient of a sum is an expanded tensor
        return gradient

    v = case.v.clone().requires_grad_()
    a, b = (summed(run(case.q, case.k, v)[0]) for run in (subject.run, quadratic))
    assert_same({"dv": a}, {"dv": b}, case.tolerance)


def test_every_element_of_every_result_is_written(subject, monkeypatch):
    """torch.empty is patched to return NaN, so that elements a kernel does not write are NaN."""
    if torch.cuda.is_available() and subject.device == "cuda":
        torch.cuda.empty_cache()
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        probe = torch.empty(4, device=subject.device)
        assert probe.isnan().all()  # the patch works
        for causal, time in ((True, 1), (True, 41), (False, 7)):
            case = subject.case(
                time=time, keys=19, mask="right", starts=True, decay=True, state=True, causal=causal, signed=True
            )
            for normalized in (True, False):
                results = outputs_and_gradients(subject.run, case, normalized=normalized)
                assert all(x.isfinite().all() for x in results.values()), (causal, time, normalized)
    finally:
        torch.use_deterministic_algorithms(False)


def test_gradient_checkpointing_changes_nothing(subject):
    def checkpointed(*args, **options):
        return torch.utils.checkpoint.checkpoint(subject.run, *args, use_reentrant=False, **options)

    case = subject.case(state=True)
    assert_same(outputs_and_gradients(checkpointed, case), outputs_and_gradients(subject.run, case), case.tolerance)


def test_absorb_gives_the_state_of_attention(subject):
    def agrees(case):
        _, expected = subject.run(case.q, case.k, case.v, state=case.state, **case.options)
        state = ops.absorb(case.state, case.k, case.v, mask=case.mask, decay=case.decay)
        assert_same({"s": state.s, "z": state.z}, {"s": expected.s, "z": expected.z}, case.tolerance)

    subject.check(subject.cases(causal=True, starts=False, state=True), agrees)


def test_a_step_in_place_compiles_to_one_graph(subject):
    """It uses no `bool(tensor)`, no `.item()` and no value-dependent shape, and updates the given state."""
    dtype = subject.supported(torch.float32)[0]
    case = subject.case(time=1, state=True, signed=True, decay=True, dtype=dtype, mask=torch.tensor([[True], [False]]))
    state = case.state.map(torch.clone)

    def run(q, k, v, mask, decay):
        out, _ = ops.step(q, k, v, state, mask=mask, decay=decay, signed=True, inplace=True, backend=subject.backend)
        return out, ops.look(q, state, v.dtype, backend=subject.backend)

    with torch.no_grad():
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        actual = compiled(case.q, case.k, case.v, case.mask, case.decay)
        after, state = state, case.state.map(torch.clone)
        expected = run(case.q, case.k, case.v, case.mask, case.decay)
    for a, b in zip((*actual, *after), (*expected, *state), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)
    assert not torch.equal(after.s, case.state.s)


@pytest.mark.parametrize(("causal", "decay"), [(True, False), (True, True), (False, False)])
def test_the_sequence_compiles_to_one_graph(subject, causal, decay):
    if subject.backend == "recurrent":
        pytest.skip("its Python loop over the sequence would be unrolled")
    torch._dynamo.reset()  # it would count the graphs of other backends and devices, and refuse the ninth
    time = 40 if subject.interpreted else 100
    case = subject.case(time=time, dtype=torch.float32, mask="left", state=True, causal=causal, decay=decay)

    def run(q, k, v, s, z):
        out, state = subject.run(q, k, v, state=State(s, z), **case.options)
        return out.sum() + state.s.sum()

    inputs = [x.clone().requires_grad_() for x in (case.q, case.k, case.v, *case.state[:2])]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(run(*inputs), inputs)
    actual = torch.autograd.grad(compiled(*inputs), inputs)
    for a, b in zip(actual, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_decode_step_is_captured_as_a_graph(subject):
    """A captured step reads and writes the same memory at every replay."""
    if subject.device != "cuda":
        pytest.skip("CUDA graphs require a CUDA device")
    case = subject.case(time=1, state=True, decay=True, dtype=torch.float32)
    state, eager = case.state.map(torch.clone), case.state.map(torch.clone)
    how = {"decay": case.decay, "inplace": True, "backend": subject.backend}
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            ops.step(case.q, case.k, case.v, case.state.map(torch.clone), **how)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, _ = ops.step(case.q, case.k, case.v, state, **how)
        for _ in range(3):
            graph.replay()
            expected, _ = ops.step(case.q, case.k, case.v, eager, **how)
            torch.cuda.synchronize()
            assert torch.allclose(out, expected, rtol=1e-5, atol=1e-6)
            assert torch.allclose(state.s, eager.s, rtol=1e-5, atol=1e-6)


def test_the_two_references_agree():
    """The quadratic and the recurrent reference, written independently, agree to float64 rounding."""

    @settings(max_examples=100)
    @given(cases())
    def agree(case):
        a, b = (outputs_and_gradients(run, case) for run in (quadratic, reference_recurrent))
        assert_same(b, a, case.tolerance)

    agree()
    assert reference.quadratic is not reference.recurrent
