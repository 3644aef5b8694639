"""Windows with soft edges: their values, and the gradient of their sizes."""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from t2r.errors import T2RError
from t2r.ops import Windows, soft_window_attention, soft_windows, window_attention
from t2r.ops.soft_windows import EDGE, REACH


def inputs(time=9, heads=4, key_heads=2):
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, 3), (key_heads, 3), (key_heads, 5))
    return [torch.randn(2, n, time, size, generator=generator, dtype=torch.float64) for n, size in shapes]


WAYS = ["by head", "all heads"]


@contextmanager
def computing(way, size=None):
    """Compute in one way, with blocks of some size: queries of a head, or scores of all heads."""
    with pytest.MonkeyPatch.context() as patch:
        if way == "all heads":
            patch.delitem(soft_windows.BLOCK, "cpu")
            patch.setattr(soft_windows, "LEAST", 2)
            patch.setattr(soft_windows, "AT_ONCE", size or soft_windows.AT_ONCE)
        elif size:
            patch.setitem(soft_windows.BLOCK, "cpu", size)
        yield


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.floats(1.0, 20.0), min_size=2, max_size=2),
    st.integers(0, 3),
    st.none() | st.integers(1, 9),
    st.none() | st.just(2.0),
    st.sampled_from([(way, size) for way in WAYS for size in (2, 4, 300, None)]),
)
def test_values_are_weighted_by_distance(sizes, sinks, bound, softcap, how):
    q, k, v = inputs()
    windows = Windows(torch.tensor(sizes, dtype=torch.float64), sinks, bound)
    with computing(*how):
        out = soft_window_attention(q, k, v, windows, scaling=0.7, softcap=softcap)
    for h in range(4):
        for t in range(9):
            scores = 0.7 * k[:, h // 2, : t + 1] @ q[:, h, t, :, None]
            scores = scores if softcap is None else softcap * (scores / softcap).tanh()
            weights = []
            for s in range(t + 1):
                share = min(1.0, max(0.0, (1 - (t - s) / sizes[h // 2]) / EDGE + 0.5))
                weights.append(1.0 if s < sinks else share * (bound is None or t - s < bound))
            weights = torch.tensor(weights).double()[:, None] * scores.exp()
            expected = (weights * v[:, h // 2, : t + 1]).sum(1) / weights.sum(1)
            torch.testing.assert_close(out[:, h, t], expected)


@pytest.mark.parametrize("way", WAYS)
def test_long_windows_are_whole_attention(way):
    q, k, v = inputs()
    hard = window_attention(q, k, v, Windows(torch.tensor([9, 9])), scaling=1.0).numerator
    with computing(way):
        soft = soft_window_attention(q, k, v, Windows(torch.tensor([9 / REACH] * 2)), scaling=1.0)
    torch.testing.assert_close(soft, hard)


@pytest.mark.parametrize(
    ("way", "size", "bound"),
    [("by head", 2, None), ("by head", 256, 4), ("all heads", 40, 4), ("all heads", None, None)],
)
def test_sizes_have_a_gradient(way, size, bound):
    q, k, v = (x[:1, :, :5].requires_grad_() for x in inputs())
    sizes = torch.tensor([2.7, 4.1], dtype=torch.float64, requires_grad=True)

    def call(*given):
        return soft_window_attention(*given[:3], Windows(given[3], 1, bound), scaling=1.0)

    with computing(way, size):
        assert torch.autograd.gradcheck(call, (q, k, v, sizes), fast_mode=True)


def test_both_ways_agree_in_bfloat16():
    """The bias has few bits, and its gradient is summed with more."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 300, 16, generator=generator).bfloat16() for n in (6, 2, 2))
    found = []
    for way in WAYS:
        sizes = torch.tensor([41.3, 150.7], requires_grad=True)
        with computing(way):
            out = soft_window_attention(q, k, v, Windows(sizes, 4, 300), scaling=0.25)
        assert out.dtype == torch.bfloat16
        (slope,) = torch.autograd.grad((out.float() * v.repeat_interleave(3, 1).roll(1, 2)).sum(), sizes)
        assert slope.dtype == torch.float32
        found.append((out, slope))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0.02, atol=0.01)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0.03, atol=0)


def test_only_scores_at_once_are_limited():
    """Nothing of the size of all scores is formed, and the keys after a block of queries are not looked at."""
    q, k, v = inputs()
    seen = []
    with computing("all heads", 4 * 2 * 9 * 4), pytest.MonkeyPatch.context() as patch:
        real = soft_windows.biased
        patch.setattr(soft_windows, "biased", lambda *given: (
            seen.append((given[0].shape[2], given[1].shape[2])), real(*given))[1])  # fmt: skip
        soft_window_attention(q, k, v, Windows(torch.tensor([3.0, 5.0]).double()), scaling=1.0)
    assert seen == [(4, 4), (4, 8), (1, 9)]


def test_sizes_alone_may_have_a_gradient(monkeypatch):
    """The kernel of a GPU has one for the bias only if queries, keys or values have one too."""
    q, k, v = inputs()
    sizes = torch.tensor([2.7, 4.1], dtype=torch.float64, requires_grad=True)
    real, slopes, asked = soft_windows.scaled_dot_product_attention, [], []
    monkeypatch.setattr(soft_windows, "scaled_dot_product_attention", lambda q, *given, **how: (
        asked.append(q.requires_grad), real(q, *given, **how))[1])  # fmt: skip
    for way in WAYS:
        with computing(way):
            out = soft_window_attention(q, k, v, Windows(sizes, 1), scaling=1.0)
            slopes += torch.autograd.grad(out.pow(2).sum(), sizes)
    torch.testing.assert_close(*slopes)
    assert asked == [True, True]  # in the backward pass again
    with computing("all heads"), torch.no_grad():
        soft_window_attention(q, k, v, Windows(sizes, 1), scaling=1.0)
    assert asked == [True, True, False]


def test_sums_are_refused():
    """Other memories cannot add to the average alone."""
    q, k, v = inputs()
    with pytest.raises(T2RError, match="windows with soft edges have no sums"):
        window_attention(q, k, v, Windows(torch.ones(2)), scaling=1.0)
