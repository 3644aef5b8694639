"""Loading of models, configurations and tokenizers from a folder: what is loaded, and which error is raised."""

import json

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError
from safetensors.torch import load_file, save_file

import t2r
from families import tiny
from t2r import hub
from t2r.errors import T2RError
from t2r.hub import INDEX, choose_device, load_config, load_model, need_tokenizer


@pytest.fixture
def folder(tmp_path):
    tiny("gpt2", torch.float64).save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def edit_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("name", "dtype"), [("auto", torch.float64), ("float16", torch.float16)])
def test_a_model_is_loaded_in_evaluation_mode_and_in_a_dtype(folder, name, dtype):
    model = t2r.load(folder, dtype=name, device="cpu")
    assert not any(module.training for module in model.modules())
    assert model.dtype == dtype
    assert t2r.load_tokenizer(folder) is None
    with pytest.raises(T2RError, match="has no tokenizer"):
        need_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2/config.json", "is a file: give the folder of a saved model"),
        ("", "has no config.json: give the folder of a saved model"),
        ("none", "there is no folder"),
    ],
)
def test_sources_that_are_not_models(folder, name, message):
    with pytest.raises(T2RError, match=message):
        load_config(str(folder.parent / name))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": 3}, "is damaged: model_type is 3"),
        ({"model_type": "new"}, "has model type 'new', which this version of transformers does not support"),
        ({"architectures": ["GPT2ForSequenceClassification"]}, "does not generate text: give a language model"),
    ],
)
def test_configurations_that_cannot_be_loaded(folder, fields, message):
    edit_config(folder, **fields)
    with pytest.raises(T2RError, match=message):
        load_model(str(folder))


def test_missing_weights(folder):
    """transformers initializes them at random, with a warning."""
    edit_weights(folder, lambda weights: weights.pop("transformer.h.1.mlp.c_fc.weight"))
    with pytest.raises(T2RError, match=r"missing: transformer\.h\.1\.mlp\.c_fc\.weight"):
        load_model(str(folder))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(folder, value):
    edit_weights(folder, lambda weights: weights["transformer.ln_f.weight"].fill_(value))
    with pytest.raises(T2RError, match=r"has NaN or infinite weights in transformer\.ln_f\.weight"):
        load_model(str(folder))


def test_truncated_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(T2RError, match="cannot be loaded: its weights are damaged or truncated") as refusal:
        load_model(str(folder))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "it has no valid weight_map"),
        ('{"weight_map": {"a": "../other.safetensors"}}', "refers to '../other.safetensors', which is not"),
        ('{"weight_map": {"a": "model.bin"}}', "refers to 'model.bin', which is not"),
    ],
)
def test_an_index_of_shards_refers_to_files_in_its_folder(folder, index, message):
    (folder / INDEX).write_text(index)
    with pytest.raises(T2RError, match=message):
        load_model(str(folder))


@pytest.mark.parametrize("name", ["meta", "nothing"])
def test_devices_that_cannot_compute(name):
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(T2RError, match=f"device '{name}' is not available"):
        choose_device(name)


@pytest.mark.parametrize(("cause", "reached"), [(RemoteEntryNotFoundError, True), (LocalEntryNotFoundError, False)])
def test_a_tokenizer_that_cannot_be_reached_is_not_one_that_does_not_exist(cause, reached, monkeypatch):
    def cached_file(*_, **__):
        raise OSError("we could not connect\nto the Hub") from cause.__new__(cause)

    monkeypatch.setattr(hub, "cached_file", cached_file)
    if reached:
        assert t2r.load_tokenizer("org/name") is None
    else:
        with pytest.raises(
            T2RError,
            match=r"org/name is not a local folder, and from the Hub it cannot be loaded: we could not connect$",
        ):
            t2r.load_tokenizer("org/name")
