"""Beam search in the engine finds the same sequences as `generate`."""

import pytest
import torch

import t2r
from families import EOS, PAD, VOCABULARY, batch, is_seq2seq, tiny
from t2r import Engine
from t2r.generation.engine import ForGenerate

CASES = {
    "gpt2": ("gpt2", {}),
    "llama kept": ("llama", {"rotary": False, "decay": True, "softmax_layers": [1]}),
    "marian": ("marian", {}),
    "marian kept": ("marian", {"softmax_layers": [1]}),
}
OPTIONS = {
    "plain": {},
    "penalty": {"length_penalty": 0.6, "num_return_sequences": 2},
    "early": {"early_stopping": True, "length_penalty": 2.0, "no_repeat_ngram_size": 2},
    "sampled": {"do_sample": True, "top_k": 10},
}


def swapped(case, merged=False):
    model_type, options = CASES[case]
    model = t2r.swap(tiny(model_type, torch.float64), **({"feature_size": 8, "recurrent": "both"} | options)).eval()
    model.generation_config.eos_token_id = list(range(EOS, VOCABULARY, 5))  # some beams end early
    model.generation_config.pad_token_id = PAD
    return t2r.merge(model) if merged else model


def inputs(case):
    """Return padded prompts of different lengths."""
    model_type = CASES[case][0]
    given = batch(model_type, padding="right" if is_seq2seq(model_type) else "left")
    return {name: x for name, x in given.items() if not name.startswith("decoder")}


@pytest.mark.parametrize("case", CASES)
def test_beams_equal_those_of_generate(case):
    model, given = swapped(case), inputs(case)
    engine, lengths = Engine(model), set()
    for options in OPTIONS.values():
        how = {"num_beams": 3, "max_new_tokens": 14} | options
        torch.manual_seed(3)
        expected = model.generate(**given, **how)
        torch.manual_seed(3)
        assert torch.equal(engine._attempt(**given, **how).result(), expected)
        lengths.add(expected.shape[1])
    assert engine.beam_step.captured_as == "recording"
    assert engine.rows.step is None
    assert len(lengths) > 1  # some searches ended before max_new_tokens


def test_a_step_is_used_again_unless_its_size_does_not_fit():
    model, given = swapped("marian", merged=True), inputs("marian")
    engine, steps = Engine(model), []
    for rows, beams in ((3, 4), (2, 3), (1, 4), (3, 5)):
        part = {name: x[:rows] for name, x in given.items()}
        expected = model.generate(**part, num_beams=beams, max_new_tokens=6)
        assert torch.equal(engine._attempt(**part, num_beams=beams, max_new_tokens=6).result(), expected)
        steps.append(engine.beam_step)
    assert [step.rows for step in steps] == [12, 12, 4, 15]
    assert steps[0] is steps[1]


def test_beams_continue_from_a_state_while_others_run():
    model = swapped("llama kept")
    text = torch.randint(3, VOCABULARY, (1, 12))
    state = model(text[:, :8], use_cache=True).past_key_values
    how = {"num_beams": 3, "max_new_tokens": 8}
    expected = model.continue_from(state, text[:, 8:], **how)
    engine = Engine(model)
    other = engine.submit(text, max_new_tokens=10, eos_token_id=None)
    engine.step()
    assert torch.equal(engine.generate(text[:, 8:], state=state, **how), expected)
    assert torch.equal(
        engine.generate(text[:, 8:], state=state, seed=5, do_sample=True, **how), seeded(model, state, text, how)
    )
    list(engine.run())
    assert other.tokens == model.generate(text, max_new_tokens=10, eos_token_id=None)[0, 12:].tolist()


def seeded(model, state, text, how):
    torch.manual_seed(5)
    return model.continue_from(state, text[:, 8:], do_sample=True, **how)


def test_the_bytes_of_beams_are_counted():
    model, given = swapped("gpt2"), inputs("gpt2")
    engine = Engine(model)
    done = engine._attempt(**given, num_beams=3, max_new_tokens=4)
    kept = model.generate(**given, num_beams=3, max_new_tokens=4, return_dict_in_generate=True).past_key_values
    assert engine._state_bytes(done) == kept.nbytes


def test_exact_attention_is_left_to_generate():
    model, given = swapped("marian"), inputs("marian")
    engine = Engine(model)
    with t2r.exact_attention(model):
        expected = model.generate(**given, num_beams=2, max_new_tokens=6)
        assert torch.equal(engine.generate(**given, num_beams=2, max_new_tokens=6), expected)
        with pytest.raises(ForGenerate, match="exact attention"):
            engine._attempt(**given, max_new_tokens=6)
