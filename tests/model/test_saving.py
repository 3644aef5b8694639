"""Swapped models are saved and loaded like other Hugging Face models. Incomplete ones are rejected."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import accelerate
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    LlamaForCausalLM,
)

import t2r
from families import FAMILIES, POSITIONS, VOCABULARY, batch, is_seq2seq, tiny
from processes import same_threads
from t2r.attention.recurrence import recurrent_sites
from t2r.config import FORMAT, WITHOUT_PLAN
from t2r.feature_maps import FEATURE_MAPS
from t2r.hub import load_model
from t2r.model.card import model_card

FIXTURES = Path(__file__).parents[1] / "fixtures"
both = pytest.mark.parametrize("model_type", ["gpt2", "llama", "marian"])


def swapped(model_type, dtype=torch.float64, **options):
    return t2r.swap(tiny(model_type, dtype), **{"feature_size": 8, "recurrent": "both", "init": "identity"} | options)


def auto(model_type):
    return AutoModelForSeq2SeqLM if is_seq2seq(model_type) else AutoModelForCausalLM


@torch.no_grad()
def logits(model, model_type):
    return model(**batch(model_type), use_cache=False).logits


def assert_same(actual, expected, model_type):
    assert type(actual) is type(expected)
    assert not actual.training
    mine, theirs = actual.state_dict(), expected.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert torch.equal(logits(actual, model_type), logits(expected, model_type))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Return the folder of a saved llama with a softmax layer. Tests must not modify it; see `changed`."""
    folder = tmp_path_factory.mktemp("llama")
    swapped("llama", torch.float32, softmax_layers=[1]).save_pretrained(folder)
    return folder


@pytest.fixture
def changed(llama, tmp_path):
    """Return a modified copy of the folder."""

    def change(config=None, tensors=None):
        for file in llama.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        if config is not None:
            fields = json.loads((llama / "config.json").read_text())
            config(fields)
            (tmp_path / "config.json").write_text(json.dumps(fields))
        if tensors is not None:
            held = load_file(llama / "model.safetensors")
            tensors(held)
            save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return tmp_path

    return change


# --- Round trip ---------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_a_saved_model_is_loaded(model_type, feature_map, tmp_path):
    """The random vectors of rfa and performer are buffers and must be restored too."""
    size = None if feature_map == "elu" else 8
    model = t2r.swap(tiny(model_type), feature_map=feature_map, feature_size=size, softmax_layers=[1], seed=7)
    with torch.no_grad():
        for site in recurrent_sites(model):  # as if trained, with vectors drawn by another version
            for tensor in (*site.feature_map.parameters(), *site.feature_map.buffers()):
                tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(tmp_path)
    again = auto(model_type).from_pretrained(tmp_path)
    assert_same(again, model, model_type)
    assert again.t2r_config.feature_map == feature_map
    assert again.t2r_config.softmax_layers == [1]
    assert not isinstance(again.config, t2r.T2RConfig)  # the configuration of the base model
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_a_base_model_from_a_folder_is_saved_swapped_and_loaded(model_type, tmp_path):
    """transformers renames tensors of some families when it loads them, and remembers that when it saves them."""
    tiny(model_type, torch.float32).save_pretrained(tmp_path / "base")
    model = t2r.swap(load_model(str(tmp_path / "base"), dtype="float32"), feature_size=4).eval()
    for folder in ("once", "twice"):
        model.save_pretrained(tmp_path / folder)
        again = load_model(str(tmp_path / folder), dtype="float32")
        assert_same(again, model, model_type)
        model = again


@both
def test_shards(model_type, tmp_path):
    model = swapped(model_type)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    assert_same(auto(model_type).from_pretrained(tmp_path), model, model_type)


def test_the_task_classes_load_too(llama, tmp_path):
    expected = AutoModelForCausalLM.from_pretrained(llama)
    assert_same(t2r.T2RForCausalLM.from_pretrained(llama), expected, "llama")
    assert_same(t2r.T2RForCausalLM.from_pretrained(str(llama), dtype="auto"), expected, "llama")
    model, info = AutoModelForCausalLM.from_pretrained(llama, output_loading_info=True)
    assert_same(model, expected, "llama")
    assert not info["missing_keys"]
    swapped("marian").save_pretrained(tmp_path)
    assert isinstance(t2r.T2RForSeq2SeqLM.from_pretrained(tmp_path), t2r.T2RForSeq2SeqLM)


