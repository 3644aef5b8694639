"""Features that the tests of transformers use with every model, and that swapped models do not support.

Each row works on the base model. A swapped model must raise a `T2RError` that states the reason, before anything is
computed wrongly, and must work as before afterwards. transformers skips most of these tests for its own recurrent
models, with `has_attentions = False` and cache checks of each model.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicCache

import t2r
from families import PAD, POSITIONS, VOCABULARY, batch, is_seq2seq, tiny
from t2r import T2RError

HOW = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": PAD}
FAMILIES = ["gpt2", "llama", "marian"]


class Tried(NamedTuple):
    """A swapped model, its inputs, and a folder."""

    model: Any
    inputs: dict[str, Any]
    folder: Any

    @property
    def prompt(self) -> dict[str, Any]:
        return {name: x for name, x in self.inputs.items() if not name.startswith("decoder")}

    def saved(self) -> Any:
        self.model.save_pretrained(self.folder)
        return self.folder

    def load(self, **options: Any) -> Any:
        auto = AutoModelForSeq2SeqLM if self.model.config.is_encoder_decoder else AutoModelForCausalLM
        return auto.from_pretrained(self.saved(), **options)


def forward(**options: Any) -> Callable[[Tried], Any]:
    return lambda tried: tried.model(**(tried.inputs | options))


def generate(**options: Any) -> Callable[[Tried], Any]:
    return lambda tried: tried.model.generate(**tried.prompt, **HOW, **options)


def with_full_mask(tried: Tried) -> Any:
    name = "decoder_attention_mask" if "decoder_input_ids" in tried.inputs else "attention_mask"
    return tried.model(**(tried.inputs | {name: torch.ones(3, 1, 9, 9)}))


def with_attention_set_in_the_configuration(tried: Tried) -> Any:
    tried.model.config._attn_implementation = "eager"
    try:
        return tried.model(**tried.inputs)
    finally:
        tried.model.config._attn_implementation = "t2r"


def with_stock_static_cache(tried: Tried) -> Any:
    cache: Any = StaticCache(config=tried.model.config, max_cache_len=32)
    if tried.model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, StaticCache(config=tried.model.config, max_cache_len=32))
    return tried.model.generate(**tried.prompt, **HOW, past_key_values=cache)


@torch.no_grad()
def with_filled_softmax_cache(tried: Tried) -> Any:
    filled = tiny(tried.model.config.model_type, torch.float32)(**tried.inputs, use_cache=True).past_key_values
    return tried.model(**tried.inputs, past_key_values=filled)


def without_a_tensor(tried: Tried) -> Any:
    state = tried.model.state_dict()
    state.pop(next(name for name in state if "feature_map" in name))
    tried.model.save_pretrained(tried.folder, state_dict=state)
    return type(tried.model).from_pretrained(tried.folder)


REFUSALS: dict[str, tuple[Callable[[Tried], Any], str]] = {
    # Recurrent layers do not compute attention weights.
    "attentions of a forward": (forward(output_attentions=True), "do not compute attention weights"),
    "attentions of generate": (
        generate(output_attentions=True, return_dict_in_generate=True),
        "do not compute attention weights",
    ),
    # Recurrent attention is causal, so it supports padding masks only.
    "a 4-D mask": (with_full_mask, "a padding mask"),
    # Another attention function would compute softmax attention in models on the attention interface.
    "another attention function": (lambda tried: tried.model.set_attn_implementation("sdpa"), "exact_attention"),
    "another attention function in the configuration": (with_attention_set_in_the_configuration, "exact_attention"),
    # Recurrent layers have no keys and values to cache.
    "an offloaded cache": (generate(cache_implementation="offloaded"), "keys and values"),
    "an offloaded static cache": (generate(cache_implementation="offloaded_static"), "keys and values"),
    "a quantized cache": (generate(cache_implementation="quantized"), "keys and values"),
    "a sliding window cache": (generate(cache_implementation="sliding_window"), "keys and values"),
    "transformers' static cache": (with_stock_static_cache, "StaticCache"),
    "a cache that softmax attention filled": (with_filled_softmax_cache, "filled by a model with other attention"),
    "a cache of tuples": (forward(past_key_values=((torch.zeros(1), torch.zeros(1)),) * 3), "is a tuple"),
    "continuous batching": (lambda tried: tried.model.generate_batch([[5, 6, 7]]), "make_static_cache"),
    # A state cannot be cropped unless it records its past.
    "cropping a cache": (lambda tried: tried.model(**tried.inputs).past_key_values.crop(-1), "activate_past_recording"),
    # Loading is strict, while transformers warns and initializes missing weights randomly.
    "a missing tensor": (without_a_tensor, "missing"),
    "a configuration that the weights do not fit": (
        lambda tried: tried.load(**{("decoder_layers" if is_seq2seq_model(tried) else "num_hidden_layers"): 2}),
        "unexpected",
    ),
    "a plain configuration": (
        lambda tried: type(tried.model).from_pretrained(tried.saved(), config=plain_config(tried)),
        "T2RConfig",
    ),
    # The heads would be split between devices, but not their feature maps.
    "tensor parallelism": (lambda tried: tried.load(tp_plan="auto"), "tensor parallelism"),
}


def is_seq2seq_model(tried: Tried) -> bool:
    return bool(tried.model.config.is_encoder_decoder)


def plain_config(tried: Tried) -> Any:
    return tiny(tried.model.config.model_type).config


@pytest.mark.parametrize("what", REFUSALS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_unsupported_features_raise_and_leave_the_model_unchanged(model_type, what, tmp_path):
    model = t2r.swap(tiny(model_type, torch.float32), feature_size=8, recurrent="both").eval()
    tried = Tried(model, batch(model_type), tmp_path / "folder")
    with torch.no_grad():
        before = model(**tried.inputs).logits
    attempt, reason = REFUSALS[what]
    with pytest.raises(T2RError, match=reason) as refusal:
        attempt(tried)
    assert len(str(refusal.value)) < 400
    with torch.no_grad():
        assert torch.equal(model(**tried.inputs).logits, before)


def test_a_prompt_in_chunks_is_refused_for_an_encoder_decoder():
    """transformers splits the attention mask, which for an encoder-decoder is the mask of the source."""
    model, inputs = t2r.swap(tiny("marian", torch.float32), feature_size=8, recurrent="both").eval(), batch("marian")
    del inputs["decoder_input_ids"]
    with pytest.raises(T2RError, match="mask of the source"):
        model.generate(**inputs, **HOW, prefill_chunk_size=4)


def test_attentions_asked_for_before_the_swap_are_refused():
    model = tiny("llama", torch.float32)
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    swapped = t2r.swap(model, feature_size=8).eval()
    with pytest.raises(T2RError, match="do not compute attention weights"):
        swapped(**batch("llama"))


def test_assisted_decoding_on_a_static_cache_is_refused():
    model = t2r.swap(tiny("gpt2", torch.float32), feature_size=8).eval()
    ids = torch.randint(3, VOCABULARY, (1, 6))
    with pytest.raises(T2RError, match="cannot remove tokens"):
        model.make_static_cache(1).activate_past_recording()
    with pytest.raises(ValueError, match="Static cache"):  # the message of transformers
        model.generate(ids, **HOW, assistant_model=model, cache_implementation="static")


def test_an_implementation_named_at_loading_is_said_to_have_no_effect(tmp_path, caplog):
    """Some tools always pass an implementation. The loaded model is recurrent regardless."""
    model = t2r.swap(tiny("llama", torch.float32), feature_size=8).eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert "attn_implementation='sdpa' has no effect" in caplog.text
    inputs = batch("llama")
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)


def test_a_default_cache_is_not_refused():
    """An empty dynamic cache is converted to a cache of states."""
    model, inputs = t2r.swap(tiny("llama", torch.float32), feature_size=8).eval(), batch("llama")
    cache = DynamicCache(config=model.config)
    assert torch.equal(model.generate(**inputs, **HOW, past_key_values=cache), model.generate(**inputs, **HOW))


def test_a_trace_is_refused_and_an_export_has_any_length():
    model, ids = t2r.swap(tiny("llama", torch.float32, layers=1), feature_size=4).eval(), torch.tensor([[5, 6, 7, 8]])
    for traced in (model, lambda x: model(x, use_cache=False).logits):
        with pytest.raises(t2r.T2RError, match=r"use torch\.export"):
            torch.jit.trace(traced, (ids,), strict=False)
    shapes = {"input_ids": {1: torch.export.Dim.AUTO}, "use_cache": None}
    given = {"input_ids": ids, "use_cache": False}
    exported = torch.export.export(model, (), given, dynamic_shapes=shapes).module()
    longer = torch.randint(3, VOCABULARY, (1, 11))
    found = exported(input_ids=longer, use_cache=False).logits
    torch.testing.assert_close(found, model(longer, use_cache=False).logits)


@pytest.mark.parametrize("family", ["gpt2", "llama", "marian", "m2m_100"])
def test_generation_in_inference_mode_leaves_a_model_that_can_be_trained(family):
    """Longer than the tables of positions, which are extended in inference mode."""
    model, ids = t2r.swap(tiny(family, torch.float32, layers=1), feature_size=4).eval(), torch.tensor([[5, 6, 7, 8]])
    length = 10 if family == "gpt2" else POSITIONS + 8
    with torch.inference_mode():
        model.generate(ids, max_new_tokens=length)
        t2r.Engine(model).generate(ids, max_new_tokens=length)
    target = {"decoder_input_ids": ids} if is_seq2seq(family) else {}
    model.train()(input_ids=ids, **target).logits.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    if not is_seq2seq(family):
        cache = model.make_cache()
        with torch.inference_mode():
            model.eval()(ids, past_key_values=cache, use_cache=True)
        model(ids[:, :1], past_key_values=cache, use_cache=True).logits.sum().backward()
