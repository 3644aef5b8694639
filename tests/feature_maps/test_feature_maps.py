"""Feature maps: shapes, heads, randomness, the kernels they estimate, and numerical stability."""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import MarianConfig, MarianMTModel

from t2r import swap
from t2r.errors import T2RError
from t2r.feature_maps import (
    FEATURE_MAPS,
    AffineMap,
    FeatureMap,
    PerformerMap,
    RfaMap,
    affine,
    identity_like,
    make_feature_map,
    orthogonal_rows,
    safe_norm,
)
from t2r.ops.constants import constant_weights

HEAD_DIM = 8
LAYOUTS = {
    "mha": {"num_heads": 4},
    "grouped": {"num_heads": 6, "num_key_value_heads": 2},
    "ungrouped": {"num_heads": 6, "num_key_value_heads": 2, "grouped": False},
    "mqa": {"num_heads": 3, "num_key_value_heads": 1},
}
# --- Every map: one row each --------------------------------------------------------------------------------


# φ of one head by its definition, for x `[batch, time, head_dim]`. `head` is the index of a query map or key map.


def affine_head(feature_map: Any, x: Tensor, head: int, query: bool) -> tuple[Tensor, Tensor]:
    """Return the output of the affine part, and the weight of each key."""
    part = feature_map.query_map if query and feature_map.query_map is not None else feature_map.key_map
    y = x @ part.weight[head].T + (0 if part.bias is None else part.bias[head])
    weighs = feature_map.key_weight is not None and not query
    return y, (x @ feature_map.key_weight.weight[head].T).exp() if weighs else torch.ones(())


def t2r_head(feature_map: Any, x: Tensor, head: int, query: bool) -> Tensor:
    y, weight = affine_head(feature_map, x, head, query)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": F.relu,
        "elu": F.elu,
        "tanh": F.tanh,
        "cos": torch.cos,
        "gelu": F.gelu,
        "softmax": lambda y: y.softmax(-1),
    }
    return functions[feature_map.activation](y) * weight


def hedgehog_head(feature_map: Any, x: Tensor, head: int, query: bool) -> Tensor:
    y, weight = affine_head(feature_map, x, head, query)
    return torch.cat([y, -y], -1).softmax(-1) * weight


def elu_head(feature_map: Any, x: Tensor, head: int, query: bool) -> Tensor:
    return F.elu(x) + 1


def rfa_head(feature_map: Any, x: Tensor, head: int, query: bool) -> Tensor:
    w = feature_map.bank[head % len(feature_map.bank)] * feature_map.sigma[head]
    u = F.normalize(x, dim=-1) @ w.T
    return torch.cat([u.sin(), u.cos()], -1) / math.sqrt(len(w))


def performer_head(feature_map: Any, x: Tensor, head: int, query: bool) -> Tensor:
    w = feature_map.vectors[head]
    x = x * feature_map.head_dim ** (0.25 if query else -0.25)
    x = torch.where(x.norm(dim=-1, keepdim=True) > 3, 3 * F.normalize(x, dim=-1), x)
    return torch.exp(x @ w.T - x.norm(dim=-1, keepdim=True) ** 2 / 2) / math.sqrt(len(w))


class Row(NamedTuple):
    one_head: Callable[[Any, Tensor, int, bool], Tensor]
    default_size: int  # for a head size of 64
    sizes: tuple[int, ...] = (2, 4, 32, 64, 1024)  # valid for a head size of 64
    options: Mapping[str, Any] = {}
    variants: Mapping[str, dict[str, Any]] = {}  # options that change the function
    float32: bool = False  # features are float32 in half-precision models
    draws: bool = False  # parameters are initialized at random, independently for each head
    draws_not: tuple[str, ...] = ()  # variants whose parameters are not
    mergeable: bool = False


ROWS = {
    "t2r": Row(
        t2r_head,
        32,
        variants={
            "t2r-odd": {"feature_size": 7, "init": "identity"},
            "t2r-separate": {"shared": False},
            **{f"t2r-{a}": {"activation": a} for a in ("elu", "tanh", "cos", "gelu", "softmax")},
            "t2r-softmax-separate": {"activation": "softmax", "init": "identity", "shared": False},
            "t2r-weights": {"activation": "softmax", "shared": False, "key_weights": True},
        },
        draws=True,
        mergeable=True,
    ),
    "elu": Row(elu_head, 64, sizes=(64,)),
    # The bank is smaller than the number of heads of some layouts.
    "rfa": Row(rfa_head, 32, options={"bank_size": 5}, float32=True, draws=True),
    "performer": Row(performer_head, 128, float32=True, draws=True),
    "hedgehog": Row(
        hedgehog_head,
        128,
        variants={
            "hedgehog-weights": {"key_weights": True},
            "hedgehog-separate": {"shared": False, "feature_size": 6, "init": "paper"},
        },
        draws=True,
        draws_not=("hedgehog", "hedgehog-weights"),  # the default initialization is an identity
        mergeable=True,
    ),
}
VARIANTS: dict[str, dict[str, Any]] = {
    variant: {"name": name, **row.options, **options}
    for name, row in ROWS.items()
    for variant, options in {name: {}, **row.variants}.items()
}