def test_a_config_can_be_used_again(llama):
    config = AutoConfig.from_pretrained(llama)
    before = config.to_json_string(use_diff=False)
    first = AutoModelForCausalLM.from_pretrained(llama, config=config)
    assert_same(AutoModelForCausalLM.from_pretrained(llama, config=config), first, "llama")
    fresh = AutoModelForCausalLM.from_config(config)
    assert type(AutoModelForCausalLM.from_config(config)) is type(fresh) is type(first)
    assert fresh.state_dict().keys() == first.state_dict().keys()
    assert config.to_json_string(use_diff=False) == before


def test_saving_over_a_folder(tmp_path):
    first, second = swapped("llama"), swapped("llama", seed=5, feature_map="hedgehog")
    first.save_pretrained(tmp_path, max_shard_size="40KB")
    second.save_pretrained(tmp_path, max_shard_size="40KB")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), second, "llama")
    first.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.tmp"))
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), first, "llama")


def test_generation_settings_are_kept(tmp_path):
    model = swapped("llama")
    model.generation_config.temperature, model.generation_config.top_k = 0.5, 7
    model.generation_config.do_sample = True
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
    assert (again.temperature, again.top_k, again.do_sample) == (0.5, 7, True)


@pytest.mark.parametrize("model_type", ["fsmt", "marian", "pegasus"])
def test_longer_tables_of_positions_are_not_saved(model_type, tmp_path):
    """Long generation extends the table of sinusoidal positions, which is not in the configuration."""
    model = swapped(model_type, torch.float32)
    ids = batch(model_type, size=1)["input_ids"]
    model.generate(ids, max_length=POSITIONS + 6, do_sample=False, eos_token_id=None)
    model.save_pretrained(tmp_path)
    again = auto(model_type).from_pretrained(tmp_path)
    assert torch.equal(logits(again, model_type), logits(model, model_type))


# --- Files --------------------------------------------------------------------------------------------------


@both
def test_the_saved_configuration(model_type, tmp_path):
    base = tmp_path / "base"
    tiny(model_type).save_pretrained(base)
    model = t2r.swap(auto(model_type).from_pretrained(base), feature_size=8, recurrent="both")
    model.save_pretrained(tmp_path / "out")
    text = (tmp_path / "out" / "config.json").read_text()
    fields = json.loads(text)
    assert fields["model_type"] == "t2r"
    assert fields["format"] == WITHOUT_PLAN
    assert fields["t2r_version"] == t2r.__version__
    assert fields["architectures"] == ["T2RForSeq2SeqLM" if is_seq2seq(model_type) else "T2RForCausalLM"]
    assert fields["dtype"] == "float64"
    assert fields["base_config"]["model_type"] == model_type
    assert fields["base_config"]["architectures"] == [type(tiny(model_type)).__name__]
    assert fields["is_encoder_decoder"] == is_seq2seq(model_type)
    assert str(tmp_path) not in text, "a path of this machine"
    private = [f for f in (*fields, *fields["base_config"]) if f.startswith("_") and f != "_name_or_path"]
    assert not private
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert isinstance(config, t2r.T2RConfig)
    assert config.base_config.vocab_size == VOCABULARY
    assert config.get_text_config().vocab_size == VOCABULARY


def card_of(folder):
    _, head, body = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(head), body


def test_the_model_card(tmp_path):
    base, first, second = tmp_path / "tiny-base", tmp_path / "first", tmp_path / "second"
    tiny("llama").save_pretrained(base)
    (base / "README.md").write_text("---\nlicense: cc-by-4.0\ntags: [x]\n---\n# Tiny\n")
    t2r.swap(AutoModelForCausalLM.from_pretrained(base), feature_map="hedgehog", softmax_layers=[2]).save_pretrained(
        first
    )
    AutoModelForCausalLM.from_pretrained(first).save_pretrained(second)  # for example after more training
    for folder in (first, second):
        metadata, body = card_of(folder)
        assert metadata["license"] == "cc-by-4.0"
        assert metadata["base_model"] == "tiny-base"
        assert metadata["library_name"] == "t2r"
        assert "| feature_map | hedgehog |" in body
        assert "| softmax_layers | [2] |" in body
        assert "cc-by-4.0" in body
        assert t2r.__version__ in body
    (first / "README.md").write_text("my own words")
    AutoModelForCausalLM.from_pretrained(second).save_pretrained(first)
    assert (first / "README.md").read_text() == "my own words"


