"""Completions: options of `generate`, and the backend that was used for the prompt."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

import t2r
from families import POSITIONS, tiny
from t2r import T2RError
from t2r.ops import registry
from t2r.ops.contract import Abilities
from t2r.ops.torch_backends import Chunked

SIGNED, DECAY = {"feature_map": "rfa"}, {"decay": True}


def letters():
    """Return a tokenizer whose tokens are characters."""
    backend = Tokenizer(models.WordLevel({chr(33 + i): i for i in range(94)}, unk_token="!"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="!")


@pytest.mark.parametrize(
    ("model_type", "options", "abilities", "used"),
    [
        ("gpt2", {}, {"largest_feature": 8, "largest_value": 8, "dtypes": (torch.float64,)}, True),
        ("gpt2", {}, {"dtypes": (torch.float32,)}, False),
        ("gpt2", {}, {"largest_feature": 7}, False),
        ("gpt2", {}, {"largest_value": 7}, False),
        ("gpt2", DECAY, {"decay": False}, False),
        ("gpt2", SIGNED, {"signed": False}, False),
        ("llama", DECAY | {"softmax_layers": [0]}, {"largest_feature": 8}, True),
        ("marian", {}, {"largest_feature": 8, "causal": False}, True),
        ("marian", {}, {"noncausal": False}, False),
    ],
)
def test_the_backend_of_a_prompt(model_type, options, abilities, used, monkeypatch):
    backend, calls = Chunked(), []
    backend.name, backend.abilities = "other", Abilities(**abilities)

    def parallel(*args, **kwargs):
        calls.append(kwargs["causal"])
        return Chunked().parallel(*args, **kwargs)

    backend.parallel = parallel
    monkeypatch.setitem(registry.BACKENDS, "other", backend)
    monkeypatch.setitem(registry.PREFERENCE, "cpu", ("other",))
    model = t2r.swap(tiny(model_type, torch.float64), feature_size=8, recurrent="both", **options).eval()
    calls.clear()
    found = t2r.generate(model, ["abc", " "], tokenizer=letters(), max_new_tokens=2)
    assert ((not model.config.is_encoder_decoder) in calls) == used
    assert [completion.backend for completion in found] == ["other" if used else "chunked"] * 2
    assert {(completion.dtype, completion.device) for completion in found} == {("float64", "cpu")}


def test_a_prompt_that_only_softmax_attention_reads_has_no_backend():
    for model in (tiny("gpt2"), t2r.swap(tiny("marian"), feature_size=8, recurrent="causal")):
        (found,) = t2r.generate(model.eval(), "abc", tokenizer=letters(), max_new_tokens=2)
        assert found.backend is None


def test_the_length_is_that_of_the_options_or_the_configuration():
    for model in (tiny("gpt2", torch.float32), t2r.swap(tiny("gpt2", torch.float32), feature_size=8)):
        model.generation_config.eos_token_id = None
        for options in ({"max_length": 7}, {"generation_config": GenerationConfig(max_new_tokens=3)}):
            (done,) = t2r.generate(model, "abcd", tokenizer=letters(), **options)
            assert done.new_tokens == 3
        with pytest.raises(T2RError, match="positions"):
            t2r.generate(model, "abcd", tokenizer=letters(), max_length=POSITIONS + 1)


def test_a_text_ends_at_the_given_eos_token_or_stop_string():
    model, words = t2r.swap(tiny("llama", torch.float32), feature_size=8), letters()
    model.generation_config.eos_token_id = None
    (free,) = t2r.generate(model, "abcd", tokenizer=words, max_new_tokens=8)
    stop, ended = words(free.text[3]).input_ids[0], free.text[: free.text.index(free.text[3]) + 1]
    how = {"tokenizer": words, "max_new_tokens": 8}
    for options in ({"eos_token_id": stop}, {"stop_strings": [free.text[3]]}):
        (done,) = t2r.generate(model, "abcd", **how, **options)
        assert done.text == ended != free.text
    model.generation_config.eos_token_id = stop
    (done,) = t2r.generate(model, "abcd", **how, eos_token_id=words("~").input_ids[0])
    assert (done.text, done.new_tokens) == (free.text, 8)