def row_of(variant: str) -> Row:
    return ROWS[VARIANTS[variant]["name"]]


def draws(variant: str) -> bool:
    return row_of(variant).draws and variant not in row_of(variant).draws_not


def test_every_map_has_a_row() -> None:
    assert set(ROWS) == set(FEATURE_MAPS)
    affine = {name for name, made in FEATURE_MAPS.items() if issubclass(made, AffineMap)}
    assert {name for name, row in ROWS.items() if row.mergeable} == affine


every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def make(variant: str, layout: str = "mha", **more: Any) -> FeatureMap:
    return make_feature_map(**{"head_dim": HEAD_DIM, **LAYOUTS[layout], **VARIANTS[variant], **more})


def disturb(feature_map: FeatureMap) -> FeatureMap:
    """Add noise to the parameters, so that heads, queries and keys all differ."""
    with torch.no_grad():
        for parameter in feature_map.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return feature_map


def inputs(feature_map: FeatureMap, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    d = feature_map.head_dim
    q = torch.randn(2, feature_map.num_heads, 5, d, generator=generator) * scale / math.sqrt(d)
    k = torch.randn(2, feature_map.num_key_value_heads, 7, d, generator=generator) * scale
    return q.to(dtype), k.to(dtype)


def attention(phi_q: Tensor, phi_k: Tensor) -> Tensor:
    weights = phi_q.float() @ phi_k.float().mT
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-6)


# --- One head at a time -----------------------------------------------------------------------------------