@pytest.mark.parametrize(
    ("model_type", "options", "softmax"),
    [
        ("gpt2", {}, None),
        ("gpt2", {"softmax_layers": [2]}, "Softmax attention remains in 1 of 3 layers"),
        ("marian", {}, None),
        ("marian", {"recurrent": "causal"}, "Cross attention stays exact: it keeps the keys and values of the source"),
        ("marian", {"recurrent": "cross"}, "Softmax attention remains in 3 of 3 layers"),
    ],
)
def test_the_model_card_says_what_grows_with_the_length(model_type, options, softmax):
    card = model_card(t2r.swap(tiny(model_type), **{"feature_size": 4, "recurrent": "both"} | options))
    assert ("it generates in time linear in the length and with a state of fixed size." in card) == (softmax is None)
    assert softmax is None or softmax in card


@pytest.mark.parametrize(("model_type", "tag"), [("gpt2", "text-generation"), ("marian", "text2text-generation")])
def test_the_model_card_has_the_tag_of_a_pipeline(model_type, tag, tmp_path):
    tiny(model_type, torch.float32).save_pretrained(tmp_path / "base")
    for named in (tag, "translation"):
        auto = AutoModelForSeq2SeqLM if model_type == "marian" else AutoModelForCausalLM
        model = t2r.swap(auto.from_pretrained(tmp_path / "base"), feature_size=8, recurrent="both")
        model.save_pretrained(tmp_path / named)
        assert f"pipeline_tag: {named}\n" in (tmp_path / named / "README.md").read_text()
        (tmp_path / "base" / "README.md").write_text("---\npipeline_tag: translation\n---\n")


@pytest.mark.parametrize("card", [None, "# no metadata", "---\nlicense: [unclosed\n---\n", "---\njust words\n---\n"])
def test_a_base_model_without_a_license(card, tmp_path):
    tiny("gpt2").save_pretrained(tmp_path / "base")
    if card is not None:
        (tmp_path / "base" / "README.md").write_text(card)
    model = t2r.swap(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), feature_size=8)
    model.save_pretrained(tmp_path / "out")
    metadata, body = card_of(tmp_path / "out")
    assert "license" not in metadata
    assert "see the base model's page" in body


