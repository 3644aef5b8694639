"""The numbers of layers and experts in a configuration are compared with the weights before a model is built."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import t2r
from families import tiny
from t2r.errors import T2RError
from t2r.storage.saved_sizes import check_sizes, saved_shapes


def test_shapes_are_read_from_headers(tmp_path):
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(())}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    save_file({"c": torch.zeros(7)}, tmp_path / "b.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:20])
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "long.safetensors").write_bytes(b"\xff" * 20)
    (tmp_path / "list.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]")
    assert sorted(saved_shapes(tmp_path)) == [(), (2, 3), (7,)]


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"n_layer": 1000, "vision_config": {"num_hidden_layers": 24}}, None),
        ({"n_layer": 1001}, "n_layer is 1,001, but its weights have 3 tensors"),
        ({"text_config": {"num_hidden_layers": 10**12}}, "num_hidden_layers is 1,000,000,000,000"),
        ({"attention_types": [[["global"], 10**9]]}, "attention_types is 1,000,000,000"),
        ({"num_experts": 20_000}, None),  # the rows of a tensor
        ({"num_experts": 20_001}, "num_experts is 20,001"),
        ({"num_hidden_layers": 1e308}, "num_hidden_layers is"),
        ({"num_hidden_layers": float("inf")}, "num_hidden_layers is"),
        ({"num_hidden_layers": float("nan")}, None),  # the configuration refuses it
        ({"num_hidden_layers": "many", "n_layer": None, "vocab_size": 10**12}, None),
    ],
)
def test_counts_beyond_the_weights_are_refused(tmp_path, fields, refused):
    save_file({"a": torch.zeros(20_000, 1), "b": torch.zeros(2), "c": torch.zeros(2)}, tmp_path / "model.safetensors")
    if refused is None:
        check_sizes(str(tmp_path), fields)
        return
    with pytest.raises(T2RError, match=refused):
        check_sizes(str(tmp_path), fields)


def test_without_weights_here(tmp_path):
    check_sizes("some/model", {"num_hidden_layers": 1000})
    with pytest.raises(T2RError, match="num_hidden_layers is 2,000, but at most 1,000 are supported"):
        check_sizes("some/model", {"num_hidden_layers": 2000})
    (tmp_path / "config.json").write_text(json.dumps({}))
    check_sizes(str(tmp_path), {})


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_transformers_refuses_them_too(tmp_path, model_type):
    """A configuration of Qwen would write down the kind of each of its layers."""
    model = t2r.swap(tiny(model_type), feature_size=4)
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["base_config"] |= {"num_hidden_layers": 10**9, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for read in (AutoConfig, t2r.T2RConfig, AutoModelForCausalLM, type(model)):
        with pytest.raises(T2RError, match="num_hidden_layers is 1,000,000,000, but its weights have"):
            read.from_pretrained(str(tmp_path))
