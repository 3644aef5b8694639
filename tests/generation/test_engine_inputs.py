"""Inputs and options of the engine, which must mean the same as in `generate`, or be refused."""

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import ForcedEOSTokenLogitsProcessor, MaxLengthCriteria, NoBadWordsLogitsProcessor

import t2r
from engines import alone, prompts, swapped, words
from families import POSITIONS, VOCABULARY, tiny
from t2r import Engine, T2RError
from t2r.generation.text import complete

CASES = ["gpt2", "llama recipe", "llama recipe kept"]


def padded_state(model, rows=2, tokens=6):
    """Return the state of prompts that are padded on the left by 0, 1, ... tokens, and their mask."""
    ids = torch.cat(prompts([tokens] * rows, seed=3))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, :row] = 0
    cache = model.make_cache()
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    return cache, mask


@pytest.mark.parametrize("case", CASES)
def test_a_mask_of_new_tokens_or_of_all_tokens(case):
    model = swapped(case)
    state, mask = padded_state(model)
    new = torch.cat(prompts([3, 3], seed=4))
    expected = model.continue_from(state, new, max_new_tokens=6)
    whole = torch.cat([mask, torch.ones_like(new)], 1)
    for given in (None, torch.ones_like(new), whole):
        assert torch.equal(Engine(model).generate(new, state=state, attention_mask=given, max_new_tokens=6), expected)
        assert torch.equal(model.continue_from(state, new, attention_mask=given, max_new_tokens=6), expected)
    for wrong in (whole[:, 1:], torch.ones(1, 3, dtype=torch.long)):
        for call in (
            lambda **how: Engine(model).generate(new, state=state, **how),
            lambda **how: model.continue_from(state, new, **how),
        ):
            with pytest.raises(T2RError, match="attention_mask has shape"):
                call(attention_mask=wrong, max_new_tokens=2)
    with pytest.raises(T2RError, match=r"attention_mask has shape \(2, 9\): it must be \(2, 3\), that of the prompts"):
        Engine(model).generate(new, attention_mask=whole, max_new_tokens=2)


def test_a_state_of_several_sequences_has_one_for_each_prompt():
    model, tokenizer = swapped("gpt2"), words()
    state, _ = padded_state(model, rows=3)
    texts = [" ".join(f"w{n + 5 * i}" for n in range(1, 4)) for i in range(3)]
    one = [
        next(complete(model, tokenizer, [text], state=state.take(i), max_new_tokens=6)).text
        for i, text in enumerate(texts)
    ]
    for size in (1, 2, 3):
        assert [
            done.text for done in complete(model, tokenizer, texts, state=state, batch_size=size, max_new_tokens=6)
        ] == one
    skipped = list(complete(model, tokenizer, [texts[0], " ", texts[2]], state=state, max_new_tokens=6))
    assert [done.text for done in skipped] == [one[0], "", one[2]]
    for call in (
        lambda: list(complete(model, tokenizer, texts[:2], state=state, max_new_tokens=2)),
        lambda: Engine(model).generate(torch.cat(prompts([3] * 6)), state=state, max_new_tokens=2),
        lambda: model.continue_from(state, torch.cat(prompts([3] * 6)), max_new_tokens=2),
    ):
        with pytest.raises(T2RError, match="prompts for a state of 3 sequences"):
            call()
    (prompt,) = prompts([3])
    for empty, message in ((model.make_cache(), "the state is empty"), (DynamicCache(), "a T2RCache")):
        with pytest.raises(T2RError, match=message):
            Engine(model).generate(prompt, state=empty, max_new_tokens=2)
        with pytest.raises(T2RError, match=message):
            model.continue_from(empty, prompt, max_new_tokens=2)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("limit", [3, 5, 9, 14])
def test_a_maximum_length_as_a_criterion(limit, sample):
    """A criterion of the user replaces that of transformers, whether it is longer or shorter. If it is not longer than
    the prompt, one token is generated."""
    model, (prompt,) = swapped("gpt2 kept"), prompts([5])
    how = {"max_new_tokens": 6, "eos_token_id": None}
    how |= {"do_sample": True, "top_k": 1} if sample else {}
    criteria = StoppingCriteriaList([MaxLengthCriteria(limit)])
    expected = model.generate(prompt, stopping_criteria=criteria, **how)
    assert expected.shape[1] == max(limit, 6)
    assert torch.equal(Engine(model).generate(prompt, stopping_criteria=criteria, **how), expected)


