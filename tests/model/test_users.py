"""Common uses of Hugging Face models work, or raise a one-line error."""

import copy
import pickle

import pytest
import torch
from accelerate import dispatch_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, GPT2LMHeadModel, LlamaForCausalLM

import t2r
import t2r.attention.recurrence
from families import PAD, VOCABULARY, batch, is_seq2seq, real_positions, tiny
from t2r import T2RError

FORGETS = {"decay": True, "rotary": False, "activation": "softmax", "shared": False, "feature_size": 8}


def swapped(model_type, dtype=torch.float64, **options):
    return t2r.swap(tiny(model_type, dtype), **({"feature_size": 8, "recurrent": "both"} | options)).eval()


def dispatched(model):
    """Return a model with accelerate's hooks on its modules, as created by `device_map`."""
    names = {name for name, module in model.named_modules() if not list(module.children())}
    whole = {name: "cpu" for name in names} | {"": "cpu"}
    return dispatch_model(model, {name: "cpu" for name in whole if name}, force_hooks=True, main_device="cpu")


@pytest.mark.parametrize("options", [{}, FORGETS], ids=["plain", "forgets"])
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
@torch.no_grad()
def test_a_dispatched_model_is_swapped_right(model_type, options):
    inputs = batch(model_type)
    expected = swapped(model_type, **options)
    model = t2r.swap(dispatched(tiny(model_type)), **({"feature_size": 8} | options))
    whole = expected(**inputs, use_cache=False).logits
    torch.testing.assert_close(model(**inputs, use_cache=False).logits, whole)
    cached = model(**inputs, use_cache=True)
    torch.testing.assert_close(cached.logits, whole)
    assert type(cached.past_key_values).__name__ == "T2RCache"
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD}
    assert torch.equal(model.generate(**inputs, **how), expected.generate(**inputs, **how))
    with t2r.exact_attention(model):
        exact, real = model(**inputs, use_cache=False).logits, real_positions(inputs)
        torch.testing.assert_close(exact[real], tiny(model_type)(**inputs).logits[real])


def test_an_offloaded_model_is_refused():
    model = swapped("llama", torch.float32, **FORGETS)
    for site in t2r.attention.recurrence.recurrent_sites(model):
        site.feature_map.to("meta")
    with pytest.raises(T2RError, match="offloaded"):
        model(**batch("llama"))


@torch.no_grad()
def test_generating_from_embeddings():
    model, inputs = swapped("llama"), batch("llama")
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD}
    expected = model.generate(**inputs, **how)
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    new = model.generate(inputs_embeds=embeds, attention_mask=inputs["attention_mask"], **how)
    assert torch.equal(new, expected[:, inputs["input_ids"].shape[1] :])


def test_generate_with_a_state_and_new_tokens_names_continue_from(tmp_path):
    model, ids = swapped("gpt2"), batch("gpt2", padding=None)["input_ids"][:1]
    with torch.no_grad():
        model(ids, past_key_values=(cache := model.make_cache()))
    cache.save(tmp_path / "state")
    with pytest.raises(T2RError, match="continue_from"):
        model.generate(ids[:, :2], past_key_values=model.load_state(tmp_path / "state"), max_new_tokens=2)
    how = {"max_new_tokens": 3, "pad_token_id": PAD, "do_sample": False}
    longer = torch.cat([ids, ids[:, :2]], 1)
    whole = model.generate(longer, past_key_values=model.load_state(tmp_path / "state"), **how)
    assert torch.equal(whole, model.generate(longer, **how))


@pytest.mark.parametrize("options", [{}, {"softmax_layers": [1]}], ids=["pure", "kept"])
def test_continuing_shows_logits_processors_real_tokens_only(options):
    model, ids = swapped("gpt2", **options), batch("gpt2", padding=None)["input_ids"][:1]
    seen = []

    def note(input_ids, scores):
        seen.append(input_ids.clone())
        return scores

    with torch.no_grad():
        model(ids[:, :6], past_key_values=(cache := model.make_cache()))
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": PAD, "repetition_penalty": 1.3}
    out = model.continue_from(cache, ids[:, 6:], logits_processor=[note], **how)
    assert torch.equal(out[:, :3], ids[:, 6:])
    assert all(torch.equal(x, out[:, : x.shape[1]]) for x in seen)
    plain = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=PAD)
    again = model.continue_from(cache, ids[:, 6:], max_new_tokens=4, do_sample=False, pad_token_id=PAD)
    assert torch.equal(again, plain[:, 6:])


def test_continuing_beyond_the_positions_is_an_error():
    model, ids = swapped("gpt2"), torch.randint(3, VOCABULARY, (1, 60))
    with torch.no_grad():
        model(ids, past_key_values=(cache := model.make_cache()))
    with pytest.raises(T2RError, match="64 positions"):
        model.continue_from(cache, ids[:, :1], max_new_tokens=10, pad_token_id=PAD)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", [{}, {"softmax_layers": [0, 2]}], ids=["pure", "kept"])
