"""Backends are called only with what they declare to support, and invalid arguments raise clear errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.cases import make_case
from t2r import ops
from t2r.errors import T2RError
from t2r.ops import State, registry
from t2r.ops.contract import OPERATIONS, Abilities, Request
from t2r.ops.torch_backends import Chunked


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "cuda"}, "unknown backend 'cuda'"),
        ({"mask": torch.ones(2, 9)}, "must be boolean"),
        ({"mask": torch.ones(2, 8, dtype=torch.bool)}, r"mask has shape \(2, 8\)"),
        ({"starts": torch.ones(2, 9, dtype=torch.bool), "causal": False}, "starts .* requires causal=True"),
        ({"decay": torch.ones(2, 4), "causal": False}, "decay requires causal=True"),
        ({"decay": torch.ones(2, 3)}, r"decay has shape \(2, 3\), expected \(2, 4\)"),
        ({"k": torch.rand(2, 3, 9, 4)}, "must be a multiple of that of key heads, 3"),
        ({"v": torch.rand(2, 2, 8, 3)}, "v has shape"),
        ({"q": torch.ones(2, 4, 9, 4, dtype=torch.long)}, "floating-point"),
        ({"state": State(torch.rand(2, 2, 4, 3), torch.rand(2, 2, 4))}, "state must have dtype torch.float64"),
    ],
)
def test_invalid_arguments_are_refused(change, message):
    case = make_case()
    arguments = {"q": case.q, "k": case.k, "v": case.v, **change}
    with pytest.raises(T2RError, match=message):
        ops.linear_attention(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.rand(2, 2, 2, 4, dtype=torch.float64)}, "requires exactly one token, got 1 queries and 2 keys"),
        ({"inplace": True}, "inplace=True requires a state"),
        ({"decay": torch.ones(2, 3)}, "decay has shape"),
        ({"backend": "cuda"}, "unknown backend 'cuda'"),
    ],
)
def test_invalid_arguments_of_step_are_refused(change, message):
    case = make_case(time=1)
    with pytest.raises(T2RError, match=message):
        ops.step(**{"q": case.q, "k": case.k, "v": case.v, **change})


@pytest.fixture
def modest(monkeypatch):
    """Register a backend with the abilities given by the test. `auto` tries it first."""

    def register(reason=None, **abilities):
        backend = Chunked()
        backend.name, backend.abilities = "modest", Abilities(**abilities)
        backend.missing = lambda: reason
        monkeypatch.setitem(registry.BACKENDS, "modest", backend)
        monkeypatch.setitem(registry.PREFERENCE, "cpu", ("modest", "chunked"))

    return register


def test_a_backend_that_cannot_run_here_says_why(modest):
    modest(reason="no warp core")
    case = make_case()
    with pytest.raises(T2RError, match="'modest' is not available: no warp core"):
        ops.linear_attention(case.q, case.k, case.v, backend="modest")
    assert ops.backends()["modest"] == "no warp core"
    assert ops.backends()["chunked"] is None
    assert ops.choose(torch.device("cpu")) == "chunked"


LACKS = [
    ({"devices": ("abacus",)}, {}, "tensors on cpu"),
    ({"dtypes": (torch.float32,)}, {}, "does not support float64"),
    ({"largest_feature": 3}, {}, r"feature size 4 \(at most 3\)"),
    ({"largest_value": 2}, {}, r"value size 3 \(at most 2\)"),
    ({"decay": False}, {"decay": True}, "does not support decay"),
    ({"starts": False}, {"starts": True}, "packed documents"),
    ({"signed": False}, {"signed": True}, "signed features"),
    ({"groups": False}, {}, "grouped queries"),
    ({"noncausal": False}, {"causal": False}, "non-causal"),
    ({"causal": False}, {}, "causal attention"),
    ({"state": False}, {"state": True}, "initial state"),
]


@pytest.mark.parametrize(("abilities", "asked", "message"), LACKS)
def test_a_backend_is_never_given_what_it_cannot_do(modest, abilities, asked, message):
    modest(**abilities)
    case = make_case(**asked)
    with pytest.raises(T2RError, match=message):
        ops.linear_attention(case.q, case.k, case.v, state=case.state, backend="modest", **case.options)
    registry.BACKENDS["modest"].parallel = None  # `auto` fails if it calls this backend
    ops.linear_attention(case.q, case.k, case.v, state=case.state, **case.options)


def test_gradients_and_sums_are_declared_too(modest):
    modest(gradients=("parallel",), sums=False)
    case = make_case(time=1, state=True)
    with pytest.raises(T2RError, match="does not support unnormalized output"):
        ops.linear_attention(case.q, case.k, case.v, normalized=False, backend="modest")
    q = case.q.requires_grad_()
    ops.linear_attention(q, case.k, case.v, backend="modest")
    with pytest.raises(T2RError, match="gradients of step"):
        ops.step(q, case.k, case.v, case.state, backend="modest")
    with pytest.raises(T2RError, match="gradients of look"):
        ops.look(q, case.state, torch.float64, backend="modest")
    with torch.no_grad():
        ops.step(q, case.k, case.v, case.state, backend="modest")
        ops.look(q, case.state, torch.float64, backend="modest")


flags = st.booleans()


@settings(max_examples=100)
@given(
    st.builds(
        Request,
        operation=st.sampled_from(OPERATIONS),
        device=st.sampled_from(["cpu", "cuda", "mps"]),
        dtypes=st.tuples(*[st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])] * 3),
        feature=st.integers(1, 1000),
        value=st.integers(1, 1000),
        decay=flags,
        starts=flags,
        signed=flags,
        groups=flags,
        causal=flags,
        state=flags,
        gradients=flags,
        normalized=flags,
        features=st.just(False),
    )
)
def test_auto_finds_a_backend_that_can(request_):
    chosen = registry.select(request_)
    assert chosen.abilities.lacks(request_) is None
    assert chosen.missing() is None


@pytest.mark.parametrize("causal", [True, False])
def test_choose_names_a_usable_backend(causal):
    name = ops.choose(torch.device("cpu"), causal)
    assert ops.backends()[name] is None


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 3, 0)])
def test_only_the_time_may_be_empty(shape):
    empty = torch.zeros(shape)
    with pytest.raises(T2RError, match="only the time may be 0"):
        ops.linear_attention(empty, empty, empty)
    none = torch.zeros(1, 2, 0, 4)
    assert ops.linear_attention(none, none, none)[0].shape == none.shape
