"""Inspections, compared with the real parameters and caches of models."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

import t2r
from families import FAMILIES, VOCABULARY, is_seq2seq, tiny
from t2r.attention.cache import cache_bytes
from t2r.capacity import human
from t2r.feature_maps import FEATURE_MAPS
from t2r.model.merge import merge
from t2r.model.modeling import T2RModel
from t2r.reporting import inspection
from t2r.reporting.inspection import inspect_model
from t2r.reporting.inspection_tables import summary
from t2r.surgery.adapters import family_of

NO_CACHE = ("fsmt",)  # the base model's cache gets only the last token
family = pytest.mark.parametrize("model_type", FAMILIES)
LENGTH = 20


@pytest.fixture
def short(monkeypatch):
    """Lengths at which a tiny model can be run."""
    monkeypatch.setattr(inspection, "LENGTHS", (7, LENGTH))


def read(model, model_type):
    """Return the cache after reading this many tokens, and as many of a source."""
    ids = torch.randint(3, VOCABULARY, (1, LENGTH))
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if is_seq2seq(model_type) else {})
    with torch.no_grad():
        return model(**inputs, use_cache=True).past_key_values


@family
@pytest.mark.parametrize("options", [{}, {"softmax_layers": [1]}], ids=["pure", "kept"])
def test_bytes_match_real_caches(model_type, options, short):
    base = tiny(model_type, torch.float32)
    found = inspect_model(base, feature_size=8, recurrent="both", **options)
    swapped = t2r.swap(tiny(model_type, torch.float32), **{"feature_size": 8, "recurrent": "both"} | options)
    assert found.cache_bytes[LENGTH] == cache_bytes(read(swapped, model_type))
    if not options:
        assert found.cache_bytes[LENGTH] == found.cache_bytes[7] == found.state_bytes
    if model_type not in NO_CACHE:
        assert found.kv_bytes[LENGTH] == cache_bytes(read(base, model_type))


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_state_bytes_of_every_map(feature_map, dtype, short):
    model = t2r.swap(tiny("llama", dtype), feature_map=feature_map)
    assert inspect_model(model).state_bytes == cache_bytes(read(model, "llama"))


@family
def test_parameters(model_type):
    base = tiny(model_type, torch.float32)
    before = sum(p.numel() for p in base.parameters())
    found = inspect_model(base, feature_size=8, recurrent="both")
    model = t2r.swap(tiny(model_type, torch.float32), feature_size=8, recurrent="both")
    assert found.parameters == before
    assert found.parameters_added == sum(p.numel() for p in model.parameters()) - before
    assert found.share == found.parameters_added / before
    for site in found.sites:  # for each key head, feature_size rows of W and as many entries of b
        assert site.parameters_added == 8 * (site.head_dim + 1) * site.num_key_value_heads
    assert [(s.layer, s.cross) for s in found.sites] == [(s.layer, s.cross) for s in family_of(base).sites(base)]
    assert not isinstance(base, T2RModel)  # the model was not modified


def test_a_swapped_model_and_its_folder(tmp_path):
    base = tiny("llama", torch.bfloat16)
    expected = asdict(inspect_model(base, softmax_every=2, grouped=False))
    model = t2r.swap(base, softmax_every=2, grouped=False)
    model.save_pretrained(tmp_path)
    for source in (model, tmp_path, str(tmp_path)):
        found = asdict(inspect_model(source))
        assert found.pop("swapped")
        assert found.pop("model")
        assert found == {k: v for k, v in expected.items() if k not in ("swapped", "model")}


def test_no_weights_are_loaded(tmp_path):
    model = tiny("marian", torch.float16)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    found = inspect_model(tmp_path)
    assert found.dtype == "float16"
    assert found.encoder_layers == 2
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert inspect_model(tmp_path, dtype="float32").kv_bytes == {n: 2 * b for n, b in found.kv_bytes.items()}


def test_ungrouping():
    grouped = inspect_model(tiny("llama", torch.float32))
    other = inspect_model(tiny("llama", torch.float32), grouped=False)
    assert grouped.ungrouped == inspection.Ungrouped(other.parameters_added, other.state_bytes)
    assert other.state_bytes == 2 * grouped.state_bytes
    assert other.ungrouped is None
    assert inspect_model(tiny("gpt2", torch.float32)).ungrouped is None  # no grouped-query attention


def test_a_merged_model():
    model = t2r.swap(tiny("gpt2", torch.float32), feature_size=4)
    before = inspect_model(model)
    merge(model)
    after = inspect_model(model)
    assert after.merged
    assert after.state_bytes == before.state_bytes
    assert after.parameters == before.parameters
    assert after.parameters + after.parameters_added == sum(p.numel() for p in model.parameters())


def test_json_and_tables():
    found = inspect_model(tiny("marian", torch.float32), softmax_layers=[0], recurrent="both")
    assert json.loads(json.dumps(asdict(found)))["kv_bytes"]["4096"] == found.kv_bytes[4096]
    lines = summary(found)
    assert "self attention: 2 of 3 decoder layers recurrent, 1 softmax" in lines
    assert "cross attention: 2 of 3 decoder layers recurrent, 1 softmax" in lines
    assert "encoder: all 2 layers keep softmax attention" in lines


@pytest.mark.parametrize(("model_type", "limit"), [("gpt2", True), ("llama", False)])
def test_a_table_of_positions_limits_what_is_shown(model_type, limit):
    """Lengths beyond the table are listed to compare, but cannot be read."""
    model = tiny(model_type, torch.float32)
    count = model.config.max_position_embeddings
    lines = [line for line in summary(inspect_model(model)) if "positions" in line]
    assert lines == ([f"positions are learned: {count} tokens at most, also after a conversion"] if limit else [])


@pytest.mark.parametrize(
    ("number", "says"), [(7, "7 B"), (1536, "1.5 KiB"), (500 * 1024, "500 KiB"), (3 << 40, "3.0 TiB")]
)
def test_formatting_bytes(number, says):
    assert human(number) == says


def test_inspection_errors(tmp_path):
    from transformers import BertConfig, BertLMHeadModel

    model = BertLMHeadModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9))
    with pytest.raises(t2r.T2RError, match=r"models of type 'bert' cannot be swapped.*llama"):
        inspect_model(model)
    with pytest.raises(t2r.T2RError, match="already swapped: do not give seed"):
        inspect_model(t2r.swap(tiny("gpt2", torch.float32)), seed=1)
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(t2r.T2RError, match=r"type 'vit' cannot be swapped.*llama"):
        inspect_model(tmp_path)


def test_the_source_length_from_which_cross_attention_saves_memory():
    found = t2r.inspect(tiny("marian", torch.float32), feature_size=4, cross_feature_size=16, recurrent="both")
    cross = [site for site in found.sites if site.cross]
    per_token = sum(2 * 4 * site.num_key_value_heads * site.head_dim for site in cross)  # keys and values in float32
    state = sum(site.state_bytes for site in cross)
    length = found.cross_saves_from
    assert (length - 1) * per_token <= state < length * per_token
    assert any(f"{length} tokens or more" in line for line in summary(found))
    assert t2r.inspect(tiny("gpt2")).cross_saves_from is None


def test_cross_attention_stays_exact_and_why_is_said():
    found = t2r.inspect(tiny("marian", torch.float32), recipe="default")
    assert [site.recurrent for site in found.sites] == [not site.cross for site in found.sites]
    assert found.options["recurrent"] == "causal"
    assert found.options["cross_feature_size"] is None  # the recipe's, which is for recurrent cross attention
    token = human(sum(site.kv_bytes[512] for site in found.sites if site.cross) // 512)
    (line,) = [line for line in summary(found) if "--recurrent both" in line]
    assert f"({token} for each source token)" in line
    both = t2r.inspect(tiny("marian", torch.float32), recipe="default", recurrent="both")
    assert both.options["cross_feature_size"] == 32
    assert not any("stays exact" in line for line in summary(both))


def test_layers_that_differ():
    """Totals are those of the largest choice, which the summary says."""
    base = tiny("gemma2", torch.float32)
    one = [inspect_model(base, softmax_layers=[layer]) for layer in range(len(family_of(base).decoder_layers(base)))]
    found = inspect_model(base, softmax_layers="auto:1")
    assert found.cache_bytes[32768] == max(other.cache_bytes[32768] for other in one)
    assert len({other.cache_bytes[32768] for other in one}) > 1
    assert any("bytes are those of the largest" in line for line in summary(found))


def test_the_recipe_of_convert():
    base = tiny("llama", torch.float32)
    found = inspect_model(base, recipe="default", feature_size=8)
    assert (found.options["decay"], found.options["grouped"], found.options["feature_size"]) == (True, False, 8)
    heads = base.config.num_attention_heads * base.config.num_hidden_layers
    assert found.state_bytes == heads * 8 * (found.sites[0].head_dim + 1) * 4  # as in the help of feature_size


def test_memory_by_length():
    model = t2r.swap(tiny("llama", torch.float32), feature_size=8, softmax_layers=[0])
    short, long = inspection.memory_by_length(model, [10, 20])
    for row in (short, long):
        ids = torch.zeros(1, row["tokens"], dtype=torch.long)
        half = model.to(torch.bfloat16)
        assert row["model"] == cache_bytes(half(ids, use_cache=True).past_key_values)
    assert long["teacher"] == 2 * short["teacher"]
    assert inspection.lengths_within(None) == list(inspection.LENGTHS)
    assert inspection.lengths_within(8192) == [512, 4096]
    assert inspection.lengths_within(64) == [64]


@pytest.mark.parametrize("nbits", [8, 16])
def test_windows_of_a_plan(nbits, monkeypatch):
    monkeypatch.setattr(inspection, "LENGTHS", (LENGTH, 4096))
    plan = {"windows": [[4, 16], [9, 9], [2, 10]], "sinks": 2, "nbits": nbits}
    model = t2r.swap(tiny("llama", torch.float32), plan=plan, feature_size=8)
    found = inspect_model(model)
    assert found.cache_bytes[LENGTH] == found.cache_bytes[4096] == cache_bytes(read(model, "llama"))
    line = next(line for line in summary(found) if line.startswith("windows of key-value heads"))
    assert ("keys and values of 8 bits" in line) == (nbits == 8)