def test_processors_of_the_user_do_what_they_do_in_generate():
    model, (prompt,) = swapped("gpt2"), prompts([5])
    tokens = alone(model, prompt, max_new_tokens=12, eos_token_id=None)
    later = tokens[2]
    for processor, eos in (
        (ForcedEOSTokenLogitsProcessor(9, 2), 2),
        (NoBadWordsLogitsProcessor([[later]]), later),  # it does not know that this is an EOS token
        (NoBadWordsLogitsProcessor([[later]], eos_token_id=torch.tensor([later])), later),
    ):
        how = {"logits_processor": LogitsProcessorList([processor]), "max_new_tokens": 12, "eos_token_id": eos}
        assert torch.equal(Engine(model).generate(prompt, **how), model.generate(prompt, **how))


def test_forbidden_tokens_outside_the_vocabulary_are_ignored():
    model, (prompt,) = swapped("llama"), prompts([5])
    last = VOCABULARY - 1
    with torch.no_grad():
        model.get_output_embeddings().weight[last] = model.get_output_embeddings().weight.sum(0)
    engine = Engine(model)
    for outside in ([-1], [VOCABULARY + 3], [-1, last]):
        how = {"max_new_tokens": 8, "suppress_tokens": outside}
        assert torch.equal(engine.generate(prompt, **how), model.generate(prompt, **how))


@pytest.mark.parametrize("case", ["gpt2", "marian"])
def test_prompts_that_cannot_be_read_are_refused(case):
    engine = Engine(swapped(case))
    with pytest.raises(T2RError, match=r"must be a tensor \[batch, tokens\]; got a list"):
        engine.generate([[1, 2, 3]], max_new_tokens=2)
    with pytest.raises(T2RError, match="got a list"):
        engine.submit([1, 2, 3], max_new_tokens=2)
    with pytest.raises(T2RError, match=r"got one of shape \(3,\)"):
        engine.generate(torch.tensor([1, 2, 3]), max_new_tokens=2)
    with pytest.raises(T2RError, match=f"has token {VOCABULARY + 5}"):
        engine.generate(torch.tensor([[VOCABULARY + 5]]), max_new_tokens=2)
    with pytest.raises(T2RError, match="has token -1"):
        engine.generate(torch.tensor([[3, -1]]), max_new_tokens=2)


def test_prompts_that_end_with_padding_are_refused():
    engine, ids = Engine(swapped("gpt2")), torch.cat(prompts([5, 5]))
    right, nothing = torch.ones_like(ids), torch.ones_like(ids)
    right[1, 3:], nothing[1] = 0, 0
    for mask, message in ((right, "pad prompts on the left"), (nothing, "padding only")):
        for how in ({}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}):
            with pytest.raises(T2RError, match=message):
                engine.generate(ids, attention_mask=mask, max_new_tokens=2, **how)
    source = torch.cat(prompts([5, 5]))
    model = swapped("marian")  # sources may end with padding
    expected = model.generate(source, attention_mask=right, max_new_tokens=2)
    assert torch.equal(Engine(model).generate(source, attention_mask=right, max_new_tokens=2), expected)


def test_a_source_beyond_the_positions_of_the_encoder_is_refused():
    engine = Engine(t2r.swap(tiny("bart"), feature_size=4, recurrent="both"))
    with pytest.raises(T2RError, match=f"beyond the {POSITIONS} positions of the encoder"):
        engine.generate(torch.full((1, POSITIONS + 1), 5), max_new_tokens=2)


