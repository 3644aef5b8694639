"""Attention to windows, ring buffers, and the combination with a state, compared with the definition for a query."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from t2r import ops
from t2r.errors import T2RError
from t2r.ops import State, Sums, Windows, registry, windows
from t2r.ops.rings import How, Ring
from t2r.ops.stored import MOST, read, rounded, stored, token_bytes, whole_numbers
from t2r.ops.windows import Left, delayed, in_blocks

MISSING = registry.BACKENDS["triton"].missing()
SCALING = 0.4


TIMES = st.integers(1, 14)


@st.composite
def sequences(draw, times=TIMES):
    """Queries, keys and values of sequences with windows, and where their documents begin."""
    batch, key_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    time, dim = draw(times), draw(st.sampled_from([2, 5]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    q, k, v = (
        torch.randn(batch, heads, time, dim, generator=generator, dtype=torch.float64)
        for heads in (key_heads * group, key_heads, key_heads)
    )
    sizes = draw(st.lists(st.integers(0, time + 2), min_size=key_heads, max_size=key_heads))
    origin = None
    if draw(st.booleans()):
        starts = torch.rand(batch, time, generator=generator) > 0.7
        origin = torch.where(starts, torch.arange(time), 0).cummax(1).values
    return q, k, v, Windows(torch.tensor(sizes), draw(st.integers(0, 3))), origin


def seen_by(t: int, size: int, sinks: int, begin: int) -> list[int]:
    """Return the tokens that token t attends to: the definition."""
    return [j for j in range(begin, t + 1) if size and (t - j < size or j - begin < sinks)]


def defined(q, k, v, window, origin):
    """Compute averages and logarithms of sums, query by query."""
    group = q.shape[1] // k.shape[1]
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -math.inf, dtype=q.dtype)
    for b in range(q.shape[0]):
        for head in range(q.shape[1]):
            h = head // group
            for t in range(q.shape[2]):
                begin = 0 if origin is None else int(origin[b, t])
                places = seen_by(t, int(window.sizes[h]), window.sinks, begin)
                if places:
                    scores = k[b, h, places] @ q[b, head, t] * SCALING
                    out[b, head, t] = scores.softmax(0) @ v[b, h, places]
                    lse[b, head, t] = scores.logsumexp(0)
    return out, lse


def assert_near(actual, expected, tolerance=1e-10):
    finite = expected.isfinite()
    assert torch.equal(actual.isfinite(), finite)
    torch.testing.assert_close(actual[finite], expected[finite], rtol=0, atol=tolerance)


@settings(max_examples=60, deadline=None)
@given(sequences())
def test_window_attention(case):
    q, k, v, window, origin = case
    out, lse = defined(q, k, v, window, origin)
    sums = ops.window_attention(q, k, v, window, scaling=SCALING, origin=origin)
    assert_near(sums.numerator, out)
    assert_near(sums.peak, lse)
    assert bool((sums.denominator == 1).all())


@pytest.mark.parametrize("sinks", [0, 3])
def test_blocks(monkeypatch, sinks):
    """Long sequences are computed block by block."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 23, 4, dtype=torch.float64) for heads in (4, 2, 2))
    window = Windows(torch.tensor([5, 9]), sinks)
    whole = in_blocks(q, k, v, window, SCALING, None, 2.0)
    monkeypatch.setattr(windows, "BLOCK", 4)
    for actual, expected in zip(in_blocks(q, k, v, window, SCALING, None, 2.0), whole, strict=True):
        assert_near(actual, expected)


