"""Fewer kernels in a step: the formulas of families, values of whole steps, and the number of kernels."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import t2r
from families import tiny
from kernels import counted_kernels
from t2r import compat
from t2r.bench import models
from t2r.generation.engine.fusion import available
from t2r.generation.engine.fusion.attention import parts_of, reproduced
from t2r.generation.engine.fusion.layers import fuse_layers
from t2r.generation.engine.fusion.norms import fuse_norms, norm_of
from t2r.generation.engine.fusion.products import join_products
from t2r.generation.engine.fusion.replacing import ROUNDING, Replacing
from t2r.generation.engine.fusion.sums import DeferredSums
from t2r.generation.engine.softmax import on_the_engine
from t2r.generation.engine.step import DecodeStep
from t2r.ops import registry
from t2r.surgery.adapters import family_of
from t2r.training.recipes.recipe import load_recipe

pytestmark = pytest.mark.skipif(not available(), reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def close(found, expected, dtype):
    return ((found - expected).abs() <= (2 * torch.finfo(dtype).eps + ROUNDING) * expected.abs()).all()


# --- Norms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "gemma", "olmo2", "qwen3", "t5"])
@torch.no_grad()
def test_the_norms_of_families(model_type, dtype):
    model = tiny(model_type, torch.float32).to(DEVICE, dtype).eval()
    norms = [module for module in model.modules() if norm_of(module) is not None]
    assert len(norms) >= 2 * model.config.num_hidden_layers
    norm = norms[-1]
    norm.weight.copy_(torch.randn(norm.weight.shape))
    x = (3 * torch.randn(2, 3, norm.weight.numel(), device=DEVICE)).to(dtype)
    expected = norm(x)
    with Replacing() as replacing:
        fuse_norms(norm, replacing, DeferredSums())
        assert list(replacing.modules.values()) == [norm]
        found = norm(x)
    assert not vars(norm).get("forward")
    assert found.dtype == dtype
    assert close(found, expected, dtype)
    if dtype == torch.bfloat16 and DEVICE == "cuda":  # the interpreter truncates where a GPU rounds
        assert (found != expected).float().mean() < 0.02  # the same formula, so that only sums differ


@torch.no_grad()
def test_other_threads_and_unknown_norms():
    class OddRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps, self.threads = nn.Parameter(torch.rand(8, device=DEVICE)), 1e-6, []

        def forward(self, x):
            return x * self.weight  # no norm at all

    class PlainRMSNorm(OddRMSNorm):
        def forward(self, x):
            self.threads.append(threading.current_thread().name)
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))

    model, x = nn.ModuleDict({"odd": OddRMSNorm(), "plain": PlainRMSNorm()}).eval(), torch.rand(2, 8, device=DEVICE)
    with Replacing() as replacing:
        fuse_norms(model, replacing, DeferredSums())
        assert list(replacing.modules.values()) == [model["plain"]]
        model["plain"].threads.clear()
        other = threading.Thread(target=lambda: model["plain"](x), name="other")
        other.start()
        other.join()
        model["plain"](x)
    assert model["plain"].threads == ["other"]


@pytest.mark.skipif(DEVICE != "cpu", reason="kernels are counted in the interpreter")
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_sum_and_its_norm_in_one_kernel(bias, monkeypatch):
    norm = nn.LayerNorm(12, bias=bias).to(DEVICE).eval()
    for parameter in norm.parameters():
        parameter.copy_(torch.randn(12))
    x, y = torch.randn(2, 2, 1, 12, device=DEVICE)
    sums = DeferredSums()

    def both():
        total = x + y
        return total, norm(total), total.mul(2)

    expected = both()
    with Replacing() as replacing:
        fuse_norms(norm, replacing, sums)
        with sums:
            found = both()
            with counted_kernels(monkeypatch) as kernels:
                both()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert kernels.names == ["normalize", "mul"]


@torch.no_grad()
def test_deferred_sums_are_computed_before_anything_else():
    x, y = torch.rand(2, 2, 3, device=DEVICE)
    with DeferredSums():
        total = x + y
        x.zero_()  # after the sum
        unread = x + y
        assert total.shape == (2, 3)
        both = torch.stack([total, y])
    assert torch.equal(unread, y)
    assert (both[0] > y).all()


# --- Products and feed-forward layers -----------------------------------------------------------------------


@torch.no_grad()
def test_layers_that_read_the_same_input():
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(6, 5), nn.Linear(6, 3, bias=False), nn.Linear(6, 16)
            self.last = nn.Linear(16, 6)

        def forward(self, x):
            return self.q(x), self.k(x), self.last(self.v(x))

    model, x, other = Layers().to(DEVICE).eval(), *torch.randn(2, 3, 1, 6, device=DEVICE)
    expected, alone = model(x), model.k(other)
    with Replacing() as replacing:
        join_products(model, replacing, lambda: model(x))
        assert list(replacing.modules.values()) == [model.q, model.k, model.v]
        for one, same in zip(model(x), expected, strict=True):
            torch.testing.assert_close(one, same)
        model.q(x)
        torch.testing.assert_close(model.k(other), alone)
        x.mul_(2)
        torch.testing.assert_close(model(x)[1], 2 * expected[1])
    assert "forward" not in vars(model.q)


@pytest.mark.skipif(DEVICE != "cpu", reason="kernels are counted in the interpreter")
@pytest.mark.parametrize("model_type", ["llama", "gemma", "gpt2"])
@torch.no_grad()
def test_feed_forward_layers(model_type, monkeypatch):
    model = tiny(model_type, torch.float32).to(DEVICE).eval()
    mlp = next(module for name, module in model.named_modules() if name.endswith("mlp"))
    x = torch.randn(3, 1, model.config.hidden_size, device=DEVICE)
    expected = mlp(x)
    with Replacing() as replacing:
        fuse_layers(model, replacing)
        torch.testing.assert_close(mlp(x), expected)
        with counted_kernels(monkeypatch) as kernels:
            mlp(x)
    # Where a product on a CPU computes a gelu itself, it is not the approximation with tanh.
    assert kernels.names == (["addmm", "gelu", "addmm"] if model_type == "gpt2" else ["mm", "mm", "gate", "mm"])


@pytest.mark.parametrize(("model_type", "fits"), [("llama", True), ("gpt2", True), ("gemma2", False), ("phi", False)])
@torch.no_grad()
def test_the_softmax_attention_of_families(model_type, fits):
    """Capped scores (gemma2) and a rotation of a part of each head (phi) are noticed."""
    model = tiny(model_type, torch.float64).to(DEVICE).eval()
    rotary = next((m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")), None)
    family = family_of(model)
    module = next(iter(family.sites(model))).module
    compat.set_attention_implementation(model, "t2r")
    assert (parts_of(module) is not None and reproduced(module, rotary)) == fits


@torch.no_grad()
def test_attention_that_is_not_reproduced_is_named(caplog):
    step = DecodeStep(on_the_engine(tiny("stablelm", torch.float32).to(DEVICE).eval()), 2, 8)
    with caplog.at_level("INFO"), step.few_kernels():
        pass
    assert "use the attention of StableLmAttention itself" in caplog.text


# --- Whole steps --------------------------------------------------------------------------------------------


def paper_lm(layers: int, options: str = ",feature_size=4,merged"):
    fields = {**models.SHAPES["tiny-lm"], "n_layer": layers}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.SHAPES, "tiny-lm", fields)
        return models.random_model("random:tiny-lm" + options, {}, DEVICE)[1]


def paper_mt(layers: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.SHAPES, "tiny-mt", models.marian(64, layers, 2, 200, 128))
        return models.random_model(
            "random:tiny-mt,recurrent=both,feature_size=4,cross_feature_size=8,merged", {}, DEVICE
        )[1]


def llama(layers: int, **options):
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 3, "num_key_value_heads": 1}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_hidden_layers=layers, pad_token_id=0, **sizes)).eval()
    model = t2r.swap(base, **(load_recipe("distill-lm").swap | {"feature_size": 4} | options)).to(DEVICE)
    return t2r.merge(model).requires_grad_(False)


def planned(layers: int, **options):
    """Windows that differ by head, and states of some heads, with grouped queries."""
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 6, "num_key_value_heads": 3}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_hidden_layers=layers, pad_token_id=0, **sizes)).eval()
    plan = {"windows": [[2, 1, 3]] * layers, "sinks": 1, "states": [[True, False, True]] * layers}
    model = t2r.swap(base, **(load_recipe("memory-lm").swap | {"feature_size": 4} | options), plan=plan)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "query_weight" in name:  # all are zero before a training
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model.to(DEVICE).requires_grad_(False)


MODELS = {
    "paper-lm": paper_lm,
    "llama": llama,
    "llama, softmax": lambda layers: llama(layers + 1, softmax_layers=list(range(layers))),  # the last is recurrent
    "paper-mt": paper_mt,
    "windows and states": planned,
    "windows and many states": lambda layers: planned(layers, grouped=False),
    "paper-lm, softmax": lambda layers: on_the_engine(paper_lm(layers, "")),
}
KERNELS = {
    "paper-lm": (7, 13),
    "llama": (8, 11),
    "llama, softmax": (8, 26 + 8),
    "paper-mt": (13, 15),
    "windows and states": (8, 21),
    "windows and many states": (10, 21),
    "paper-lm, softmax": (7, 18),
}
"""The numbers of kernels of a layer, and of everything else."""


@pytest.mark.skipif(DEVICE != "cpu", reason="kernels are counted in the interpreter")
@pytest.mark.parametrize("name", MODELS)
def test_the_number_of_kernels(name, monkeypatch):
    counts = []
    for layers in (1, 2):
        step = DecodeStep(MODELS[name](layers).bfloat16(), 2, 16)
        with torch.no_grad(), step.few_kernels(), monkeypatch.context() as patch:
            patch.setitem(registry.PREFERENCE, DEVICE, ("triton",))
            for _ in range(2):  # the first step computes what depends only on the weights
                with counted_kernels(monkeypatch) as kernels:
                    step.forward()
        counts.append(kernels.counts)
    layer = counts[1] - counts[0]
    assert (layer.total(), counts[0].total() - layer.total()) == KERNELS[name], (layer, counts[0])


@pytest.mark.parametrize(
    ("name", "state_dtype"),
    [
        ("windows and states", None),
        pytest.param("windows and states", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("windows and many states", None, marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_a_step_of_windows_and_states_in_kernels(name, state_dtype, monkeypatch):
    """The kernels add the state to the window: until every window was filled, in rows that began at other times. States
    in half precision are rounded by the same random numbers."""
    model = MODELS[name](1)
    results = []
    for backends in ((), ("triton",)):
        step, found = DecodeStep(model, 2, 16, state_dtype=state_dtype), []
        with step.few_kernels(), monkeypatch.context() as patch:
            patch.setitem(registry.PREFERENCE, DEVICE, backends)
            step.reset()
            for n in range(7):
                step.active.copy_(torch.tensor([1, n > 1])[:, None].view_as(step.active))
                step.tokens.copy_(torch.tensor([[3 + n], [5 + 2 * n]]))
                step.forward()
                found.append(step.logits.clone())
        results.append([*found, *(x.clone() for x in step.own.tensors())])
    assert any((x.abs() > 0).any() for x in results[0][7:])
    for one, other in zip(*results, strict=True):
        if one.dtype == torch.bfloat16:  # sums that differ in the last bit of float32 may be rounded to neighbors
            assert (one == other).double().mean() > 0.99
        torch.testing.assert_close(one, other, rtol=1e-4 if one.dtype == torch.float32 else 2.0**-7, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in MODELS), ("paper-lm", torch.bfloat16), ("llama, softmax", torch.bfloat16)],
)
@torch.no_grad()
def test_the_values_of_steps(name, dtype):
    """Steps with fewer kernels compute the same logits and states, in recurrent and in softmax layers."""
    model = MODELS[name](1 if "softmax" in name else 2).to(dtype)
    step = DecodeStep(model, 2, 8)

    def run():
        step.reset()
        step.active.fill_(1)
        for x in (x for layer in step.cross for x in layer.tensors().values()):
            x.copy_(torch.linspace(0.1, 1, x.numel()).view(x.shape))
        for tokens in ([[3], [5]], [[7], [11]], [[13], [17]]):
            step.tokens.copy_(torch.tensor(tokens))
            step.forward()
        return [x.clone() for x in (step.logits, *step.own.tensors())]

    expected, children = run(), [dict(vars(module)) for module in model.modules()]
    step.reset()
    with step.few_kernels():
        found = run()
    assert [dict(vars(module)) for module in model.modules()] == children
    # Weights have a standard deviation of 0.02, so that logits are small.
    near = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.01}
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **near)
    assert step.logits.abs().max() > 0.1