def test_a_failing_save_leaves_no_base_model_behind(tmp_path, monkeypatch):
    """The saved configuration is a complete T2RConfig. With the base model's, softmax attention would be loaded."""
    model = swapped("llama")
    model.save_pretrained(tmp_path)

    def full(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    with pytest.raises(OSError, match="no space left"):
        model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "t2r"
    assert "save_pretrained" not in vars(model.config)
    monkeypatch.undo()
    before = (tmp_path / "config.json").read_text()
    monkeypatch.setattr(Path, "replace", full)  # the text is written but cannot be renamed
    model.t2r_config.seed = 9
    with pytest.raises(OSError, match="no space left"):
        model.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == before
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with pytest.raises(t2r.T2RError, match="is a file"):
        model.save_pretrained(tmp_path / "file")


# --- Other processes ----------------------------------------------------------------------------------------


LOADS = """
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    for auto, name in ((AutoModelForCausalLM, "llama"), (AutoModelForSeq2SeqLM, "marian")):
        config = AutoConfig.from_pretrained(sys.argv[1] + "/" + name, **options)
        assert config.model_type == "t2r", config
        model = auto.from_pretrained(sys.argv[1] + "/" + name, **options)
        held = load_file(sys.argv[1] + "/" + name + "/expected.safetensors")
        expected = held.pop("logits")
        assert (model(**held).logits - expected).abs().max() < 1e-4
        model.save_pretrained(sys.argv[2] + name)
        again = auto.from_pretrained(sys.argv[2] + name, **options)
        assert (again(**held).logits - expected).abs().max() < 1e-4
    # `transformers serve` looks for the class here, also if transformers was imported first and loaded itself again.
    assert transformers.T2RForCausalLM is sys.modules["t2r"].T2RForCausalLM
    with open(sys.argv[2], "rb") as file:
        model, ids, expected = pickle.load(file)
    assert torch.equal(model(ids).logits, expected)
    print(sorted(name for name in ("t2r", "t2r.model.modeling") if name in sys.modules))
"""


@pytest.mark.parametrize(
    "first",
    [
        pytest.param("import t2r", marks=pytest.mark.slow),
        pytest.param("import transformers.models.auto.modeling_auto, t2r", marks=pytest.mark.slow),
        "options = remote",
    ],
)
def test_a_new_process_loads_it(first, tmp_path):
    """With `import t2r` before or after transformers, or with the code in the folder."""
    model, ids = swapped("gpt2"), batch("gpt2")["input_ids"]
    with (tmp_path / "model").open("wb") as file:
        pickle.dump((model, ids, model(ids).logits.detach()), file)
    script = "import pickle, sys, torch\nfrom safetensors.torch import load_file\n"
    script += f"options, remote = {{}}, {{'trust_remote_code': True}}\n{first}\n{textwrap.dedent(LOADS)}"
    environment = same_threads(HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    done = subprocess.run(
        [sys.executable, "-c", script, str(FIXTURES / "format-1"), str(tmp_path / "model")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['t2r', 't2r.model.modeling']"


# --- Formats ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "folder",
    [pytest.param(folder, id=f"{folder.parent.name}-{folder.name}") for folder in sorted(FIXTURES.glob("format-*/*"))],
)
@torch.no_grad()
def test_what_was_saved_once_loads_forever(folder):
    config = AutoConfig.from_pretrained(folder)
    assert folder.parent.name == f"format-{config.format}"
    load = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    inputs = load_file(folder / "expected.safetensors")
    expected = inputs.pop("logits")
    model = load.from_pretrained(folder)
    assert (model(**inputs, use_cache=False).logits - expected).abs().max() < 1e-4
    assert (model(**inputs, use_cache=True).logits - expected).abs().max() < 1e-4


def test_every_format_has_fixtures():
    folders = {folder.name for folder in FIXTURES.glob("format-*")}
    assert folders == {f"format-{number}" for number in range(1, FORMAT + 1)}
    for folder in FIXTURES.glob("format-*/*"):
        assert sum(file.stat().st_size for file in folder.iterdir()) < 60_000


def test_a_newer_format_is_refused(changed):
    folder = changed(lambda fields: fields.update(format=FORMAT + 1, t2r_version="9.9"))
    for load in (AutoConfig, AutoModelForCausalLM, t2r.T2RForCausalLM):
        with pytest.raises(
            t2r.T2RError,
            match=rf"format {FORMAT + 1} by t2r 9\.9.*reads up to format {FORMAT}: upgrade",
        ):
            load.from_pretrained(folder)


# --- Incomplete models are rejected -------------------------------------------------------------------------

TENSOR = "model.layers.0.self_attn.feature_map.key_map.weight"


def refused(folder, match, load=AutoModelForCausalLM, error=t2r.T2RError):
    with pytest.raises(error, match=match) as caught:
        load.from_pretrained(folder)
    return str(caught.value)


def test_a_missing_tensor(changed):
    refused(changed(tensors=lambda held: held.pop(TENSOR)), f"missing: {TENSOR}")


def test_a_missing_tensor_of_the_base_model(changed):
    refused(changed(tensors=lambda held: held.pop("model.layers.2.mlp.up_proj.weight")), "layers.2.mlp.up_proj")


def test_an_unexpected_tensor(changed):
    folder = changed(tensors=lambda held: held.update({"model.layers.0.extra": torch.zeros(2)}))
    refused(folder, r"unexpected: model\.layers\.0\.extra")


def test_a_misshaped_tensor(changed):
    refused(changed(tensors=lambda held: held.update({TENSOR: torch.zeros(2, 4, 8)})), f"shape: {TENSOR}")


def test_maps_of_a_layer_that_the_configuration_keeps(changed):
    refused(changed(lambda fields: fields.update(softmax_layers=[0, 1])), "unexpected: model.layers.0")
    refused(changed(lambda fields: fields.update(softmax_layers=[])), "missing: model.layers.1")


@pytest.mark.parametrize("left", [0, 4, 200, 20_000])
def test_a_truncated_file(left, changed):
    folder = changed()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    refused(folder, str(folder))


def test_a_missing_shard(tmp_path):
    swapped("llama", torch.float32).save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*"))[1]
    shard.unlink()
    refused(tmp_path, shard.name)


def test_no_weights(changed):
    folder = changed()
    (folder / "model.safetensors").unlink()
    refused(folder, "model.safetensors")


def test_a_plain_model_is_not_a_t2r_model(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    refused(tmp_path, "not a saved t2r model", load=t2r.T2RForCausalLM)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is LlamaForCausalLM


def test_a_model_that_reads_images_is_loaded_by_each_of_its_auto_classes(tmp_path):
    model, inputs = swapped("gemma3"), batch("gemma3")
    model.save_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)(**inputs).logits
    for load in (AutoModelForImageTextToText, AutoModelForMultimodalLM):
        loaded = load.from_pretrained(tmp_path)
        assert type(loaded) is type(model)
        assert torch.equal(loaded(**inputs).logits, expected)


def test_the_wrong_task(llama, tmp_path):
    refused(llama, "is a T2RForCausalLM, not a T2RForSeq2SeqLM", load=AutoModelForSeq2SeqLM)
    refused(llama, "is a T2RForCausalLM, not a T2RForImageTextToText", load=AutoModelForImageTextToText)
    swapped("marian").save_pretrained(tmp_path)
    refused(tmp_path, "is a T2RForSeq2SeqLM, not a T2RForCausalLM")


def test_an_unknown_base_model(changed):
    folder = changed(lambda fields: fields["base_config"].update(architectures=["GhostForCausalLM"]))
    refused(folder, "no model class GhostForCausalLM")
    folder = changed(lambda fields: fields["base_config"].update(model_type="ghost"))
    refused(folder, "ghost", error=ValueError)
    refused(changed(lambda fields: fields["base_config"].pop("model_type")), "has no model_type")
    refused(changed(lambda fields: fields.pop("base_config")), "has no base_config")


@pytest.mark.parametrize("text", ["", "{", "\x00\x01"])
def test_a_garbage_configuration(text, changed):
    folder = changed()
    (folder / "config.json").write_text(text)
    with pytest.raises((OSError, ValueError, t2r.T2RError)) as caught:
        t2r.T2RForCausalLM.from_pretrained(folder)
    assert "config.json" in str(caught.value)


def test_invalid_options(changed):
    refused(changed(lambda fields: fields.update(feature_map="magic")), "unknown feature map 'magic'")
    refused(changed(lambda fields: fields.update(softmax_layers=[7])), "no layer 7")
    refused(changed(lambda fields: fields.update(format="new")), "format new")


# --- dtypes and devices -------------------------------------------------------------------------------------


def test_dtype(llama):
    for dtype in (torch.bfloat16, "bfloat16"):
        model = AutoModelForCausalLM.from_pretrained(llama, dtype=dtype)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        logits(model, "llama")
    assert AutoModelForCausalLM.from_pretrained(llama, dtype="auto").dtype == torch.float32
    assert AutoModelForCausalLM.from_pretrained(llama).dtype == torch.float32


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, "auto"])
@pytest.mark.parametrize("model_type", ["llama", "marian"])
def test_device_map(model_type, device_map, tmp_path):
    tiny(model_type).save_pretrained(tmp_path / "base")
    expected = swapped(model_type)
    options = {"feature_size": 8, "init": "identity"}
    mapped = auto(model_type).from_pretrained(tmp_path / "base", device_map=device_map)
    model = t2r.swap(mapped, **{"recurrent": "both"} | options)
    assert torch.equal(logits(model, model_type), logits(expected, model_type))
    model.save_pretrained(tmp_path / "out")
    again = auto(model_type).from_pretrained(tmp_path / "out", device_map=device_map)
    assert_same(again, expected, model_type)
    assert again.device.type == "cpu"


def test_a_dispatched_model(tmp_path):
    """Layers on several devices have hooks around their forward, which a swap must keep."""
    base = tiny("llama")
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "cpu" for i in range(3)}
    accelerate.dispatch_model(base, places, force_hooks=True)
    model = t2r.swap(base, feature_size=8, recurrent="both", init="identity")
    assert torch.equal(logits(model, "llama"), logits(swapped("llama"), "llama"))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
    assert set(again._no_split_modules) == {"LlamaDecoderLayer"}
    places = accelerate.infer_auto_device_map(
        again, {"cpu": 10**6}, no_split_module_classes=list(again._no_split_modules)
    )
    assert set(places.values()) == {"cpu"}