CASES = [((3, 40), 2, 8), ((0, 17), 3, 20), ((1, 5), 0, 16)]
"""Windows, sinks, and the size of keys."""
OFTEN = {(0, "whole"), (0, "packed"), (0, "continued"), (1, "continued"), (2, "packed")}
"""Every case and every kind of rows. The interpreter takes seconds for each, so that the others are slow."""


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize(
    ("sizes", "sinks", "dim", "rows"),
    [
        pytest.param(*case, rows, marks=() if (i, rows) in OFTEN else pytest.mark.slow)
        for rows in ("whole", "packed", "continued")
        for i, case in enumerate(CASES)
    ],
)
def test_triton(sizes, sinks, dim, rows):
    """The kernels give the values and gradients of the definition in PyTorch."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 37, dim, device=device, requires_grad=True) for heads in (4, 2, 2))
    window, origin = Windows(torch.tensor(sizes, device=device), sinks), None
    if rows == "packed":
        starts = torch.rand(2, 37, device=device) > 0.8
        origin = torch.where(starts, torch.arange(37, device=device), 0).cummax(1).values
    elif rows == "continued":
        origin = torch.tensor([-2, -40], device=device)[:, None].expand(-1, 37)
    results = []
    for backend in ("torch", "triton"):
        sums = ops.window_attention(q, k, v, window, scaling=SCALING, origin=origin, backend=backend)
        finite = sums.peak.isfinite()
        peak = sums.peak.masked_fill(~finite, 0)
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(x.shape, generator=generator).to(device) for x in (sums.numerator, peak)]
        loss = (sums.numerator * weights[0]).sum() + (peak * weights[1]).sum()
        results.append([sums.numerator, peak, finite, *torch.autograd.grad(loss, (q, k, v))])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(sequences())
def test_what_leaves_a_window(case):
    """Token t - size leaves at t, unless it is a sink or before the document. The gradient goes back to it."""
    _, k, v, window, origin = case
    k = k.requires_grad_()
    left = delayed(k, v, window, origin)
    for b in range(k.shape[0]):
        for h in range(k.shape[1]):
            size = int(window.sizes[h])
            for t in range(k.shape[2]):
                begin = 0 if origin is None else int(origin[b, t])
                gone = t - size - begin >= (window.sinks if size else 0)
                assert bool(left.valid.expand(k.shape[:3])[b, h, t]) == gone
                if gone:
                    assert torch.equal(left.k[b, h, t], k[b, h, t - size])
                    assert torch.equal(left.v[b, h, t], v[b, h, t - size])
    weight = torch.randn_like(left.k)
    (gradient,) = torch.autograd.grad((left.k * weight).sum(), k)
    expected = torch.zeros_like(k)
    for h in range(k.shape[1]):
        size = int(window.sizes[h])
        expected[:, h, : max(0, k.shape[2] - size)] = weight[:, h, size:]
    assert torch.equal(gradient, expected)


@settings(max_examples=60, deadline=None)
@given(sequences(times=st.integers(2, 16)), st.data(), st.sampled_from([8, 16]))
def test_a_ring_is_a_window(case, data, nbits):
    """However a sequence is divided into pieces and steps, a ring gives the sums of the whole sequence."""
    q, k, v, window, _ = case
    size = data.draw(st.integers(1, 9))
    window = Windows(torch.full_like(window.sizes, size), window.sinks)
    near_k, near_v = rounded(k, nbits), rounded(v, nbits)
    expected, expected_lse = defined(q, near_k, near_v, window, None)
    left = delayed(near_k, near_v, window)
    empty = torch.zeros(k.shape[0], k.shape[1], window.sinks + size, k.shape[3], dtype=k.dtype)
    ring, seen, how = (
        Ring(stored(empty, empty, nbits), size, window.sinks),
        torch.zeros(k.shape[0], dtype=torch.long),
        How(SCALING),
    )
    start = 0
    while start < q.shape[2]:
        end = min(q.shape[2], start + data.draw(st.integers(1, 6)))
        part = slice(start, end)
        if end - start == 1:
            new = stored(k[:, :, part], v[:, :, part], nbits)
            ring, sums, old, valid = ring.step(q[:, :, part], new, v.dtype, seen, None, how)
            gone = Left(*read(old, k.dtype), valid)
            parts = [sums]
        else:
            origin = -seen[:, None].expand(-1, end - start)
            new = q[:, :, part], near_k[:, :, part], near_v[:, :, part]
            parts = [ops.window_attention(*new, window, scaling=SCALING, origin=origin), ring.attend(new[0], seen, how)]
            gone = ring.leaving(*new[1:], seen)
            ring = ring.extended(k[:, :, part], v[:, :, part], seen, torch.full_like(seen, end - start), how)
        out = ops.combine(parts, q.dtype)
        assert_near(out, expected[:, :, part])
        assert_near(torch.stack([p.peak for p in parts]).logsumexp(0), expected_lse[:, :, part])
        assert torch.equal(gone.valid, left.valid[:, :, part].expand_as(gone.valid))
        for mine, theirs in ((gone.k, left.k), (gone.v, left.v)):
            assert torch.equal(mine[gone.valid], theirs[:, :, part][gone.valid])
        seen, start = seen + end - start, end


def test_padding_is_not_stored_in_a_ring():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 1, 1, 3, dtype=torch.float64) for _ in range(3))
    ring = Ring(tuple(torch.randn(2, 1, 5, 3, dtype=torch.float64) for _ in range(2)), 4, 1)
    seen = torch.tensor([3, 7])
    padded, sums, *_ = ring.step(q, (k, v), v.dtype, seen, torch.tensor([[True], [False]]), How(SCALING))
    assert torch.equal(padded.held[0][1], ring.held[0][1])
    assert not torch.equal(padded.held[0][0], ring.held[0][0])
    unchanged = ring.attend(q, torch.tensor([3, 7]) - torch.tensor([0, 1]), How(SCALING))
    assert sums.peak.shape == unchanged.peak.shape


def test_combining_parts():
    """Parts are added with their factors and divided once. A part without weight has no effect."""
    torch.manual_seed(0)
    shape = (2, 3, 4)
    num = [torch.randn(*shape, 5, dtype=torch.float64) for _ in range(3)]
    den = [torch.rand(shape, dtype=torch.float64) + 0.1 for _ in range(3)]
    peaks = [torch.randn(shape, dtype=torch.float64) * 3, None, torch.randn(shape, dtype=torch.float64) - 400]
    factors = [torch.ones(shape, dtype=torch.float64) if p is None else p.exp() for p in peaks]
    expected = sum(n * f[..., None] for n, f in zip(num, factors, strict=True))
    expected = expected / sum(d * f for d, f in zip(den, factors, strict=True))[..., None]
    parts = [Sums(n, d, peak=p) for n, d, p in zip(num, den, peaks, strict=True)]
    torch.testing.assert_close(ops.combine(parts, torch.float64), expected)
    nothing = Sums(torch.zeros(*shape, 5, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64))
    torch.testing.assert_close(ops.combine([*parts, nothing], torch.float64), expected)
    assert bool((ops.combine([nothing, nothing], torch.float64) == 0).all())
    far = Sums(num[0], den[0], peak=torch.full(shape, 1e4, dtype=torch.float64))  # no overflow
    assert ops.combine([parts[1], far], torch.float64).isfinite().all()


def test_gradients_of_a_combination_are_finite():
    """Heads without a window, and states without tokens, give no NaN."""
    q, k, v = (torch.randn(1, 2, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    window = Windows(torch.tensor([0, 3]), 1)
    near = ops.window_attention(q, k, v, window, scaling=SCALING)
    left = delayed(k, v, window)
    phi_k = left.k.exp().masked_fill(~left.valid[..., None], 0)
    far, _ = ops.linear_attention(q.exp(), phi_k, left.v, normalized=False)
    gradients = torch.autograd.grad(ops.combine([near, far], v.dtype).square().sum(), (q, k, v))
    assert all(x.isfinite().all() for x in gradients)


def test_a_step_may_return_sums():
    torch.manual_seed(0)
    q, k, v = torch.rand(2, 4, 1, 3), torch.rand(2, 2, 1, 3), torch.randn(2, 2, 1, 5)
    state = State.zeros(k, v).map(lambda x: x + torch.rand(x.shape))
    out, _ = ops.step(q, k, v, state)
    for inplace in (False, True):
        with torch.no_grad():
            sums, _ = ops.step(q, k, v, state.map(torch.clone), normalized=False, inplace=inplace)
        torch.testing.assert_close(ops.normalize(sums, v.dtype), out)
    with pytest.raises(T2RError, match="signed"):
        ops.step(q, k, v, State.zeros(k, v, True), signed=True, normalized=False)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.floats(-9, 9), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_eight_bits(dim, exponent, dtype):
    """A number is off by at most half of a step, a 127th of the largest."""
    torch.manual_seed(dim)
    x = (torch.randn(3, 2, 5, dim) * 2.0**exponent).to(dtype)
    numbers, scale = whole_numbers(x)
    found = numbers.float() * scale.float()
    step = x.float().abs().amax(-1, keepdim=True) / MOST
    # A scale has a relative error of 2**-11, below 2**-14 an error of 2**-25. The largest number has 127 times that.
    assert bool(((found - x.float()).abs() <= 0.57 * step + MOST * 2.0**-25).all())
    k, v = read(stored(x, 2 * x, 8), dtype)
    assert torch.equal(k, rounded(x, 8))
    assert torch.equal(v, rounded(2 * x, 8))
    assert sum(part.nbytes for part in stored(x, x, 8)) == 3 * 2 * 5 * token_bytes(dim, dim, 8)


def test_zeros_in_eight_bits_and_gradients():
    assert torch.equal(rounded(torch.zeros(2, 3), 8), torch.zeros(2, 3))
    x = torch.randn(4, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad((rounded(x, 8) * torch.arange(12.0).view(4, 3)).sum(), x)
    assert torch.equal(gradient, torch.arange(12.0).view(4, 3))
    assert rounded(x, 16) is x
