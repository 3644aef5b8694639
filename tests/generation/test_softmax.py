"""Models that are not swapped run in the engine, and choose the same tokens as `generate`."""

import logging

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GenerationConfig,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
)

import t2r
from engines import alone, prompts
from families import DECODER, PAD, VOCABULARY, batch, is_seq2seq, tiny
from t2r import Engine, T2RError
from t2r.attention.cache import cache_bytes
from t2r.generation.engine import engine_for


def teacher(model_type, dtype=torch.float64):
    model = tiny(model_type, dtype, layers=2).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, PAD
    return model


def padded(model_type):
    """Return padded prompts of different lengths."""
    given = batch(model_type, padding="right" if is_seq2seq(model_type) else "left")
    return {name: x for name, x in given.items() if not name.startswith("decoder")}


@pytest.mark.parametrize("model_type", ["adaptive_lm", "bart", "falcon", "gemma", "gpt2", "gptj", "llama", "marian"])
def test_tokens_are_those_of_generate(model_type):
    model, given = teacher(model_type), padded(model_type)
    weights = [x.clone() for x in model.parameters()]
    kind, engine = type(model), Engine(model)
    for options in ({}, {"num_beams": 3}, {"do_sample": True, "top_k": 5, "repetition_penalty": 1.2}):
        torch.manual_seed(1)
        expected = model.generate(**given, max_new_tokens=6, **options)
        torch.manual_seed(1)
        assert torch.equal(engine.generate(**given, max_new_tokens=6, **options), expected)
    assert engine.rows.step.captured_as == engine.beam_step.captured_as == "recording"
    assert not engine.said
    assert type(model) is kind
    assert all(a is b for a, b in zip(model.parameters(), engine.model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))


@pytest.mark.parametrize("model_type", ["llama", "marian"])
def test_a_running_batch(model_type):
    model, given = teacher(model_type), prompts([5, 2, 9])
    expected = [alone(model, prompt, max_new_tokens=7) for prompt in given]
    engine = Engine(model, rows=2)
    sequences = [engine.submit(prompt, max_new_tokens=7) for prompt in given]
    assert [len(sequence.tokens) for sequence in sequences] == [0, 0, 0]
    assert len(list(engine.run())) == 21
    assert [sequence.tokens for sequence in sequences] == expected
    assert [token for _, token in engine.stream(given[0], max_new_tokens=7)] == expected[0]
    batches = [{"input_ids": prompt, "max_new_tokens": 7} for prompt in given]
    assert dict(engine.generate_each(batches)) == dict(enumerate(expected))


def test_keys_and_values_are_continued():
    model, (prompt,) = teacher("llama"), prompts([9])
    engine = Engine(model)
    first = engine.submit(prompt[:, :5], max_new_tokens=1, keep_state=True)
    list(engine.run())
    assert cache_bytes(first.state) == cache_bytes(model(prompt[:, :5]).past_key_values)
    expected = model.generate(prompt, max_new_tokens=6)[:, 5:]
    assert torch.equal(engine.generate(prompt[:, 5:], state=first.state, max_new_tokens=6), expected)
    out = engine.generate(prompt[:, 5:], state=first.state, max_new_tokens=6, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)  # by `generate`


def test_a_changed_generation_config_and_training_mode_are_noticed(caplog):
    model, (prompt,) = teacher("gpt2"), prompts([5])
    engine = Engine(model)
    model.generation_config = GenerationConfig(max_new_tokens=3, pad_token_id=PAD)
    assert engine.generate(prompt).shape == (1, 8)
    model.generation_config.max_new_tokens = 4
    assert engine.generate(prompt).shape == (1, 9)
    model.train()
    assert not Engine(model).model.training
    engine.generate(prompt)
    assert "falling back from the engine to model.generate(): the model is in training mode" in caplog.text


@pytest.mark.parametrize(("model_type", "reason"), [("t5", "relative bias")])
def test_models_without_a_static_cache_fall_back_to_generate(model_type, reason, caplog):
    model, (prompt,) = teacher(model_type), prompts([5])
    how = {"max_new_tokens": 4, "output_attentions": True, "return_dict_in_generate": True}  # only the model has them
    with caplog.at_level(logging.WARNING, "t2r"):
        out = Engine(model).generate(prompt, **how)
    assert reason in caplog.text
    assert torch.equal(out.sequences, model.generate(prompt, **how).sequences)
    with pytest.raises(T2RError, match=reason):
        Engine(model).submit(prompt)


def test_a_sliding_window_is_a_ring_in_the_engine():
    """Texts several times as long as the window, of different lengths."""
    model, given = teacher("mistral"), prompts([3, 14, 6])
    assert model.config.sliding_window < 14
    for one in given:
        how = {"max_new_tokens": 12, "do_sample": False}
        assert torch.equal(Engine(model).generate(one, **how), model.generate(one, **how))


def small(config_class, **fields):
    return config_class(**{**DECODER, "num_hidden_layers": 2, "eos_token_id": None} | fields)


def test_untested_models_are_compared():
    model = CohereForCausalLM(small(CohereConfig)).double().eval()
    (prompt,) = prompts([5])
    assert torch.equal(Engine(model).generate(prompt, max_new_tokens=6), model.generate(prompt, max_new_tokens=6))
    sinks = GptOssForCausalLM(
        small(GptOssConfig, head_dim=8, num_local_experts=2, num_experts_per_tok=1, layer_types=["full_attention"] * 2)
    ).eval()
    with pytest.raises(T2RError, match=r"gpt_oss, an untested model type, is not understood: logits differ by"):
        Engine(sinks)


def test_other_models_are_refused_in_one_line(caplog):
    neo = GPTNeoForCausalLM(
        GPTNeoConfig(hidden_size=8, num_layers=1, num_heads=1, vocab_size=9, attention_types=[[["global"], 1]])
    )
    with pytest.raises(T2RError, match=r"^the engine does not support this model \(use model.generate\): .*interface"):
        Engine(neo)
    assert engine_for(neo) is None
    assert "falling back from the engine to model.generate(): models of type 'gpt_neo'" in caplog.text
    with pytest.raises(T2RError, match=r"requires a transformers model, not a str: load it first \(t2r.load\)"):
        Engine("gpt2")
    with pytest.raises(T2RError, match="not a Linear"):
        Engine(torch.nn.Linear(2, 2))
    spread = teacher("gpt2")
    spread.hf_device_map = {"transformer": 0, "lm_head": 1}
    with pytest.raises(T2RError, match="several devices"):
        Engine(spread)
    with pytest.raises(T2RError, match="beyond the 64 positions"):
        Engine(teacher("gpt2")).generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=VOCABULARY)


def test_help_shows_the_calls_of_a_user():
    public = {name for name in dir(Engine) if not name.startswith("_")}
    assert public == {"generate", "stream", "submit", "generate_each", "step", "run", "stop", "cancel", "busy"}
    assert all(getattr(t2r.Engine, name).__doc__ for name in public)
