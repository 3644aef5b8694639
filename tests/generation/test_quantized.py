"""Models with quantized weights: loading, decoding and saved states work, and what would train them is refused."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

import t2r
from families import PAD, batch, tiny
from t2r.attention.state_file import fingerprint
from t2r.generation.engine.step import DecodeStep
from t2r.hub import refuse_not_finite
from t2r.pipelines.common import refuse_quantized

HOW = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": PAD}


class Int8(torch.Tensor):
    """A weight like those of torchao, which is not among the packages of the tests: it is two tensors, and supports
    linear layers only."""

    @staticmethod
    def __new__(cls, weight: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=weight.device)

    def __init__(self, weight: torch.Tensor) -> None:
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        self.values = (weight / self.scale).round().to(torch.int8)

    def __tensor_flatten__(self) -> Any:
        return ["values", "scale"], None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear:
            x, weight, *bias = args
            y = linear(x, weight.values.to(x.dtype)) * weight.scale.flatten()
            return y if not bias or bias[0] is None else y + bias[0]
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


def stand_in(folder: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for layer in model.model.layers.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(Int8(layer.weight.detach()), requires_grad=False)
    return model


def by_torch(folder: Any) -> Any:
    quantization = pytest.importorskip("torch.ao.quantization")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        return quantization.quantize_dynamic(AutoModelForCausalLM.from_pretrained(folder).eval(), {nn.Linear})


def by_torchao(name: str) -> Any:
    def load(folder: Any) -> Any:
        quantization = pytest.importorskip("torchao.quantization")
        from transformers import TorchAoConfig

        config = TorchAoConfig(getattr(quantization, name)())
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).eval()

    return load


WAYS = {
    "a stand-in": stand_in,
    "quantize_dynamic": by_torch,
    "torchao, weights": by_torchao("Int8WeightOnlyConfig"),
    "torchao, weights and inputs": by_torchao("Int8DynamicActivationInt8WeightConfig"),
}


@pytest.fixture(params=WAYS)
def quantized(request, tmp_path):
    t2r.swap(tiny("llama", torch.float32), feature_size=8).save_pretrained(tmp_path / "rnn")
    return WAYS[request.param](tmp_path / "rnn")


def test_the_recorded_step_generates_what_the_modules_do(quantized, monkeypatch):
    ids = batch("llama")["input_ids"][:1]
    assert DecodeStep(quantized, 1, None).captured_as == "recording"
    recorded = quantized.generate(ids, **HOW)
    assert torch.equal(t2r.Engine(quantized).generate(ids, **HOW), recorded)
    monkeypatch.setattr("t2r.generation.recorded.LEAST", {})
    assert torch.equal(quantized.generate(ids, **HOW), recorded)


def test_its_weights_are_checked_and_identified(tmp_path):
    t2r.swap(tiny("llama", torch.float32), feature_size=8).save_pretrained(tmp_path / "rnn")
    model = stand_in(tmp_path / "rnn")
    refuse_not_finite("rnn", model)
    before = fingerprint(model)
    model.model.layers[1].mlp.up_proj.weight.scale[0] = torch.nan
    assert fingerprint(model) != before
    with pytest.raises(t2r.T2RError, match=r"NaN or infinite weights in model.layers.1.mlp.up_proj.weight"):
        refuse_not_finite("rnn", model)


def test_it_is_neither_swapped_nor_trained():
    model = tiny("llama", torch.float32)
    refuse_quantized(model)
    model.is_quantized = True  # as transformers marks it
    with pytest.raises(t2r.T2RError, match="quantized weights, which can be neither swapped nor trained"):
        t2r.convert(model, "unused", train="unused.txt")


def test_a_saved_one_is_loaded(tmp_path):
    t2r.swap(tiny("llama", torch.float32), feature_size=8).save_pretrained(tmp_path / "rnn")
    model = WAYS["torchao, weights"](tmp_path / "rnn")
    model.save_pretrained(tmp_path / "int8")
    ids = batch("llama")["input_ids"]
    loaded = t2r.load(tmp_path / "int8")
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0)
    with pytest.raises(t2r.T2RError, match="quantized weights"):
        t2r.convert(tmp_path / "int8", tmp_path / "out", train="unused.txt")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_no_tensors_are_neither_merged_nor_saved(tmp_path):
    t2r.swap(tiny("opt", torch.float32), feature_size=4).save_pretrained(tmp_path / "rnn")
    model = by_torch(tmp_path / "rnn")
    for refused in (
        lambda: t2r.merge(model, force=True),
        lambda: model.save_pretrained(tmp_path / "int8"),
        lambda: fingerprint(model),
        lambda: t2r.swap(by_torch(tiny_folder(tmp_path / "base")), feature_size=4),
    ):
        with pytest.raises(t2r.T2RError, match="are quantized"):
            refused()
    assert not (tmp_path / "int8").exists()


def tiny_folder(folder: Any) -> Any:
    tiny("opt", torch.float32).save_pretrained(folder)
    return folder