@torch.no_grad()
def test_padding_on_either_side_can_be_taken_and_continued(side, options):
    model, inputs = swapped("gpt2", **options), batch("gpt2", padding=side)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    cache = model.make_cache()
    model(**inputs, position_ids=positions, past_key_values=cache)
    new = torch.randint(3, VOCABULARY, (3, 2))
    how = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": PAD}
    together = model.continue_from(cache, new, **how)
    for row in range(3):
        real = inputs["input_ids"][row][inputs["attention_mask"][row].bool()]
        whole = torch.cat([real, new[row]])[None]
        expected = model.generate(whole, attention_mask=torch.ones_like(whole), **how)[:, len(real) :]
        assert torch.equal(model.continue_from(cache.take(row), new[row : row + 1], **how), expected)
        assert torch.equal(together[row : row + 1], expected)


def test_padding_in_several_places_is_refused_when_it_matters():
    model, inputs = swapped("gpt2", softmax_layers=[0]), batch("gpt2", padding=None)
    inputs["attention_mask"][1, [0, -1]] = 0
    with torch.no_grad():
        cache = model(**inputs).past_key_values
    with pytest.raises(T2RError, match="several places"):
        cache.take(1)


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "marian"])
def test_a_prefill_in_inference_mode_can_be_continued(model_type):
    model, inputs = swapped(model_type), batch(model_type)
    if "decoder_input_ids" in inputs:
        return
    with torch.inference_mode():
        cache = model(**inputs).past_key_values
    new = torch.randint(3, VOCABULARY, (3, 1))
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 1, dtype=torch.long)], 1)
    with torch.no_grad():
        for _ in range(2):
            model(new, attention_mask=mask, past_key_values=cache)
            mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)


def test_a_saved_model_is_a_configuration_with_the_usual_attributes(tmp_path):
    model = swapped("llama", torch.float32)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "eos_token_id", "use_cache"):
        assert getattr(config, name) == getattr(model.config, name)
    assert not hasattr(config, "no_such_thing")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, use_cache=False)
    assert loaded.config.use_cache is False
    assert loaded(torch.tensor([[5, 6]])).past_key_values is None


@pytest.mark.parametrize(("model_type", "stock"), [("gpt2", GPT2LMHeadModel), ("llama", LlamaForCausalLM)])
def test_the_base_model_class_rejects_a_t2r_folder(model_type, stock, tmp_path):
    swapped(model_type, torch.float32).save_pretrained(tmp_path)
    with pytest.raises(Exception, match="this folder holds a t2r model"):
        stock.from_pretrained(tmp_path)


def test_an_adapter_of_a_model_swapped_in_memory_does_not_load_on_the_base_model(tmp_path):
    peft = pytest.importorskip("peft")
    tiny("gpt2", torch.float32).save_pretrained(tmp_path / "base")
    model = t2r.swap(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), feature_size=8)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"], task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(OSError, match="swapped by t2r in memory"):
        peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_an_adapter_of_a_loaded_model_is_saved_and_loaded(model_type, tmp_path):
    """PEFT reads the configuration of the folder with the class of `model.config`, to find resized embeddings."""
    peft = pytest.importorskip("peft")
    swapped(model_type, torch.float32).save_pretrained(tmp_path / "swapped")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "swapped")
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    inputs = batch(model_type)
    assert torch.equal(loaded(**inputs).logits, adapted(**inputs).logits)


@pytest.mark.parametrize("model_type", ["llama", "adaptive_lm", "fsmt", "t5"])
def test_the_class_of_a_configuration_reads_t2r_folders_and_stock_folders(model_type, tmp_path):
    base, model = tiny(model_type, torch.float32), swapped(model_type, torch.float32)
    base.save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "swapped")
    config = model.config
    assert isinstance(config, type(base.config))
    for same in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert type(same) is type(config)
        assert same.to_dict() == config.to_dict()
    for folder in ("base", "swapped"):
        read = type(config).from_pretrained(tmp_path / folder)
        assert (read.vocab_size, read.dtype) == (base.config.vocab_size, torch.float32)
    auto = AutoModelForSeq2SeqLM if is_seq2seq(model_type) else AutoModelForCausalLM
    assert type(auto.from_config(config)) is type(base)


def test_objects_that_are_not_models():
    with pytest.raises(T2RError, match="not a name"):
        t2r.swap("gpt2")
    with pytest.raises(T2RError, match="compiled"):
        t2r.swap(torch.compile(tiny("gpt2")))
    with pytest.raises(T2RError, match="not a Linear"):
        t2r.swap(torch.nn.Linear(2, 2))
    peft = pytest.importorskip("peft")
    with pytest.raises(T2RError, match="merge_and_unload"):
        t2r.swap(peft.get_peft_model(tiny("gpt2"), peft.LoraConfig(target_modules=["c_attn"])))
