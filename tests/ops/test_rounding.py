"""Tests of states in half precision that are rounded at random."""

from __future__ import annotations

import pytest
import torch

from t2r import ops
from t2r.errors import T2RError
from t2r.feature_maps import make_feature_map
from t2r.ops import Draws, registry
from t2r.ops.rounding import random_bits, rounded, rounded_by

MISSING = registry.BACKENDS["triton"].missing()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
BACKENDS = ["chunked", pytest.param("triton", marks=needs_triton)]
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])

NUMBERS = torch.tensor([1.0, 1.2345, -77.7, 1e-3, 6.1e-5, -6.1e-5, 3.3e-7, -2e-8, 65000.0, 0.0])
"""Those from 6.1e-5 on have fewer bits in float16."""


def counts(*numbers):
    return torch.tensor(numbers, device=DEVICE)


def draws_of(count, seed=3):
    return Draws(torch.arange(count), seed)


def state_of(x):
    """Return a state of one row for each of `x`, whose numbers are all the same."""
    s = x[:, None, None, None].expand(-1, 2, 3, 4)
    return ops.State(s, s[..., 0])


@dtypes
def test_the_expected_value_is_exact(dtype):
    """4,096 tokens and 30 places: the mean of so many draws is within 5 of its standard deviations."""
    for x in NUMBERS.tolist():
        found = rounded(state_of(torch.full((4096,), x)), dtype, draws_of(4096))
        drawn = torch.cat([y.flatten().double() for y in found[:2]])
        low, high = drawn.min(), drawn.max()
        assert low <= torch.tensor(x) <= high
        assert ((drawn == low) | (drawn == high)).all()
        middle = (low + (high - low) / 2).to(dtype).double()
        assert middle in (low, high)  # they are neighbors
        assert abs(drawn.mean() - torch.tensor(x).double()) <= 5 * (high - low) / 2 / len(drawn) ** 0.5


@dtypes
def test_what_the_dtype_has_does_not_change(dtype):
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    x = bits.view(dtype)  # all numbers, with infinities and NaN
    for noise in (0, -1, 123456789):
        found = rounded_by(x.float(), dtype, torch.full(x.shape, noise, dtype=torch.int32))
        torch.testing.assert_close(found, x, rtol=0, atol=0, equal_nan=True)
    nan = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # CUDA's
    assert rounded_by(nan, dtype, torch.full(nan.shape, -1, dtype=torch.int32)).isnan().all()


def test_random_numbers_depend_on_count_layer_and_place_only():
    shape = state_of(torch.zeros(512))
    first, other = (torch.cat([x.flatten(1) for x in random_bits(draws_of(512, n), shape)[:2]], 1) for n in (0, 1))
    assert first.unique().numel() > 0.999 * first.numel()  # all rows and places
    for x, y in ((first, other), (first[1:], first[:-1]), (first[:, 1:], first[:, :-1])):
        both = torch.stack([x.flatten(), y.flatten()]).double()
        assert abs(torch.corrcoef(both)[0, 1]) < 5 / both.shape[1] ** 0.5
    batch = random_bits(Draws(torch.tensor([7, 400]), 0), state_of(torch.zeros(2)))
    assert torch.equal(torch.cat([x[1].flatten() for x in batch[:2]]), first[400])


@dtypes
@pytest.mark.parametrize(("key", "rate"), [(0.2, 0.0), (0.0, 1 / 5000)], ids=["grows", "decays"])
@torch.no_grad()
def test_long_sums_neither_stop_growing_nor_decaying(dtype, key, rate):
    """200 tokens change sums by 4 %. The standard deviation of the mean of 256 of them is 0.1 %."""
    k, v = torch.full((1, 1, 1, 16), key, device=DEVICE), torch.ones(1, 1, 1, 16, device=DEVICE)
    decay, start, means = torch.full((1, 16), rate, device=DEVICE), 950.0, []
    for draws in (Draws(counts(5), 2), None):
        state = ops.State.zeros(k, v).map(lambda x: (x + start).to(dtype))
        for _ in range(200):
            ops.step(k, k, v, state, decay=decay, inplace=True, draws=draws, backend="chunked")
            draws = None if draws is None else Draws(draws.counts + 1, 2)
        means.append(float(state.s.float().mean()))
    change = 200 * (key - start * rate)
    assert means[0] == pytest.approx(start + change, abs=0.15 * abs(change))
    assert means[1] == pytest.approx(start, abs=2.0)  # the nearest number of bfloat16 is 2 away


