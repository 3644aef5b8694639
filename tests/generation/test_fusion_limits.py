"""Models that a step with fewer kernels must compute as they are: clipped, hooked, quantized, copied, in threads."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from families import tiny
from t2r import compat
from t2r.generation.engine.fusion import available
from t2r.generation.engine.fusion.attention import parts_of, reproduced
from t2r.generation.engine.fusion.layers import fuse_layers
from t2r.generation.engine.fusion.norms import fuse_norms
from t2r.generation.engine.fusion.products import join_products
from t2r.generation.engine.fusion.replacing import Replacing, sample
from t2r.generation.engine.fusion.sums import DeferredSums
from t2r.surgery.adapters import family_of

pytestmark = pytest.mark.skipif(not available(), reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Gated(nn.Module):
    """A feed-forward layer whose instances may differ by a factor."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(6, 6) for _ in range(3))
        self.act_fn, self.factor = nn.SiLU(), factor

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * self.factor


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.activation_fn, self.drop, self.fc2 = nn.Linear(6, 6), nn.ReLU(), nn.Dropout(), nn.Linear(6, 6)

    def forward(self, x):
        return self.fc2(self.drop(self.activation_fn(self.fc1(x))))


class ShiftedRMSNorm(nn.Module):
    """A norm whose instances may differ by a shift of their weight."""

    def __init__(self, shift):
        super().__init__()
        self.weight, self.eps, self.shift = nn.Parameter(torch.rand(6)), 1e-6, shift

    def forward(self, x):
        return (self.weight + self.shift) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


@torch.no_grad()
def test_clipped_projections():
    """Values that are clipped only if they are large (OLMo) are noticed."""
    model = tiny("olmo", torch.float64).to(DEVICE).eval()
    module = next(iter(family_of(model).sites(model))).module
    compat.set_attention_implementation(model, "t2r")
    rotary = next(m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding"))
    for clip, fits in ((None, True), (1000.0, False)):
        model.config.clip_qkv = clip
        assert (parts_of(module) is not None and reproduced(module, rotary)) == fits


@torch.no_grad()
def test_instances_of_a_class_may_differ():
    layers = nn.ModuleList([Gated(), Gated(0.5), ShiftedRMSNorm(0.0), ShiftedRMSNorm(0.5)]).to(DEVICE).eval()
    x = torch.randn(3, 1, 6, device=DEVICE)
    expected = [layer(x) for layer in layers]
    with Replacing() as replacing:
        fuse_layers(layers, replacing)
        fuse_norms(layers, replacing, DeferredSums())
        assert list(replacing.modules.values()) == [layers[0], layers[2]]
        for layer, value in zip(layers, expected, strict=True):
            torch.testing.assert_close(layer(x), value)


@pytest.mark.parametrize("name", ["fc1", "activation_fn"])
@torch.no_grad()
def test_hooks_of_the_parts_of_a_layer(name):
    layer, called, x = Plain().to(DEVICE).eval(), [], torch.randn(3, 1, 6, device=DEVICE)
    with Replacing() as replacing:
        fuse_layers(layer, replacing)
        assert list(replacing.modules.values()) == [layer]
    hook = layer.get_submodule(name).register_forward_hook(lambda *args: called.append(name))
    with Replacing() as replacing:
        fuse_layers(layer, replacing)
        called.clear()
        layer(x)
        assert called == [name]
    hook.remove()
    layer.drop.train()
    with Replacing() as replacing:
        fuse_layers(layer, replacing)
        assert not replacing.modules


@torch.no_grad()
def test_double_precision_stays():
    layer, x = Gated().to(DEVICE, torch.float64).eval(), torch.randn(3, 1, 6, dtype=torch.float64, device=DEVICE)
    expected = layer(x)
    with Replacing() as replacing:
        fuse_layers(layer, replacing)
        torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


class Quantized(torch.Tensor):
    """A weight that supports linear layers only, as quantized weights do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (nn.functional.pad, torch.cat, torch._addmm_activation):
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@torch.no_grad()
def test_weights_of_other_types():
    """torchao quantizes the weights of linear layers, and tensor parallelism distributes them."""
    layers = nn.ModuleList([Gated(), Plain(), ShiftedRMSNorm(0.0)]).to(DEVICE).eval()
    for module in (m for m in layers.modules() if hasattr(m, "weight")):
        module.weight = nn.Parameter(module.weight.data.as_subclass(Quantized))
    x = torch.randn(3, 1, 6, device=DEVICE)
    expected = [layer(x) for layer in layers]
    with Replacing() as replacing:
        join_products(layers, replacing, lambda: [layer(x) for layer in layers])
        fuse_layers(layers, replacing)
        fuse_norms(layers, replacing, DeferredSums())
        for layer, value in zip(layers, expected, strict=True):
            torch.testing.assert_close(layer(x), value)


@torch.no_grad()
def test_an_input_that_changes_between_two_layers():
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x):
            y = self.first(x)
            x += 1
            return y, self.second(x), self.third(x)

    model, x = Changing().to(DEVICE).eval(), torch.randn(3, 1, 6, device=DEVICE)
    expected = model(x.clone())
    with Replacing() as replacing:
        join_products(model, replacing, lambda: model(x.clone()))
        assert list(replacing.modules.values()) == [model.second, model.third]
        for found, value in zip(model(x.clone()), expected, strict=True):
            torch.testing.assert_close(found, value)


def test_samples_do_not_depend_on_the_default_device():
    like = torch.empty(0)
    with torch.device("meta"):
        assert sample(4, like).device == like.device


# --- Threads and copies -------------------------------------------------------------------------------------


def test_two_threads_replace_the_same_forward():
    """The second one waits for the first."""
    layer, events, started = nn.Linear(2, 2).eval(), [], threading.Event()

    def second():
        started.set()
        with Replacing() as replacing:
            events.append("second")
            replacing.replace(layer, lambda x: x)

    with Replacing() as replacing:
        thread = threading.Thread(target=second)
        thread.start()
        assert started.wait(10)
        thread.join(0.05)
        replacing.replace(layer, lambda x: x)
        events.append("first")
    thread.join(10)
    assert events == ["first", "second"]
    assert "forward" not in vars(layer)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
@torch.no_grad()
def test_copies_of_a_model_while_forwards_are_replaced(copied):
    model, x = nn.Sequential(nn.Linear(2, 2)).eval(), torch.rand(1, 2)
    expected = model(x)
    with Replacing() as replacing:
        replacing.replace(model[0], lambda x: 0 * x)
        assert not model(x).any()
        same = copied(model)
        model[0].weight.zero_()
    assert torch.equal(same(x), expected)
    assert Replacing().replaceable(same[0])
