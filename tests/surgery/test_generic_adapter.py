"""Models without an adapter: their attention is detected and checked on the model, or the swap is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import t2r
from families import DECODER, TOKENS, VOCABULARY
from t2r.attention import interface
from t2r.attention.recurrence import recurrent_sites
from t2r.surgery.adapters import FAMILIES, family_of

FULL = DECODER | {"num_key_value_heads": 4}
EXPERTS = DECODER | {"num_local_experts": 2, "num_experts_per_tok": 1}
LATENT = DECODER | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
LATENT |= {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 8}
PADDING = {"input_ids": torch.randint(3, VOCABULARY, (2, 8)), "attention_mask": torch.ones(2, 8, dtype=torch.long)}
PADDING["attention_mask"][1, :3] = 0

UNDERSTOOD = {
    "cohere": ("CohereForCausalLM", "CohereConfig", FULL),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", EXPERTS),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", DECODER),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", DECODER),
}
SEQ2SEQ = TOKENS | {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
SEQ2SEQ |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAVA = {
    "text_config": DECODER | {"model_type": "llama"},
    "vision_config": VISION | {"model_type": "clip_vision_model"},
}
REFUSED = {
    "bloom": ("BloomForCausalLM", "BloomConfig", TOKENS | {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "interface"),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT, "one common head size"),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", EXPERTS | {"head_dim": 8}, "does not match the base model"),
    "llava": ("LlavaForConditionalGeneration", "LlavaConfig", LLAVA, "part of a larger model"),
    "led": (
        "LEDForConditionalGeneration",
        "LEDConfig",
        SEQ2SEQ | {"attention_window": 4},
        "encoder-decoder without an adapter",
    ),
    "mamba": ("MambaForCausalLM", "MambaConfig", TOKENS | {"hidden_size": 32, "num_hidden_layers": 2}, "interface"),
}
understood = pytest.mark.parametrize("model_type", UNDERSTOOD)


def build(model_class, config_class, fields):
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**fields))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model.eval()


@understood
def test_exact_attention_is_the_teacher(model_type, caplog):
    teacher = build(*UNDERSTOOD[model_type])
    model = t2r.swap(copy.deepcopy(teacher), feature_size=8, softmax_layers=[1])
    assert f"{model_type} is not a tested model type" in caplog.text
    assert len(recurrent_sites(model)) == 2
    assert not family_of(model).tested
    real = PADDING["attention_mask"].bool()
    with torch.no_grad(), t2r.exact_attention(model):
        difference = (model(**PADDING).logits - teacher(**PADDING).logits)[real].abs().max()
    assert difference < 1e-4


@understood
def test_generates_like_recomputation_and_loads_again(model_type, tmp_path):
    model = t2r.swap(build(*UNDERSTOOD[model_type]), feature_size=8)
    options = {"max_new_tokens": 8, "num_beams": 2, "do_sample": False}
    tokens = model.generate(**PADDING, **options)
    assert torch.equal(tokens, model.generate(**PADDING, **options, use_cache=False))
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(tokens, again.generate(**PADDING, **options))


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_refused_model_is_restored(model_type):
    *parts, reason = REFUSED[model_type]
    model = build(*parts).train()
    before = copy.deepcopy(model).eval()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(t2r.T2RError, match=reason) as refusal:
        t2r.swap(model)
    message = str(refusal.value)
    assert f"'{model_type}'" in message
    assert f"t2r has tested {len(FAMILIES)} types, such as gpt2, llama and marian (docs/models.md)" in message
    assert "\n" not in message
    assert [type(module) for module in model.modules()] == classes
    assert model.config._attn_implementation == before.config._attn_implementation
    assert model.training
    assert model.state_dict().keys() == before.state_dict().keys()
    ids = PADDING["input_ids"]
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    with torch.no_grad():
        assert torch.equal(model.eval()(**inputs).logits, before(**inputs).logits)


def test_every_module_keeps_its_mode():
    model = build(*UNDERSTOOD["starcoder2"]).train()
    model.model.layers[0].eval()
    t2r.swap(model, feature_size=8)
    frozen = {id(module) for module in model.model.layers[0].modules()}
    assert all(module.training == (id(module) not in frozen) for module in model.modules())


def test_a_state_that_does_not_reach_the_layers_is_detected(monkeypatch):
    """If a stock forward uses another name for its cache, every token would start from an empty state."""
    monkeypatch.setattr(interface.InterfaceAttention, "cache_arguments", ("another_name",))
    with pytest.raises(t2r.T2RError, match="'starcoder2' cannot be swapped: its forward failed after the swap"):
        t2r.swap(build(*UNDERSTOOD["starcoder2"]))


def test_a_state_that_is_lost_is_detected(monkeypatch):
    monkeypatch.setattr(t2r.attention.memories.StateMemory, "store", lambda self, *args: None)
    with pytest.raises(t2r.T2RError, match="do not continue from their state"):
        t2r.swap(build(*UNDERSTOOD["starcoder2"]))


def test_an_encoder_does_not_generate():
    config = transformers.BertConfig(**TOKENS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    with pytest.raises(t2r.T2RError, match="does not generate text"):
        t2r.swap(transformers.BertForMaskedLM(config))


WINDOW = {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 0}
WINDOW |= {"layer_types": ["sliding_attention"] * 3}
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}


def test_a_window_that_only_the_mask_of_the_base_model_has():
    teacher = build("Qwen2MoeForCausalLM", "Qwen2MoeConfig", DECODER | MOE | WINDOW)
    model = t2r.swap(copy.deepcopy(teacher), feature_size=8, softmax_layers=[1])
    real = PADDING["attention_mask"].bool()
    with torch.no_grad(), t2r.exact_attention(model):
        torch.testing.assert_close(model(**PADDING).logits[real], teacher(**PADDING).logits[real])


def test_layers_without_a_rotation_need_the_stock_rotation():
    """In a transfer, t2r would rotate them."""
    teacher = build("SmolLM3ForCausalLM", "SmolLM3Config", DECODER | {"no_rope_layers": [1, 0, 1]})
    t2r.swap(copy.deepcopy(teacher), feature_size=8)
    with pytest.raises(t2r.T2RError, match="not all rotated, or normalized after that: swap with rotary=True"):
        t2r.swap(teacher, feature_size=8, rotary=False)


GEMMA4 = DECODER | {"num_hidden_layers": 2, "head_dim": 8, "global_head_dim": 16, "sliding_window": 5}
GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0}
GEMMA4 |= {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCABULARY}
SHARED = {"num_hidden_layers": 4, "layer_types": GEMMA4["layer_types"] * 2, "num_kv_shared_layers": 2}
"""The last layers read the keys and values of earlier ones, as in Gemma 4 E2B."""


@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="this transformers has no Gemma 4")
@pytest.mark.parametrize(
    ("options", "fields"),
    [({}, {}), ({"softmax_layers": [1]}, {}), ({}, SHARED)],
    ids=["recurrent", "kept", "shared keys"],
)
def test_heads_of_different_sizes_are_saved(options, fields, tmp_path):
    model = t2r.swap(build("Gemma4ForCausalLM", "Gemma4TextConfig", GEMMA4 | fields), feature_size=4, **options)
    model.save_pretrained(tmp_path)
    loaded = t2r.load(str(tmp_path)).eval()
    ids = PADDING["input_ids"]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(t2r.Engine(loaded).generate(ids, max_new_tokens=4, do_sample=False), expected)


@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="this transformers has no Gemma 4")
def test_a_model_that_cannot_run_is_one_line():
    """The last layer shares the keys of an earlier layer of its kind, and there is none."""
    model = build("Gemma4ForCausalLM", "Gemma4TextConfig", GEMMA4 | {"num_kv_shared_layers": 1})
    with pytest.raises(t2r.T2RError, match=r"its own forward fails \(KeyError: 'full_attention'\)") as caught:
        t2r.swap(model, feature_size=4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("how", ["cannot be written", "changes"])
def test_what_cannot_be_saved_and_loaded_is_not_swapped(how, monkeypatch):
    """A configuration of another library may not survive its own file. The model is then as it was."""
    model = build(*UNDERSTOOD["cohere"])
    before, stock = model(**PADDING).logits, type(model)

    def to_dict(self):
        if how == "cannot be written":
            raise RuntimeError("no file of this\nconfiguration")
        return written(self) | {"intermediate_size": 8}

    written = type(model.config).to_dict
    monkeypatch.setattr(type(model.config), "to_dict", to_dict)
    message = "cannot be saved and loaded" if how == "cannot be written" else "has another shape when it is loaded"
    with pytest.raises(t2r.T2RError, match=message) as caught:
        t2r.swap(model, feature_size=4)
    assert "\n" not in str(caught.value)
    assert type(model) is stock
    assert torch.equal(model(**PADDING).logits, before)
