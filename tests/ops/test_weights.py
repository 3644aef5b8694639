"""Attention weights are those with which linear attention averages the values."""

import pytest
import torch

from t2r import ops


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("decay", [False, True])
def test_weights_average_the_values(decay, signed):
    q, k = torch.randn(2, 4, 70, 6, dtype=torch.double), torch.randn(2, 2, 70, 6, dtype=torch.double)
    q, k = (q, k) if signed else (q.relu() + 0.1, k.relu())
    v = torch.randn(2, 2, 70, 5, dtype=torch.double)
    mask, starts = torch.rand(2, 70) > 0.2, torch.rand(2, 70) > 0.95
    rates = torch.rand(2, 6, dtype=torch.double) if decay else None
    for options in ({}, {"mask": mask}, {"mask": mask, "starts": starts}, {"causal": False, "mask": mask}):
        if decay and "causal" in options:
            continue
        how = options | {"decay": rates, "signed": signed}
        expected, _ = ops.linear_attention(q, k, v, **how, backend="quadratic")
        weights, bounded = ops.attention_weights(q, k, **how)
        torch.testing.assert_close(weights @ v.repeat_interleave(2, dim=1), expected)
        torch.testing.assert_close(weights.sum(-1)[~bounded], torch.ones_like(weights.sum(-1)[~bounded]))
        if "starts" not in options and not signed:
            assert not bounded[:, :, 40:].any()
        later = ops.attention_weights(q, k, **how, first=33)
        torch.testing.assert_close(later.weights, weights[:, :, 33:])


def test_fast_decay_does_not_overflow():
    q = k = torch.ones(1, 1, 2000, 1)
    weights = ops.attention_weights(q, k, decay=torch.ones(1, 1)).weights
    assert weights.isfinite().all()
    assert weights[0, 0, -1, -1] == pytest.approx(1 - torch.tensor(-1.0).exp().item(), rel=1e-5)


def test_queries_without_features_have_no_weights_and_are_counted():
    q, k = torch.zeros(1, 1, 3, 2), torch.ones(1, 1, 3, 2)
    weights, bounded = ops.attention_weights(q, k)
    assert not weights.any()
    assert bounded.all()
