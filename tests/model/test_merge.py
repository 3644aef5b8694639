"""Merging feature maps into projections gives the same model at lower cost, for models that support it."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    FSMTConfig,
    FSMTForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

import t2r
from families import FAMILIES, FSMT, batch, copier, is_seq2seq, tiny
from t2r.attention.recurrence import recurrent_sites
from t2r.feature_maps import ACTIVATIONS
from t2r.model import merge as merging
from t2r.model.merge import TOLERANCE, difference, merge_cost
from t2r.ops.constants import constant_weights
from t2r.surgery.adapters import family as registered

MERGES = [name for name in FAMILIES if registered(name).merges]
UNROTATED = [name for name in FAMILIES if registered(name).plain_projections]
family = pytest.mark.parametrize("model_type", MERGES)
unrotated = pytest.mark.parametrize("model_type", UNROTATED)
options = pytest.mark.parametrize(
    "options",
    [{"activation": name} for name in ACTIVATIONS]
    + [{"shared": False}, {"feature_map": "hedgehog"}, {"feature_map": "hedgehog", "shared": False}]
    + [{"feature_map": "hedgehog", "decay": True}]
    + [{"activation": "softmax", "shared": False, "decay": True, "key_weights": True}],
    ids=lambda o: " ".join(map(str, o.values())),
)


def swapped(model_type, dtype=torch.float64, noise=True, **options):
    """Return a model with random weights and biases in every feature map, as if trained."""
    model = t2r.swap(tiny(model_type, dtype), **{"feature_size": 8, "recurrent": "both", "init": "identity"} | options)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if noise and ".feature_map." in name:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model


def merged(model):
    """Return a merged copy."""
    return t2r.merge(copier(model)(), force=True)


@torch.no_grad()
def logits(model, model_type):
    inputs = batch(model_type, padding="right" if is_seq2seq(model_type) else "left")
    out = model(**inputs, use_cache=False).logits
    return out if is_seq2seq(model_type) else out[inputs["attention_mask"].bool()]


def error(model_type, actual, expected):
    one, two = logits(actual, model_type).double(), logits(expected, model_type).double()
    assert one.isfinite().all()
    if actual.dtype == torch.float64:
        return ((one - two).abs().max() / two.abs().max()).item()
    return difference(one, two)


def prompts(model_type):
    return {k: v for k, v in batch(model_type).items() if k != "decoder_input_ids"}


# --- Equivalence --------------------------------------------------------------------------------------------


def test_the_families_that_merge():
    assert {"gpt2", "opt", "bart", "marian", "m2m_100"} <= set(MERGES)
    assert not {"llama", "mistral", "qwen2", "qwen3", "gpt_neox", "gemma"} & set(MERGES)
    assert {"llama", "mistral", "qwen2", "gemma", "gemma2", "phi"} <= set(UNROTATED)


RECIPE = {"activation": "softmax", "shared": False, "decay": True, "key_weights": True, "rotary": False}


@unrotated
@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "a map for each head"])
@pytest.mark.parametrize("kept", [None, [1]], ids=["pure", "kept"])
def test_without_rotation_rotary_families_merge(model_type, grouped, kept, tmp_path):
    model = swapped(model_type, **RECIPE, grouped=grouped, softmax_layers=kept)
    folded = merged(model)
    assert error(model_type, folded, model) < 1e-9
    names = [name for name, _ in folded.named_parameters() if name.startswith("model.layers.0.self_attn.")]
    assert names
    assert not [name for name in names if "q_proj" in name or "k_proj" in name]
    inputs = prompts(model_type)
    generation = {"max_new_tokens": 6, "do_sample": False, "num_beams": 2}
    expected = model.generate(**inputs, **generation)
    assert torch.equal(folded.generate(**inputs, **generation), expected)
    folded.save_pretrained(tmp_path / "rnn")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "rnn", dtype=torch.float64)
    assert torch.equal(loaded.generate(**inputs, **generation), expected)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("qwen3", "are normalized"), ("olmo2", "are normalized"), ("gpt_neox", "linear projection")],
)
def test_unsupported_projections(model_type, reason):
    with pytest.raises(t2r.T2RError, match=f"{model_type} cannot be merged: .*{reason}"):
        t2r.merge(swapped(model_type, **RECIPE), force=True)


@family
@options
def test_the_logits_are_the_same(model_type, options):
    model = swapped(model_type, **options)
    assert error(model_type, merged(model), model) < 1e-9


@family
@pytest.mark.parametrize("feature_map", ["t2r", "hedgehog"])
@pytest.mark.parametrize("kept", [None, [1]], ids=["pure", "kept"])
def test_the_tokens_are_the_same_in_float32(model_type, feature_map, kept):
    model = swapped(model_type, torch.float32, feature_map=feature_map, softmax_layers=kept)
    folded = merged(model)
    for generation in ({"num_beams": 1}, {"num_beams": 3}):
        generation |= {"max_new_tokens": 5, "do_sample": False}
        inputs = prompts(model_type)
        assert torch.equal(folded.generate(**inputs, **generation), model.generate(**inputs, **generation))


@pytest.mark.parametrize("model_type", ["gpt2", "bart", "t5"])
@pytest.mark.parametrize("shared", [True, False])
@torch.no_grad()
def test_one_product_projects_a_token_while_weights_are_constant(model_type, shared):
    site = recurrent_sites(merged(swapped(model_type, shared=shared, key_weights=not shared)))[0]
    size = site.merged.q.in_features
    token, two = torch.randn(3, 1, size, dtype=torch.float64), torch.randn(3, 2, size, dtype=torch.float64)
    expected = [site.project_merged(x, site.merged, site.feature_map) for x in (token, two)]
    calls = []
    with constant_weights(known := {}):
        found = [site.project_merged(x, site.merged, site.feature_map) for x in (token, two)]
    torch.testing.assert_close(found, expected)
    assert [name for _, name in known] == ["joint"]
    with constant_weights({}):  # a hook must see the call of its layer
        site.merged.k.register_forward_hook(lambda *call: calls.append(call))
        torch.testing.assert_close(site.project_merged(token, site.merged, site.feature_map), expected[0])
    assert len(calls) == 1


@family
@pytest.mark.parametrize("feature_map", ["t2r", "hedgehog"])
def test_bfloat16_is_within_the_stated_tolerance(model_type, feature_map):
    model = swapped(model_type, torch.bfloat16, feature_map=feature_map)
    assert error(model_type, merged(model), model) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("model_type", ["gpt2", "marian", "t5"])
def test_float16(model_type):
    model = swapped(model_type, torch.float16)
    assert error(model_type, merged(model), model) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("model_type", ["gpt2", "marian"])
def test_the_states_are_the_same(model_type):
    model = swapped(model_type, softmax_layers=[2])
    inputs = batch(model_type)
    with torch.no_grad():
        one = merged(model)(**inputs, use_cache=True).past_key_values
        two = model(**inputs, use_cache=True).past_key_values
    for name, layers in two.parts().items():
        for mine, theirs in zip(one.parts()[name][:2], layers[:2], strict=True):
            assert (mine.state.s - theirs.state.s).abs().max() < 1e-9
            assert (mine.state.z - theirs.state.z).abs().max() < 1e-9


def test_sources_and_targets_with_their_own_vocabularies():
    for sizes in ({"src_vocab_size": 40}, {"tgt_vocab_size": 40}):
        config = FSMTConfig(**FSMT | sizes | {"tie_word_embeddings": False})
        model = t2r.swap(FSMTForConditionalGeneration(config).eval(), feature_size=4, recurrent="both")
        assert t2r.merge(model).t2r_config.merged


# --- Merged models ------------------------------------------------------------------------------------------


@family
def test_a_merged_folder(model_type, tmp_path):
    model = merged(swapped(model_type, softmax_layers=[1]))
    model.save_pretrained(tmp_path)
    auto = AutoModelForSeq2SeqLM if is_seq2seq(model_type) else AutoModelForCausalLM
    again = auto.from_pretrained(tmp_path)
    assert again.t2r_config.merged
    assert again.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(logits(again, model_type), logits(model, model_type))
    assert "| merged | True |" in (tmp_path / "README.md").read_text()
    with pytest.raises(t2r.T2RError, match="already merged"):
        t2r.merge(again)
    with pytest.raises(t2r.T2RError, match="cannot be trained"):
        again.train()


@family
def test_queries_and_keys_are_gone(model_type):
    """Checked by name, shape and count. Those of softmax layers and of the encoder are kept."""
    model = swapped(model_type, softmax_layers=[1])
    names = {id(m): n for n, m in model.named_modules()}
    places = [names[id(site)] for site in recurrent_sites(model)]
    folded = merged(model)
    before, after = model.state_dict(), folded.state_dict()
    gone = {"q_proj", "k_proj", "q", "k", "q_attn", "key_map", "query_map"}
    for place in places:
        held = {name.removeprefix(f"{place}.") for name in after if name.startswith(f"{place}.")}
        assert not any(name.split(".")[0] in gone or "feature_map" in name for name in held), held
        assert {name for name in held if name.startswith("merged_projections")} == {
            f"merged_projections.{x}.{y}" for x in "qk" for y in ("weight", "bias")
        }
        if f"{place}.c_attn.weight" in after:  # a fused projection: the part of the values remains
            assert after[f"{place}.c_attn.weight"].shape == (32, 32)
            assert torch.equal(after[f"{place}.c_attn.weight"], before[f"{place}.c_attn.weight"][:, -32:])
    elsewhere = {name for name in before if not any(name.startswith(f"{place}.") for place in places)}
    assert elsewhere == {name for name in after if not any(name.startswith(f"{place}.") for place in places)}
    assert all(torch.equal(before[name], after[name]) for name in elsewhere)

    # Parameters removed from and added to each site, with 4 heads of 8 dimensions, 8 features and hidden size 32.
    biases = 0 if registered(model_type).positions == "relative" else 2 * 32  # T5's projections have none
    leaves = 2 * 32 * 32 + biases + 4 * (8 * 8 + 8)
    comes = 2 * (32 * 32 + 32)
    assert model.num_parameters() - folded.num_parameters() == len(places) * (leaves - comes)


def test_smaller_features_make_a_smaller_model():
    model = swapped("gpt2", feature_size=4)
    folded = t2r.merge(copy.deepcopy(model))
    saved = 2 * (32 * 32 + 32) + 4 * (4 * 8 + 4) - 2 * (32 * 16 + 16)
    assert model.num_parameters() - folded.num_parameters() == 3 * saved


@family
def test_a_merged_model_cannot_be_trained(model_type, tmp_path):
    model = swapped(model_type, torch.float32).train()
    t2r.merge(model, force=True)
    assert not model.training
    assert not any(module.training for module in model.modules())
    with pytest.raises(t2r.T2RError, match="a merged model cannot be trained: its feature maps are folded"):
        model.train()
    assert model.eval() is model
    assert not model.training


def test_the_trainer_raises_too(tmp_path):
    model = merged(swapped("gpt2", torch.float32))
    rows = [{"input_ids": torch.arange(3, 9), "labels": torch.arange(3, 9)}]
    arguments = TrainingArguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    with pytest.raises(t2r.T2RError, match="cannot be trained"):
        Trainer(model, arguments, train_dataset=rows).train()


def test_a_merged_model_has_no_exact_attention():
    model = merged(swapped("gpt2"))
    with pytest.raises(t2r.T2RError, match="no queries and keys"), t2r.exact_attention(model):
        pass


def test_a_copy_of_a_merged_model_is_merged():
    model = merged(swapped("marian"))
    again = copy.deepcopy(model)
    assert torch.equal(logits(again, "marian"), logits(model, "marian"))
    with pytest.raises(t2r.T2RError, match="cannot be trained"):
        again.train()


@pytest.mark.parametrize("model_type", ["gpt2", "marian"])
def test_the_configuration_of_a_merged_model_builds_a_merged_model(model_type):
    model = merged(swapped(model_type, torch.float32))
    expected, state = logits(model, model_type), model.state_dict()
    assert model.config.t2r["merged"]
    built = type(model)(model.config).eval()
    built.load_state_dict(state)
    assert torch.equal(logits(built, model_type), expected)
    loaded = type(model).from_pretrained(None, config=model.config, state_dict=state)
    assert torch.equal(logits(loaded, model_type), expected)


def test_swapping_does_not_change_a_configuration_that_models_share(tmp_path):
    base = tiny("gptj", torch.float64)
    teacher = type(base)(base.config).to(torch.float64).eval()
    inputs = batch("gptj")
    expected = teacher(**inputs).logits
    student = t2r.swap(type(base)(base.config), feature_size=4, recurrent="both")
    assert torch.equal(teacher(**inputs).logits, expected)
    assert student.config is not teacher.config
    assert {id(part.config) for part in student.modules() if hasattr(part, "config")} == {id(student.config)}
    teacher.save_pretrained(tmp_path)
    assert "t2r" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize(("model_type", "target"), [("gpt2", "c_attn"), ("bart", "v_proj"), ("opt", "q_proj")])
def test_adapters_are_merged_first(model_type, target):
    peft = pytest.importorskip("peft")
    model = t2r.swap(tiny(model_type, torch.bfloat16), feature_size=4, recurrent="both")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=[target], fan_in_fan_out=model_type == "gpt2"))
    with pytest.raises(t2r.T2RError, match=f"projection {target} has an adapter"):
        t2r.merge(model.eval(), force=True)


def test_a_model_with_few_positions_is_merged():
    model = t2r.swap(GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=8)), feature_size=4)
    assert t2r.merge(model).t2r_config.merged


def test_merging_does_not_change_a_configuration_that_models_share(tmp_path):
    swapped("gpt2", torch.float32).save_pretrained(tmp_path)
    config = t2r.T2RConfig.from_pretrained(tmp_path)
    first, second = (t2r.T2RForCausalLM.from_pretrained(tmp_path, config=config) for _ in range(2))
    t2r.merge(first, force=True)
    assert not config.merged
    assert second.train().training


# --- Unsupported models -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name not in MERGES])
def test_unsupported_families(model_type):
    model = swapped(model_type, FAMILIES[model_type].dtype)
    before = logits(model, model_type)
    with pytest.raises(t2r.T2RError, match=f"{model_type} cannot be merged: .* rotated by position or normalized"):
        t2r.merge(model, force=True)
    assert torch.equal(logits(model, model_type), before)


@pytest.mark.parametrize("feature_map", ["elu", "rfa", "performer"])
def test_maps_that_are_not_affine(feature_map):
    size = None if feature_map == "elu" else 8
    model = t2r.swap(tiny("gpt2"), feature_map=feature_map, feature_size=size)
    with pytest.raises(t2r.T2RError, match=f"the '{feature_map}' map cannot be merged"):
        t2r.merge(model, force=True)


def test_merging_twice_or_before_swapping():
    model = swapped("gpt2")
    with pytest.raises(t2r.T2RError, match="no recurrent attention: swap it first"):
        t2r.merge(tiny("gpt2"))
    t2r.merge(model, force=True)
    with pytest.raises(t2r.T2RError, match="already merged"):
        t2r.merge(model, force=True)


# --- Cost ---------------------------------------------------------------------------------------------------


def by_hand(hidden, heads, head_dim, rows, sites):
    """Return the multiplications per token for the features of a query and a key."""
    before = 2 * (hidden * heads * head_dim + heads * rows * head_dim)
    after = 2 * hidden * heads * rows
    return sites * before, sites * after


@pytest.mark.parametrize("model_type", ["gpt2", "marian", "t5"])
@pytest.mark.parametrize(("feature_map", "size", "rows"), [("t2r", 4, 4), ("t2r", 32, 32), ("hedgehog", 16, 8)])
def test_merge_cost(model_type, feature_map, size, rows):
    model = swapped(model_type, feature_map=feature_map, feature_size=size, softmax_layers=[0])
    cost = merge_cost(model)
    assert (cost.before, cost.after) == by_hand(32, 4, 8, rows, sites=4 if is_seq2seq(model_type) else 2)
    assert cost.pays == (rows <= 8)  # 32 + rows against 4 * rows: cheaper up to slightly above the head size


def test_unprofitable_merges_require_force():
    model = swapped("gpt2", feature_size=32)
    before = logits(model, "gpt2")
    cost_before, cost_after = by_hand(32, 4, 8, 32, sites=3)
    with pytest.raises(t2r.T2RError, match="would cost more than it saves") as caught:
        t2r.merge(model)
    assert f"{cost_after:,} multiplications per token instead of {cost_before:,}" in str(caught.value)
    assert torch.equal(logits(model, "gpt2"), before)
    assert not model.t2r_config.merged
    assert t2r.merge(model, force=True) is model
    assert (logits(model, "gpt2") - before).abs().max() < 1e-9
    assert t2r.merge(swapped("gpt2", feature_size=4)).t2r_config.merged


# --- Errors leave the model unchanged -----------------------------------------------------------------------


def spoil(change):
    true = merging.fold_one

    def spoiled(*args):
        weight, bias = true(*args)
        return merging.Affine(change(weight), bias)

    return spoiled


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("model_type", ["gpt2", "marian", "t5"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w * float("nan"), "not finite"),
        (lambda w: w + 0.1, "logits differ by"),
        (lambda w: w[:-1], None),  # a wrong shape, which raises during the merge
    ],
    ids=["nan", "wrong", "misshaped"],
)
@pytest.mark.parametrize("training", [False, True])
def test_a_failed_merge_leaves_the_model_unchanged(model_type, shared, change, message, training, monkeypatch):
    model = swapped(model_type, shared=shared, softmax_layers=[1])
    before, weights = logits(model, model_type), copy.deepcopy(model.state_dict())
    model.train(training)
    frozen = next(site for site in recurrent_sites(model)).feature_map.eval()
    monkeypatch.setattr(merging, "fold_one", spoil(change))
    with pytest.raises(t2r.T2RError if message else RuntimeError, match=message):
        t2r.merge(model, force=True)
    assert not model.t2r_config.merged
    assert model.training == training
    assert all(module.training == (training and module not in frozen.modules()) for module in model.modules())
    model.eval()
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())
    assert torch.equal(logits(model, model_type), before)
    model.train()
    inputs = batch(model_type)
    model(**inputs, labels=inputs.get("decoder_input_ids", inputs["input_ids"])).loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if ".feature_map." in n)
    monkeypatch.undo()
    assert t2r.merge(model, force=True).t2r_config.merged


def test_a_model_with_nan_is_not_merged():
    model = swapped("gpt2")
    model.transformer.ln_f.weight.data[0] = float("nan")
    with pytest.raises(t2r.T2RError, match="logits differ by nan"):
        t2r.merge(model, force=True)
    assert not model.t2r_config.merged
