"""A step on states that lie among those of other sequences, as in the pages of an engine's cache."""

from __future__ import annotations

import pytest
import torch

from t2r import ops
from t2r.errors import T2RError
from t2r.feature_maps import make_feature_map
from t2r.ops import registry

MISSING = registry.BACKENDS["triton"].missing()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
BACKENDS = ["chunked", pytest.param("triton", marks=needs_triton)]

PLACES, NEW = [4, 0, 2], [False, True, False]


def pages(like: ops.State, count: int = 6) -> ops.State:
    """Return states in pages that have more room than they need, with numbers that must not be read everywhere."""

    def paged(x: torch.Tensor) -> torch.Tensor:
        room = torch.full((count, x[0].numel() + 8), torch.nan, device=x.device)
        return room[:, : x[0].numel()].unflatten(1, x.shape[1:])

    return like.map(paged)


def check(own: ops.State, before: ops.State, after: ops.State, out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    for paged, old, new in zip(own, before, after, strict=True):
        if paged is not None:
            torch.testing.assert_close(paged[PLACES], new, atol=1e-5, rtol=1e-5)
            others = [i for i in range(paged.shape[0]) if i not in PLACES]
            torch.testing.assert_close(paged[others], old[others], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
@torch.no_grad()
def test_a_step_changes_the_states_at_its_places_only(backend, signed, index_type):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.rand(3, heads, 1, size, generator=generator).to(DEVICE) for heads, size in ((4, 6), (2, 6), (2, 9))
    )
    decay = torch.rand(2, 6, generator=generator).to(DEVICE)
    mask = torch.tensor([[True], [True], [False]], device=DEVICE)
    state = ops.State.zeros(k, v, signed).map(lambda x: x + torch.rand(x.shape, generator=generator).to(DEVICE))
    state = state.map(lambda x: x.masked_fill(torch.tensor(NEW, device=DEVICE).view(-1, *[1] * (x.dim() - 1)), 0))
    own = pages(state)
    for paged, x in zip(own, state, strict=True):
        if paged is not None:
            paged[[4, 2]] = x[[0, 2]]
    before = own.map(torch.clone)
    how = {"decay": decay, "mask": mask, "signed": signed}
    expected, after = ops.step(q, k, v, state, backend="recurrent", **how)
    slots = ops.Slots(torch.tensor(PLACES, dtype=index_type, device=DEVICE), torch.tensor(NEW, device=DEVICE))
    out, same = ops.step(q, k, v, own, inplace=True, slots=slots, backend=backend, **how)
    assert same is own
    check(own, before, after, out, expected)


@needs_triton
@torch.no_grad()
def test_the_kernel_computes_features_too():
    given = {"head_dim": 6, "num_heads": 4, "num_key_value_heads": 2, "feature_size": 16, "activation": "softmax"}
    made = make_feature_map("t2r", **given).to(DEVICE).requires_grad_(False)
    q, k, v = (torch.randn(3, heads, 1, 6, device=DEVICE) for heads in (4, 2, 2))
    state = made.rule().empty(3, 6, torch.float32, DEVICE)
    own = pages(state)
    for paged in own[:2]:
        paged[[4, 2]] = 1
    state.s[[0, 2]], state.z[[0, 2]] = 1, 1
    before = own.map(torch.clone)
    expected, after = ops.step(*made(q * 0.4, k), v, state, backend="recurrent")
    slots = ops.Slots(torch.tensor(PLACES, device=DEVICE), torch.tensor(NEW, device=DEVICE))
    how = {"inplace": True, "slots": slots, "features": made.step_features(0.4), "backend": "triton"}
    out, _ = ops.step(q, k, v, own, **how)
    check(own, before, after, out, expected)


def test_slots_without_inplace_are_refused():
    q = torch.rand(1, 1, 1, 4)
    slots = ops.Slots(torch.tensor([0]), torch.tensor([False]))
    with pytest.raises(T2RError, match="requires inplace=True"):
        ops.step(q, q, q, ops.State.zeros(q, q), slots=slots)