def test_offloaded_weights_cannot_be_swapped():
    base = tiny("llama")
    accelerate.cpu_offload(base, execution_device=torch.device("cpu"))
    with pytest.raises(t2r.T2RError, match="offloaded"):
        t2r.swap(base, feature_size=8)


def test_a_model_offloaded_to_disk_runs(llama, tmp_path):
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" for i in range(3)}
    model = AutoModelForCausalLM.from_pretrained(llama, device_map=places, offload_folder=tmp_path)
    expected = logits(AutoModelForCausalLM.from_pretrained(llama), "llama")
    assert torch.equal(logits(model, "llama"), expected)


# --- Behavior of a Hugging Face model -----------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["gpt2", "bart", "marian", "t5"])
def test_tied_weights_stay_tied(model_type, tmp_path):
    def assert_tied(model):
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        assert table.data_ptr() == head.data_ptr()
        return table.shape[0]

    model = swapped(model_type)
    assert assert_tied(tiny(model_type)) == assert_tied(model) == VOCABULARY
    model.save_pretrained(tmp_path)
    again = auto(model_type).from_pretrained(tmp_path)
    assert assert_tied(again) == VOCABULARY
    again.resize_token_embeddings(VOCABULARY + 3)
    assert assert_tied(again) == VOCABULARY + 3
    again.save_pretrained(tmp_path)
    resized = auto(model_type).from_pretrained(tmp_path)
    assert assert_tied(resized) == VOCABULARY + 3
    assert_same(resized, again, model_type)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "marian", "fsmt", "t5"])