def test_autocast_is_for_generate(caplog):
    model, (prompt,) = swapped("llama", torch.float32), prompts([5])
    engine = Engine(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.generate(prompt, max_new_tokens=4)
        assert torch.equal(engine.generate(prompt, max_new_tokens=4), expected)
    assert "autocast is enabled" in caplog.text
    assert engine.generate(prompt, max_new_tokens=4)[0, 5:].tolist() == alone(model, prompt, max_new_tokens=4)


@pytest.mark.parametrize("case", ["gpt2 kept", "marian"])
@pytest.mark.parametrize("num_beams", [1, 2])
def test_an_engine_of_inference_mode_can_be_used_outside(case, num_beams):
    model, (prompt,) = swapped(case), prompts([5])
    engine = Engine(model)
    expected = model.generate(prompt, max_new_tokens=4, num_beams=num_beams)
    with torch.inference_mode():
        assert torch.equal(engine.generate(prompt, max_new_tokens=4, num_beams=num_beams), expected)
    assert torch.equal(engine.generate(prompt, max_new_tokens=4, num_beams=num_beams), expected)


def test_the_beams_of_the_model_continue_a_state():
    model, (prompt,) = swapped("gpt2"), prompts([3])
    state, _ = padded_state(model, rows=1)
    expected = model.continue_from(state, prompt, max_new_tokens=4, num_beams=3)
    model.generation_config.num_beams = 3
    config = GenerationConfig(max_new_tokens=4)
    assert torch.equal(model.continue_from(state, prompt, generation_config=config), expected)
    assert torch.equal(Engine(model, config).generate(prompt, state=state), expected)
    greedy = model.continue_from(state, prompt, generation_config=config, num_beams=1)
    model.generation_config.num_beams = 1
    assert torch.equal(greedy, model.continue_from(state, prompt, generation_config=config))


def test_batches_may_continue_states():
    model, (prompt,) = swapped("gpt2"), prompts([3])
    state, _ = padded_state(model, rows=1)
    expected = model.continue_from(state, prompt, max_new_tokens=4)[0, 3:].tolist()
    batches = [{"input_ids": prompt, "state": state, "max_new_tokens": 4}, {"input_ids": prompt, "max_new_tokens": 4}]
    assert dict(Engine(model, rows=2).generate_each(batches)) == {
        0: expected,
        1: alone(model, prompt, max_new_tokens=4),
    }
    with pytest.raises(T2RError, match="beam search is requested"):
        list(Engine(model).generate_each([{"input_ids": prompt, "num_beams": 2}]))


@pytest.mark.parametrize("name", ["rows", "max_length", "source_length"])
def test_sizes_of_an_engine_are_positive(name):
    with pytest.raises(T2RError, match=f"{name} must be at least 1; got -1"):
        Engine(swapped("gpt2"), **{name: -1})


def test_a_mask_may_be_changed_after_it_was_read():
    model, (new,) = swapped("gpt2"), prompts([3])
    caches = []
    for change in (False, True):
        ids, mask, cache = torch.cat(prompts([6, 6])), torch.ones(2, 6, dtype=torch.long), model.make_cache()
        mask[1, :2] = 0
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        if change:
            mask.fill_(1)
        caches.append(model.continue_from(cache, new.expand(2, -1), max_new_tokens=6))
    assert torch.equal(*caches)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "opt", "falcon"])
def test_static_caches_of_generate(family):
    """For some families, transformers prepares a mask for each type of layers."""
    model, ids = t2r.swap(tiny(family), feature_size=8, recurrent="both"), torch.cat(prompts([5, 5]))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    given = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, **given)
    assert torch.equal(model.generate(ids, cache_implementation="static", **given), expected)


def test_caches_that_cannot_be_used_are_refused():
    (prompt,) = prompts([8])
    for case in ("gpt2", "gpt2 kept"):
        model = swapped(case)
        used = DynamicCache()
        with torch.no_grad():
            model(prompts([12])[0], past_key_values=used, use_cache=True)
        with pytest.raises(T2RError, match="has read 12 tokens and the input has 8: to continue from a state"):
            model.generate(prompt, past_key_values=used, max_new_tokens=2)
        static = model.make_static_cache(1, 40)
        expected = model.generate(prompt, past_key_values=static, max_new_tokens=4)
        with pytest.raises(T2RError, match=r"call cache.reset\(\)"):
            model.generate(prompt, past_key_values=static, max_new_tokens=4)
        static.reset()
        assert torch.equal(model.generate(prompt, past_key_values=static, max_new_tokens=4), expected)
    with pytest.raises(T2RError, match="has room for 9 tokens in softmax layers, but max_length is 28"):
        model.generate(prompt, past_key_values=model.make_static_cache(1, 9), max_new_tokens=20)
