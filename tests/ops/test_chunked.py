"""The result does not depend on the chunk size or on how many chunks run at once, and memory is linear in length."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ops.cases import assert_same, cases, make_case, outputs_and_gradients
from t2r import ops
from t2r.ops import State, chunked, common
from t2r.ops.common import safe_denominator


def quadratic(q, k, v, **options):
    return ops.linear_attention(q, k, v, backend="quadratic", **options)


@settings(max_examples=150)
@given(cases(), st.integers(1, 8), st.integers(1, 5), st.booleans())
def test_chunks_of_any_size_agree_with_the_quadratic_form(case, chunk_size, at_once, normalized):
    expected = outputs_and_gradients(quadratic, case, normalized=normalized)
    options = {"chunk_size": chunk_size, "chunks_at_once": at_once, "normalized": normalized}
    if case.k.shape[2]:
        assert_same(outputs_and_gradients(chunked.linear_attention, case, **options), expected, case.tolerance)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("mask", [None, "holes"])
@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("normalized", [True, False])
def test_gradcheck(signed, starts, mask, decay, at_once, normalized):
    case = make_case(time=6, feature=3, value=2, signed=signed, starts=starts, mask=mask, state=True)
    rates = torch.linspace(0, 1, 6, dtype=torch.float64).view(2, 3)
    # Finite differences fail at kinks: keep relu features away from zero, and signed ones away from the bound.
    q, k = (case.q + 4, case.k + 4) if signed else (case.q + 0.1, case.k + 0.1)
    if case.mask is not None:
        case.mask[:, 0] = True
        case.mask |= case.starts if case.starts is not None else False
    sums, _ = chunked.linear_attention(q, k, case.v, state=case.state, normalized=False, **case.options)
    assert not safe_denominator(sums.denominator, sums.magnitude).bounded.any()
    inputs = [x.clone().requires_grad_() for x in (q, k, case.v, case.state.s, case.state.z)]
    inputs += [rates.requires_grad_()] if decay else []

    def run(q, k, v, s, z, rates=None):
        options = {**case.options, "decay": rates, "chunk_size": 6 // (at_once + 1), "chunks_at_once": at_once}
        state = State(s, z, case.state.z_abs)
        out, new = chunked.linear_attention(q, k, v, state=state, normalized=normalized, **options)
        return *((out,) if normalized else out[:2]), new.s, new.z

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def in_turn(*args, **options):
    """Compute one chunk at a time, as a CPU does with large batches."""
    return chunked.linear_attention(*args, **options, chunks_at_once=1)


def at_once(*args, **options):
    """Compute several chunks at once, as on an accelerator."""
    return chunked.linear_attention(*args, **options, chunks_at_once=chunked.MANY_CHUNKS)


def test_the_fastest_decay_over_many_chunks_at_once():
    case = make_case(time=600, dtype=torch.float32, state=True, mask="holes")
    case.decay = torch.tensor([[0.0, 1e-4, 0.5, 1.0], [1.0, 1.0, 1.0, 1.0]])
    expected = outputs_and_gradients(in_turn, case.exact)
    assert_same(outputs_and_gradients(at_once, case), expected, 5e-3)


class LargestTensor(TorchDispatchMode):
    """Record the largest number of elements in the result of any operation."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.untyped_storage().size() // x.element_size())
        return result


@pytest.mark.parametrize("decay", [None, torch.full((1, 16), 0.1)])
@pytest.mark.parametrize("run", [in_turn, at_once], ids=lambda run: run.__name__)
def test_chunked_forms_neither_t_by_t_nor_t_by_k_by_d(decay, run):
    time, feature, value = 4096, 16, 32
    q, k = (torch.rand(1, 1, time, feature, requires_grad=True) for _ in "qk")
    v = torch.rand(1, 1, time, value, requires_grad=True)
    with LargestTensor() as seen:
        out, _ = run(q, k, v, decay=decay)
        out.sum().backward()
    weights = (1 if run is in_turn else chunked.MANY_CHUNKS) * chunked.CHUNK_SIZE**2
    assert seen.largest <= max(time * max(feature, value), weights)  # `weights` does not depend on time
    assert max(time * value, weights) < min(time * time, time * feature * value)


def test_a_cpu_computes_small_chunks_as_one_batch():
    """As many as its cache holds; a large batch one chunk at a time."""
    q, v = torch.empty(1, 32, 512, 32, device="meta"), torch.empty(1, 32, 512, 8, device="meta")
    assert chunked.as_one_batch(q, v, 128) == chunked.MANY_CHUNKS  # any other device
    q, v = torch.empty(1, 32, 512, 32), torch.empty(1, 32, 512, 8)
    assert chunked.as_one_batch(q, v, 128) == 5
    assert chunked.as_one_batch(q.expand(8, -1, -1, -1), v, 128) == 1
    assert chunked.as_one_batch(q[:, :1, :0], v, 128) == chunked.MANY_CHUNKS


class Products(TorchDispatchMode):
    """Notes whether the second factor of each batched product is transposed."""

    def __init__(self):
        super().__init__()
        self.transposed = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.bmm.default:
            self.transposed.append(args[1].stride(-1) != 1)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("decay", [False, True])
def test_no_second_factor_is_transposed_on_arm(monkeypatch, signed, decay):
    """Such products are slow there."""
    monkeypatch.setattr(common, "ON_ARM", True)
    case = make_case(time=20, feature=3, value=2, signed=signed, state=True, decay=decay)
    with Products() as products:
        outputs_and_gradients(chunked.linear_attention, case, chunk_size=4, chunks_at_once=2)
    assert len(products.transposed) > 8
    assert not any(products.transposed)