@every_layout
@every_variant
def test_heads_are_computed_as_if_one_by_one(variant: str, layout: str) -> None:
    torch.manual_seed(0)
    feature_map = disturb(make(variant, layout)).eval().double()
    q, k = inputs(feature_map, 2.0, torch.float64)
    phi_q, phi_k = feature_map(q, k)
    heads, key_heads, size = feature_map.num_heads, feature_map.key_heads, feature_map.feature_size
    assert phi_q.shape == (2, heads, 5, size)
    assert phi_k.shape == (2, key_heads, 7, size)
    separate, one_head = not feature_map.shared, row_of(variant).one_head
    for h in range(heads):
        which = h if separate else h * key_heads // heads
        torch.testing.assert_close(phi_q[:, h], one_head(feature_map, q[:, h], which, True))
    for h in range(key_heads):
        x = k[:, h * feature_map.num_key_value_heads // key_heads]
        torch.testing.assert_close(phi_k[:, h], one_head(feature_map, x, h, False))
    torch.testing.assert_close(feature_map.queries(q), phi_q, rtol=0, atol=0)
    torch.testing.assert_close(feature_map.keys(k), phi_k, rtol=0, atol=0)


@settings(max_examples=40, deadline=None)
@given(
    groups=st.integers(1, 3),
    heads=st.integers(1, 3),
    maps=st.integers(1, 3),
    batch=st.integers(1, 3),
    time=st.integers(0, 3),
    transposed=st.booleans(),
)
def test_affine_against_a_loop(groups: int, heads: int, maps: int, batch: int, time: int, transposed: bool) -> None:
    if heads > 1:
        maps = 1
    x = torch.randn(batch, groups * heads, time, 4, dtype=torch.float64)
    if transposed:  # as in attention, where heads are a view of the hidden size
        x = torch.randn(batch, time, groups * heads, 4, dtype=torch.float64).transpose(1, 2)
    weight = torch.randn(groups * maps, 5, 4, dtype=torch.float64)
    bias = torch.randn(groups * maps, 5, dtype=torch.float64)
    got = affine(x, weight, bias)
    for h in range(groups * max(heads, maps)):
        w = h // heads
        want = x[:, h // maps] @ weight[w].T + bias[w]
        torch.testing.assert_close(got[:, h], want)


# --- Numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_variant
def test_dtypes(variant: str, dtype: torch.dtype) -> None:
    feature_map = make(variant, "grouped").eval().to(dtype)
    q, k = inputs(feature_map, 3.0, dtype)
    exact = make(variant, "grouped").eval().double()(q.double(), k.double())
    full = row_of(variant).float32
    for phi, want in zip(feature_map(q, k), exact, strict=True):
        assert phi.dtype == (torch.promote_types(dtype, torch.float32) if full else dtype)
        assert phi.isfinite().all()
        precision = 20 * torch.finfo(dtype).eps
        torch.testing.assert_close(phi.double(), want, rtol=precision, atol=precision)


@every_variant
def test_autocast(variant: str) -> None:
    feature_map = make(variant, "grouped").eval()
    q, k = inputs(feature_map)
    plain = feature_map(q, k)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = feature_map(q, k)
    full = row_of(variant).float32
    for phi, want in zip(features, plain, strict=True):
        assert phi.isfinite().all()
        if full:  # autocast must have no effect
            torch.testing.assert_close(phi, want, rtol=0, atol=0)
        if isinstance(feature_map, AffineMap):  # autocast must apply, as it does for nn.Linear
            assert phi.dtype == torch.bfloat16


@every_variant
def test_sign(variant: str) -> None:
    feature_map = make(variant, "grouped")
    lowest = min(phi.min().item() for phi in feature_map(*inputs(feature_map, 5.0)))
    assert (lowest < 0) == feature_map.signed


def test_elu_does_not_cancel_in_half_precision() -> None:
    feature_map = make("elu").bfloat16()
    x = torch.full((1, 4, 1, HEAD_DIM), -8.0, dtype=torch.bfloat16)
    torch.testing.assert_close(feature_map.queries(x).float(), x.float().exp(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_variant
def test_zero_vectors_have_finite_features_and_gradients(variant: str, dtype: torch.dtype) -> None:
    feature_map = make(variant, "grouped").to(dtype)
    q, k = (torch.zeros_like(x).requires_grad_() for x in inputs(feature_map, dtype=dtype))
    phi_q, phi_k = feature_map(q, k)
    (phi_q.float().sum() + phi_k.float().sum()).backward()
    for tensor in (phi_q, phi_k, q.grad, k.grad, *(p.grad for p in feature_map.parameters())):
        assert tensor is not None
        assert tensor.isfinite().all()


def test_safe_norm_is_the_norm() -> None:
    x = torch.randn(100, 8)
    torch.testing.assert_close(safe_norm(x), x.norm(dim=-1, keepdim=True))


# --- Parameters and buffers -------------------------------------------------------------------------------


def size_of(feature_map: FeatureMap) -> int:
    return sum(p.numel() for p in feature_map.parameters())


def test_parameter_counts() -> None:
    d, k = 16, 12
    common: dict[str, Any] = {"head_dim": d, "feature_size": k, "num_heads": 6}
    grouped = {"num_key_value_heads": 2}
    assert size_of(make_feature_map("t2r", **common)) == 6 * k * (d + 1)
    assert size_of(make_feature_map("t2r", **common, **grouped)) == 2 * k * (d + 1)
    assert size_of(make_feature_map("t2r", **common, **grouped, grouped=False)) == 6 * k * (d + 1)
    assert size_of(make_feature_map("t2r", **common, **grouped, shared=False)) == (2 + 6) * k * (d + 1)
    assert size_of(make_feature_map("hedgehog", **common, **grouped)) == 2 * k // 2 * d
    assert size_of(make_feature_map("rfa", **common, **grouped)) == 2 * d
    assert size_of(make_feature_map("performer", **common)) == 0
    assert size_of(make_feature_map("elu", head_dim=d, num_heads=6)) == 0


def test_default_sizes() -> None:
    sizes = {name: make_feature_map(name, head_dim=64, num_heads=1).feature_size for name in FEATURE_MAPS}
    assert sizes == {name: row.default_size for name, row in ROWS.items()}
    assert sizes == {name: cls.default_feature_size(64) for name, cls in FEATURE_MAPS.items()}


def same(a: FeatureMap, b: FeatureMap) -> bool:
    return all(torch.equal(x, b.state_dict()[key]) for key, x in a.state_dict().items())


@every_variant
def test_construction_depends_on_the_seed_alone(variant: str) -> None:
    before = torch.get_rng_state()
    first, second, other = make(variant), make(variant), make(variant, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert same(first, second)
    if first.state_dict():
        assert same(first, other) != draws(variant)


@every_variant
def test_heads_draw_their_own(variant: str) -> None:
    feature_map = make(variant, "grouped").eval()
    _, k = inputs(feature_map)
    k = k[:, :1].expand(-1, 2, -1, -1)
    first, second = feature_map.keys(k).unbind(1)
    assert torch.equal(first, second) != draws(variant)


@every_layout
@every_variant
def test_meta_construction_then_reset(variant: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want = make(variant, layout)
    with torch.device("meta"), monkeypatch.context() as patch:
        if want.state_dict():  # creating a large model on meta must be fast, so nothing may be drawn
            patch.delattr(torch, "Generator")
        empty = make(variant, layout)
    assert all(tensor.is_meta for tensor in empty.state_dict().values())
    empty.to_empty(device="cpu")
    empty.reset_parameters()
    assert same(want, empty)
    empty.reset_parameters(torch.Generator().manual_seed(7))
    assert same(empty, make(variant, layout, seed=7))


@every_variant
def test_default_dtype_and_reset_in_half_precision(variant: str) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        half = make(variant)
    finally:
        torch.set_default_dtype(before)
    assert all(tensor.dtype == torch.bfloat16 for tensor in half.state_dict().values())
    assert same(half, make(variant).bfloat16())


@every_variant
def test_state_dict_round_trip(variant: str) -> None:
    torch.manual_seed(0)
    saved, loaded = disturb(make(variant)).eval(), make(variant, seed=3).eval()
    loaded.load_state_dict(saved.state_dict())
    q, k = inputs(saved)
    for x, y in zip(saved(q, k), loaded(q, k), strict=True):
        assert torch.equal(x, y)


@every_layout
@every_variant
def test_gradients_reach_parameters_and_inputs_unless_frozen(variant: str, layout: str) -> None:
    for trainable in (True, False):
        feature_map = make(variant, layout, trainable=trainable)
        q, k = (x.requires_grad_() for x in inputs(feature_map))
        phi_q, phi_k = feature_map(q, k)
        (phi_q.square().sum() + phi_k.square().sum() + phi_q.sum() * phi_k.sum()).backward()
        assert q.grad is not None
        assert q.grad.abs().sum() > 0
        assert k.grad is not None
        assert k.grad.abs().sum() > 0
        for parameter in feature_map.parameters():
            assert parameter.requires_grad == trainable
            assert (parameter.grad is not None) == trainable
            if parameter.grad is not None:
                assert (parameter.grad.flatten(1).abs().sum(1) > 0).all(), "some head has no gradient"


# --- Learned maps: how they start, and how they merge -----------------------------------------------------


@every_layout
@pytest.mark.parametrize("variant", [v for v in VARIANTS if "t2r" in v or "hedgehog" in v])
def test_activate_after_affine_is_the_map(variant: str, layout: str) -> None:
    torch.manual_seed(0)
    feature_map = disturb(make(variant, layout)).double()
    assert isinstance(feature_map, AffineMap)
    q, k = inputs(feature_map, dtype=torch.float64)
    phi_q, phi_k = feature_map(q, k)
    for x, (weight, bias), shape, activate, want in (
        (q, feature_map.affine_q(), (feature_map.num_heads, feature_map.rows), feature_map.activate, phi_q),
        (k, feature_map.affine_k(), (feature_map.key_heads, feature_map.key_rows), feature_map.activate_keys, phi_k),
    ):
        assert weight.shape == (*shape, HEAD_DIM)
        # One matrix product per head, as in merged projections.
        y = x.repeat_interleave(shape[0] // x.shape[1], 1) @ weight.mT
        y = y if bias is None else y + bias[:, None]
        torch.testing.assert_close(activate(y), want)


@every_layout
@pytest.mark.parametrize("shared", [True, False])
def test_weights_of_keys_start_at_one(layout: str, shared: bool) -> None:
    plain, weighted = (
        make_feature_map("hedgehog", head_dim=HEAD_DIM, **LAYOUTS[layout], shared=shared, key_weights=has)
        for has in (False, True)
    )
    q, k = inputs(plain)
    for ours, theirs in zip(weighted(q, k), plain(q, k), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_of_keys_are_bounded(dtype: torch.dtype) -> None:
    feature_map = make("t2r-weights").to(dtype)
    assert isinstance(feature_map, AffineMap)
    assert feature_map.key_weight is not None
    with torch.no_grad():
        feature_map.key_weight.weight.fill_(100)
    k = torch.ones(1, 4, 1, HEAD_DIM, dtype=dtype)
    for sign in (1, -1):
        total = feature_map.keys(sign * k).float().sum(-1)
        torch.testing.assert_close(total.log(), torch.full_like(total, 8.0 * sign), rtol=0.01, atol=0)


def test_paper_initialization_is_that_of_a_linear_layer() -> None:
    feature_map = make_feature_map("t2r", head_dim=64, num_heads=16, feature_size=64)
    bound = 1 / math.sqrt(64)
    for parameter in feature_map.parameters():
        assert parameter.abs().max() <= bound
        assert parameter.abs().max() > 0.99 * bound
        assert abs(parameter.std().item() / (bound / math.sqrt(3)) - 1) < 0.05


def test_identity_initialization_of_t2r_comes_in_pairs() -> None:
    even = make_feature_map("t2r", head_dim=8, num_heads=2, feature_size=16, init="identity")
    odd = make_feature_map("t2r", head_dim=8, num_heads=2, feature_size=15, init="identity")
    assert isinstance(even, AffineMap)
    assert isinstance(odd, AffineMap)
    weight, bias = even.affine_k()
    assert torch.equal(weight[:, 0::2], torch.eye(8).expand(2, 8, 8))
    assert torch.equal(weight[:, 1::2], -weight[:, 0::2])
    assert bias is not None
    assert not bias.any()
    assert torch.equal(odd.affine_k()[0], weight[:, :15])


def test_identity_like() -> None:
    generator = torch.Generator().manual_seed(0)
    few, many = identity_like(3, 4, 16, generator), identity_like(3, 40, 16, generator)
    torch.testing.assert_close(few @ few.mT, 4 * torch.eye(4).expand(3, 4, 4))
    assert torch.equal(many[:, :16], torch.eye(16).expand(3, 16, 16))
    assert not torch.allclose(many[:, 16:32], many[:, :16], atol=0.1)
    torch.testing.assert_close(many[:, 16:32] @ many[:, 16:32].mT, torch.eye(16).expand(3, 16, 16))


@pytest.mark.parametrize("size", [16, 32, 128])
@pytest.mark.parametrize("name", ["t2r", "hedgehog"])
def test_identity_initialization_is_closer_to_softmax(name: str, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    # Imitate a trained head with peaked attention: each query resembles one key.
    k, noise = torch.randn(2, 4, 8, 64, 32, generator=generator)
    q = (k + noise / 2) / math.sqrt(32)
    softmax = (q @ k.mT).softmax(-1)

    def distance(init: str, **more: Any) -> float:
        feature_map = make_feature_map(name, head_dim=32, num_heads=8, feature_size=size, init=init, **more)
        return (attention(*feature_map(q, k)) - softmax).norm(dim=-1).mean().item()

    assert distance("identity") < 0.99 * distance("paper")
    assert distance("identity", shared=False) < 0.99 * distance("paper", shared=False)


# --- rfa --------------------------------------------------------------------------------------------------


def rfa(**more: Any) -> RfaMap:
    feature_map = make_feature_map("rfa", **{"head_dim": HEAD_DIM, "num_heads": 4, **more})
    assert isinstance(feature_map, RfaMap)
    return feature_map


def test_rfa_redraws_in_training_only() -> None:
    feature_map = rfa()
    q, k = inputs(feature_map)
    draws = [feature_map(q, k)[0] for _ in range(3)]
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[1], draws[2])
    feature_map.eval()
    before = torch.get_rng_state()
    assert torch.equal(feature_map(q, k)[0], feature_map(q, k)[0])
    assert torch.equal(torch.get_rng_state(), before)
    feature_map.train()
    assert torch.equal(feature_map.queries(q), feature_map.eval()(q, k)[0]), "queries() must use the fixed draw"


@every_layout
def test_rfa_queries_and_keys_use_one_draw(layout: str) -> None:
    feature_map = rfa(**LAYOUTS[layout])
    k = torch.randn(2, feature_map.num_key_value_heads, 7, HEAD_DIM)
    q = k.repeat_interleave(feature_map.num_heads // feature_map.num_key_value_heads, 1)
    for _ in range(3):
        phi_q, phi_k = feature_map(q, k)
        phi_k = phi_k.repeat_interleave(feature_map.num_heads // feature_map.key_heads, 1)
        torch.testing.assert_close(phi_q, phi_k)
        # sin² + cos² = 1: the kernel of a vector with itself is exact for every draw.
        torch.testing.assert_close((phi_q * phi_k).sum(-1), torch.ones(q.shape[:3]))


def test_rfa_heads_draw_independently_in_training() -> None:
    feature_map = rfa(num_heads=64)
    torch.manual_seed(0)
    first, second = feature_map.random_draw(), feature_map.random_draw()
    assert first.unique().numel() > 32
    assert first.max() > 200
    assert first.max() < 400
    assert (first != second).float().mean() > 0.9


@pytest.mark.parametrize("scale", [1.0, 3.0, 6.0])
def test_few_random_features_cannot_attend_to_one_key(scale: float) -> None:
    """The noise of the estimated kernel over many keys is larger than its value at the key that equals the query.

    This is why RFA stays behind learned features of the same size in docs/paper.md, whatever its scale is."""
    heads, keys = 32, 256
    generator = torch.Generator().manual_seed(0)
    k = torch.nn.functional.normalize(torch.randn(1, heads, keys, 64, generator=generator), dim=-1)
    q = k[:, :, :1]
    share = {}
    for size in (32, 1024):
        feature_map = rfa(head_dim=64, num_heads=heads, feature_size=size, bank_size=heads).eval()
        with torch.no_grad():
            feature_map.sigma.fill_(scale)
            phi_q, phi_k = feature_map(q, k)
        weights = phi_q @ phi_k.mT
        share[size] = (weights[..., 0] / weights.abs().sum(-1)).mean().item()
    exact = torch.exp(-(scale**2) * (q - k).square().sum(-1) / 2)
    assert share[32] < 0.05
    if scale > 1:
        assert (exact[..., 0] / exact.sum(-1)).min() > 0.8
        assert share[1024] > 4 * share[32]


def test_gradients_of_rfa_are_as_large_as_those_of_softmax() -> None:
    """With the paper's feature sizes for translation, two random vectors in causal attention, weights often cancel."""
    sizes = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
    both = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in sizes.items()}
    tokens = {"vocab_size": 100, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    config = MarianConfig(d_model=64, max_position_embeddings=32, **both, **tokens)
    torch.manual_seed(0)
    model = MarianMTModel(config)

    def median_norm(model: nn.Module) -> float:
        norms = []
        for seed in range(9):
            torch.manual_seed(seed)
            source, target = torch.randint(2, 99, (2, 16, 24))
            model.zero_grad()
            model(input_ids=source, labels=target).loss.backward()
            norms.append(torch.nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None))
        return torch.stack(norms).median().item()

    expected = median_norm(model.train())
    recurrent = swap(model, feature_map="rfa", feature_size=4, recurrent="both", cross_feature_size=32)
    assert median_norm(recurrent.train()) == pytest.approx(expected, rel=0.2)


def test_rfa_survives_gradient_checkpointing() -> None:
    plain = rfa()
    again = copy.deepcopy(plain)
    q, k = inputs(plain)
    for feature_map, call in (
        (plain, plain),
        (again, lambda *x: checkpoint(again, *x, use_reentrant=False)),
    ):
        torch.manual_seed(5)
        phi_q, phi_k = call(q.clone().requires_grad_(), k)
        torch.rand(3)  # changes the random state before the backward pass recomputes
        attention(phi_q, phi_k)[..., 0].sum().backward()
        assert feature_map.sigma.grad is not None
    assert plain.sigma.grad is not None
    assert again.sigma.grad is not None
    torch.testing.assert_close(plain.sigma.grad, again.sigma.grad)


# --- What the random features estimate --------------------------------------------------------------------


def estimates(name: str, size: int, q: Tensor, k: Tensor, seeds: int, heads: int) -> Tensor:
    """Estimate φ(q)·φ(k) for pairs `[pairs, head_dim]` with independent draws: `[seeds * heads, pairs]`."""
    out = []
    for seed in range(seeds):
        feature_map = make_feature_map(name, head_dim=q.shape[-1], num_heads=heads, feature_size=size, seed=seed).eval()
        phi_q, phi_k = feature_map(q.expand(1, heads, -1, -1), k.expand(1, heads, -1, -1))
        out.append((phi_q * phi_k).sum(-1)[0])
    return torch.cat(out)


def pairs(count: int, dim: int, norm: float) -> tuple[Tensor, Tensor]:
    q, k = torch.randn(2, count, dim, generator=torch.Generator().manual_seed(0))
    return norm * F.normalize(q, dim=-1) * dim**-0.25, norm * F.normalize(k, dim=-1) * dim**0.25


@pytest.mark.parametrize("name", ["rfa", "performer"])
def test_error_falls_as_the_size_grows(name: str) -> None:
    q, k = pairs(64, 16, 1.0)
    if name == "rfa":
        distance = F.normalize(q, dim=-1) - F.normalize(k, dim=-1)
        kernel = torch.exp(-distance.square().sum(-1) / 2)
    else:
        kernel = torch.exp((q * k).sum(-1))

    def error(size: int) -> float:
        return (estimates(name, size, q, k, seeds=3, heads=8) - kernel).abs().mean().item()

    assert error(256) < error(4) / 4


def test_performer_is_unbiased_within_the_bound() -> None:
    q, k = pairs(16, 8, 1.0)
    got = estimates("performer", 16, q, k, seeds=100, heads=64).double()
    kernel = torch.exp((q * k).sum(-1))
    assert kernel.max() / kernel.min() > 3, "the pairs are too similar to distinguish kernels"
    standard_error = got.std(0) / math.sqrt(len(got))
    assert (standard_error < 0.03 * kernel).all(), "too few draws"
    assert ((got.mean(0) - kernel).abs() < 4 * standard_error).all()


def test_performer_saturates_beyond_the_bound() -> None:
    feature_map = make_feature_map("performer", head_dim=16, num_heads=2, max_norm=2.0)
    x = F.normalize(torch.randn(1, 2, 9, 16, generator=torch.Generator().manual_seed(0)), dim=-1)
    edge_q, edge_k = 2 * x * 16**-0.25, 2 * x * 16**0.25
    for far in (1.5, 1e3):
        torch.testing.assert_close(feature_map.queries(far * edge_q), feature_map.queries(edge_q))
        torch.testing.assert_close(feature_map.keys(far * edge_k), feature_map.keys(edge_k))
    assert not torch.allclose(feature_map.queries(0.9 * edge_q), feature_map.queries(edge_q), rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 256])
def test_performer_of_huge_inputs_is_finite(head_dim: int, dtype: torch.dtype) -> None:
    feature_map = make_feature_map("performer", head_dim=head_dim, num_heads=2).to(dtype)
    assert isinstance(feature_map, PerformerMap)
    # The worst case: large norms, parallel to the random vectors.
    x = F.normalize(feature_map.vectors[None].float(), dim=-1) * 1e4
    q, k = x.to(dtype).requires_grad_(), x.to(dtype).requires_grad_()
    phi_q, phi_k = feature_map(q, k)
    weights = attention(phi_q, phi_k)
    assert (phi_q.sum(-2) @ phi_k.sum(-2).mT * 1e6).isfinite().all()
    weights.square().sum().backward()
    for tensor in (phi_q, phi_k, weights, q.grad, k.grad):
        assert tensor is not None
        assert tensor.isfinite().all()


def test_performer_vectors_are_orthogonal_in_blocks_with_gaussian_norms() -> None:
    d = 32
    feature_map = make_feature_map("performer", head_dim=d, num_heads=8, feature_size=80)
    assert isinstance(feature_map, PerformerMap)
    vectors = feature_map.vectors
    assert vectors.shape == (8, 80, d)
    lengths = vectors.norm(dim=-1)
    for start in (0, 32, 64):
        block = F.normalize(vectors[:, start : start + d], dim=-1)
        torch.testing.assert_close(block @ block.mT, torch.eye(block.shape[1]).expand(8, -1, -1))
    # chi(d) has mean close to sqrt(d - 1/2) and standard deviation close to sqrt(1/2).
    assert abs(lengths.mean().item() - math.sqrt(d - 0.5)) < 0.15
    assert 0.6 < lengths.std().item() < 0.8


def test_orthogonal_rows_are_uniform() -> None:
    """The sign convention of QR would show in the mean of the diagonal."""
    rows = orthogonal_rows(4000, 3, 3, torch.Generator().manual_seed(0))
    assert rows.mean(0).abs().max() < 4 / math.sqrt(3 * 4000)


# --- Invalid arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "feature_size", "words"),
    [
        ("t2r", 0, "at least 1; got 0"),
        ("t2r", -3, "at least 1; got -3"),
        ("t2r", 2.5, "whole number"),
        ("t2r", "32", "whole number"),
        ("rfa", 33, "must be even; got 33, try 34"),
        ("hedgehog", 5, "must be even; got 5, try 6"),
        ("elu", 32, "must be 64"),
        ("t2r", 1025, "at most 1024"),
        ("performer", 6400, "at most 1024"),
    ],
)
def test_invalid_feature_sizes_are_refused(name: str, feature_size: Any, words: str) -> None:
    with pytest.raises(T2RError, match=words):
        FEATURE_MAPS[name].check(64, feature_size)
    with pytest.raises(T2RError, match=words):
        make_feature_map(name, head_dim=64, num_heads=2, feature_size=feature_size)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_valid_feature_sizes_pass(name: str) -> None:
    for size in (None, *ROWS[name].sizes):
        FEATURE_MAPS[name].check(64, size)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("relu", {}, "unknown feature map 'relu': choose one of t2r, elu, rfa, performer, hedgehog"),
        ("t2r", {"activation": "sigmoid"}, "choose one of relu, elu, tanh, cos, gelu"),
        ("t2r", {"init": "zeros"}, "choose paper or identity"),
        ("rfa", {"shared": False}, "use shared=True"),
        ("performer", {"shared": False}, "use shared=True"),
        ("rfa", {"bank_size": 0}, "bank_size must be at least 1"),
        ("performer", {"max_norm": 0.0}, "max_norm must be positive"),
        ("t2r", {"num_key_value_heads": 3}, "query heads, 4, must be a multiple of that of key/value heads, 3"),
        ("t2r", {"num_key_value_heads": 0}, "query heads, 4, must be a multiple of that of key/value heads, 0"),
        ("rfa", {"activation": "tanh"}, "'rfa' has no option 'activation'; its options are: bank_size"),
        ("elu", {"init": "paper"}, "'elu' has no option 'init'; its options are: none"),
    ],
)
def test_invalid_options_are_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(T2RError, match=words):
        make_feature_map(name, head_dim=8, num_heads=4, **options)


# --- Training ---------------------------------------------------------------------------------------------


class TinyLayer(nn.Module):
    def __init__(self, hidden: int, heads: int, seed: int) -> None:
        super().__init__()
        self.heads = heads
        self.feature_map = make_feature_map("performer", head_dim=hidden // heads, num_heads=heads, seed=seed)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.ffn = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.ReLU(), nn.Linear(4 * hidden, hidden))
        # Queries and keys at least as large as in a trained transformer, so that divergence would show.
        self.qkv.weight.data[: 2 * hidden] *= 10

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        phi_q, phi_k = self.feature_map(q / math.sqrt(q.shape[-1]), k)
        weights = (phi_q @ phi_k.mT).tril()
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-6)
        x = x + self.out((weights @ v.float()).to(x.dtype).transpose(1, 2).flatten(2))
        return x + self.ffn(self.norms[1](x))


@pytest.mark.slow
def test_performer_trains_in_bfloat16_without_diverging() -> None:
    """Unlike in the paper, training does not diverge, even with bfloat16 parameters and a high learning rate."""
    torch.manual_seed(0)
    hidden, vocabulary, length = 64, 31, 64
    model = nn.Sequential(
        nn.Embedding(vocabulary, hidden),
        *(TinyLayer(hidden, 4, seed) for seed in range(2)),
        nn.LayerNorm(hidden),
        nn.Linear(hidden, vocabulary),
    ).bfloat16()
    # Each letter follows from the previous one by one of four rules, which change every 200 letters. Only attention
    # can find the current rule: a model without it stays at log(4).
    text = [1]
    while len(text) < 20_000:
        text.append((3 * text[-1] + 5 * (len(text) // 200 % 4)) % vocabulary)
    data = torch.tensor(text)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    losses = []
    for _ in range(1000):
        starts = torch.randint(len(data) - length - 1, (8, 1))
        batch = data[starts + torch.arange(length + 1)]
        loss = F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert math.isfinite(losses[-1])
        assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert sum(losses[-50:]) / 50 < math.log(4) / 2


# --- Decay ------------------------------------------------------------------------------------------------


@every_layout
@every_variant
def test_decay_rates(variant: str, layout: str) -> None:
    plain, fading = make(variant, layout), make(variant, layout, decay=True)
    assert plain.decay is None
    assert fading.decay is not None
    assert fading.decay.shape == (fading.key_heads, fading.feature_size)
    assert fading.decay.min() > 1 / 2100
    assert fading.decay.max() <= 0.9 + 1e-6
    assert torch.equal(fading.decay, make(variant, layout, decay=True).decay)
    assert not torch.equal(fading.decay, make(variant, layout, decay=True, seed=1).decay)
    assert fading.decay_logits is not None
    assert fading.decay_logits.requires_grad
    assert set(fading.state_dict()) - set(plain.state_dict()) == {"decay_logits"}
    for name, tensor in plain.state_dict().items():  # decay does not change the other parameters
        assert torch.equal(fading.state_dict()[name], tensor)
    assert not make(variant, layout, decay=True, trainable=False).decay_logits.requires_grad  # type: ignore[union-attr]


def test_rates_are_computed_in_full_precision_and_bounded() -> None:
    feature_map = make("hedgehog", decay=True)
    exact = feature_map.decay
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float16):
            half = copy.deepcopy(feature_map).to(dtype)
            assert half.decay.dtype == torch.float32
            torch.testing.assert_close(half.decay, exact, rtol=0.06, atol=0)  # a logit of 8 rounded to 8 bits
        feature_map.decay_logits.fill_(1e4)
        assert feature_map.decay.max() == 1.0
        feature_map.decay_logits.fill_(-1e4)
        assert feature_map.decay.max() == 0.0


# --- Learning rate factors ----------------------------------------------------------------------------------


@every_variant
def test_a_step_moves_queries_and_keys_alike(variant: str) -> None:
    """Queries are divided by sqrt(head_dim). An optimizer step must change the features of queries and keys alike."""
    feature_map = make(variant)
    paces = feature_map.paces()
    if feature_map.shared or not isinstance(feature_map, AffineMap):
        assert paces == {}
        return
    assert feature_map.query_map is not None
    queries, keys = paces.pop(feature_map.query_map.weight), paces.pop(feature_map.key_map.weight)
    if feature_map.key_weight is not None:
        assert paces.pop(feature_map.key_weight.weight) == keys
    assert paces == {}
    assert queries / math.sqrt(HEAD_DIM) == pytest.approx(keys)
    assert queries * keys == pytest.approx(1)  # the product of the factors stays 1
    feature_map.drop_affine()
    assert feature_map.paces() == {}


def test_a_softmax_over_features_starts_like_hedgehog() -> None:
    """It starts with the same rows, in pairs, and the same sharpness. Training may then change rows independently."""
    ours = make("t2r-softmax-separate", feature_size=2 * HEAD_DIM)
    theirs = make("hedgehog", shared=False, feature_size=2 * HEAD_DIM)
    q, k = inputs(ours)
    scores = [(phi_q @ phi_k.mT) for phi_q, phi_k in (ours(q, k), theirs(q, k))]
    torch.testing.assert_close(*scores)
    assert not ours.signed


def test_constant_weights_are_derived_once():
    """Inside `constant_weights` the rates and the joint weights of keys are computed once, with the same results."""
    torch.manual_seed(0)
    feature_map = make_feature_map("t2r", head_dim=4, num_heads=2, decay=True, key_weights=True, activation="softmax")
    q, k = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4)
    with torch.no_grad():
        expected, rates = feature_map.of_token(q, k), feature_map.decay
        kept = {}
        with constant_weights(kept):
            for _ in range(2):
                assert all(map(torch.equal, feature_map.of_token(q, k), expected))
            first = feature_map.decay
            assert torch.equal(first, rates)
            assert feature_map.decay is first
        assert len(kept) == 2
        assert feature_map.decay is not first
