"""Windows with soft edges: their values, and the gradient of their sizes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from t2r.errors import T2RError
from t2r.ops import Windows, soft_windows, window_attention
from t2r.ops.soft_windows import EDGE, REACH


def inputs(time=9, heads=4, key_heads=2):
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, 3), (key_heads, 3), (key_heads, 5))
    return [torch.randn(2, n, time, size, generator=generator, dtype=torch.float64) for n, size in shapes]


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.floats(1.0, 20.0), min_size=2, max_size=2),
    st.integers(0, 3),
    st.none() | st.integers(1, 9),
    st.none() | st.just(2.0),
    st.sampled_from([2, 4, 256]),
)
def test_values_are_weighted_by_distance(sizes, sinks, bound, softcap, block):
    q, k, v = inputs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(soft_windows.BLOCK, "cpu", block)
        check_values(q, k, v, sizes, sinks, bound, softcap)


def check_values(q, k, v, sizes, sinks, bound, softcap):
    sums = window_attention(q, k, v, Windows(torch.tensor(sizes).double(), sinks, bound), scaling=0.7, softcap=softcap)
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
            torch.testing.assert_close(sums.numerator[:, h, t], expected)
            torch.testing.assert_close(sums.peak[:, h, t], weights.sum((1, 2)).log())


def test_long_windows_are_whole_attention():
    q, k, v = inputs()
    soft, hard = (
        window_attention(q, k, v, Windows(torch.tensor([size] * 2)), scaling=1.0).numerator for size in (9 / REACH, 9)
    )
    torch.testing.assert_close(soft, hard)


@pytest.mark.parametrize("block", [2, 256])
def test_sizes_have_a_gradient(block, monkeypatch):
    monkeypatch.setitem(soft_windows.BLOCK, "cpu", block)
    q, k, v = (x[:1, :, :6].requires_grad_() for x in inputs())
    sizes = torch.tensor([2.7, 4.1], dtype=torch.float64, requires_grad=True)

    def call(*given):
        sums = window_attention(*given[:3], Windows(given[3], 1), scaling=1.0)
        return sums.numerator, sums.peak

    assert torch.autograd.gradcheck(call, (q, k, v, sizes))


def test_padding_is_refused():
    q, k, v = inputs()
    origin = torch.zeros(2, 9, dtype=torch.long)
    with pytest.raises(T2RError, match="without padding"):
        window_attention(q, k, v, Windows(torch.ones(2)), scaling=1.0, origin=origin)