def test_copies_and_pickles(model_type):
    model = swapped(model_type, softmax_layers=[1])
    assert_same(copy.deepcopy(model), model, model_type)
    assert_same(pickle.loads(pickle.dumps(model)), model, model_type)


def test_loading_leaves_the_random_state_alone(llama, tmp_path):
    def state_after(load):
        torch.manual_seed(3)
        load()
        return torch.get_rng_state()

    tiny("llama", torch.float32).save_pretrained(tmp_path)
    untouched = state_after(lambda: None)
    assert torch.equal(state_after(lambda: AutoModelForCausalLM.from_pretrained(llama)), untouched)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for feature_map in FEATURE_MAPS:
        assert torch.equal(state_after(lambda f=feature_map: t2r.swap(copy.deepcopy(model), feature_map=f)), untouched)


def test_the_seed_alone_decides_the_maps():
    torch.manual_seed(1)
    first = swapped("llama", feature_map="performer", init=None).state_dict()
    torch.manual_seed(2)
    second = swapped("llama", feature_map="performer", init=None).state_dict()
    third = swapped("llama", feature_map="performer", init=None, seed=1).state_dict()
    name = "model.layers.0.self_attn.feature_map.vectors"
    assert torch.equal(first[name], second[name])
    assert not torch.equal(first[name], third[name])
    assert not torch.equal(first[name], first[name.replace("0", "1")])


def test_an_adapter_is_saved_as_an_adapter(tmp_path):
    """transformers then saves no model configuration, and neither does t2r."""
    peft = pytest.importorskip("peft")
    model = swapped("llama")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_config.json").exists()
    assert not (tmp_path / "config.json").exists()


FROZEN = [("gpt2", {"freeze_feature_map": True}), ("t5", {}), ("marian", {}), ("gpt2", {})]


@pytest.mark.parametrize(("model_type", "options"), FROZEN)
def test_what_is_frozen_stays_frozen(model_type, options, tmp_path):
    model = swapped(model_type, **options)
    model.save_pretrained(tmp_path)
    loaded = auto(model_type).from_pretrained(tmp_path)
    expected = {name for name, x in model.named_parameters() if not x.requires_grad}
    assert bool(expected) == (model_type in ("t5", "marian") or bool(options))
    assert {name for name, x in loaded.named_parameters() if not x.requires_grad} == expected