@needs_triton
@pytest.mark.parametrize(("dtype", "signed"), [(torch.bfloat16, True), (torch.float16, False)])
@torch.no_grad()
def test_the_kernel_draws_the_same_numbers(dtype, signed):
    """Inputs are multiples of 2^-12, so that their sums and products are exact. Rows differ in their counts, one is
    masked, and values need two blocks of columns."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return (torch.randint(-999 if signed else 0, 999, shape, generator=generator) * 2.0**-12).to(DEVICE)

    q, k, v = numbers(3, 2, 1, 130), numbers(3, 2, 1, 130), numbers(3, 2, 1, 70)
    state = ops.State.zeros(k, v, signed).map(lambda x: numbers(*x.shape).to(dtype))
    mask = torch.tensor([[True], [False], [True]], device=DEVICE)
    draws, after = Draws(counts(11, 12, 2**33 + 5), 4), {}
    for backend in ("chunked", "triton"):
        own = after[backend] = state.map(torch.clone)
        ops.step(q, k, v, own, mask=mask, signed=signed, inplace=True, draws=draws, backend=backend)
    for x, y, before in zip(*after.values(), state, strict=True):
        if x is not None:
            assert torch.equal(x, y)
            assert torch.equal(x[1], before[1])
            assert not torch.equal(x[0], before[0])
    other = state.map(torch.clone)
    ops.step(q, k, v, other, mask=mask, signed=signed, inplace=True, draws=draws._replace(seed=5), backend="triton")
    assert not torch.equal(other.s, after["triton"].s)


@needs_triton
@dtypes
@torch.no_grad()
def test_the_kernel_draws_when_it_computes_features_and_with_slots(dtype):
    given = {"head_dim": 6, "num_heads": 4, "num_key_value_heads": 2, "feature_size": 16, "activation": "softmax"}
    made = make_feature_map("t2r", decay=True, key_weights=True, **given).to(DEVICE).requires_grad_(False)
    q, k, v = (torch.randn(2, heads, 1, 6, device=DEVICE) for heads in (4, 2, 2))
    pages = made.rule().empty(5, 6, torch.float32, DEVICE).map(lambda x: (x + 1.7).to(dtype))
    slots, draws = ops.Slots(counts(3, 1), torch.tensor([False, False], device=DEVICE)), Draws(counts(20, 30), 1)
    own, rows = pages.map(torch.clone), pages.map(lambda x: x[[3, 1]].clone())
    how = {"inplace": True, "features": made.step_features(0.4), "decay": made.decay, "backend": "triton"}
    out, _ = ops.step(q, k, v, own, slots=slots, draws=draws, **how)
    expected, _ = ops.step(*made(q * 0.4, k), v, rows, decay=made.decay, inplace=True, draws=draws, backend="chunked")
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    for x, y in zip(own[:2], rows[:2], strict=True):  # sums may differ in the last bit of float32
        assert (x[[3, 1]] == y).double().mean() > 0.99
        torch.testing.assert_close(x[[3, 1]].float(), y.float(), rtol=2.0**-7, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_a_state_in_float32_is_not_rounded(backend):
    k = torch.rand(1, 1, 1, 4, device=DEVICE)
    with pytest.raises(T2RError, match="draws requires a state in half precision"):
        ops.step(k, k, k, ops.State.zeros(k, k), inplace=True, draws=Draws(counts(0), 0), backend=backend)
