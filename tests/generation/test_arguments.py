"""Values of another type are one line at every entrance of generation, before anything is computed."""

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria, StoppingCriteriaList

import t2r
from engines import alone, prompts, swapped, words
from t2r import Engine, T2RError
from t2r.generation.engine.arguments import TYPES
from t2r.generation.translation import translate


@pytest.fixture(scope="module")
def model():
    return swapped("gpt2", torch.float32)


IDS = torch.tensor([[5, 6, 7]])
OPTIONS = {
    "max_new_tokens": [2.0, "2", True, 0, -1, 2**31, [2]],
    "max_length": [5.5, "5", -1],
    "min_new_tokens": [1.0, -1],
    "num_beams": [2.0, "2", 0, False],
    "num_return_sequences": [0, 1.5],
    "do_sample": [1, "yes", None.__class__],
    "temperature": ["0.5", float("nan"), float("inf"), True],
    "top_k": [1.5, -1, "3"],
    "top_p": ["0.5", float("nan")],
    "repetition_penalty": [float("nan"), "1"],
    "no_repeat_ngram_size": [2.0, -1],
    "eos_token_id": ["</s>", 2.0, [2, "a"], True, torch.tensor([2.0]), {}],
    "pad_token_id": ["<pad>", 0.0],
    "suppress_tokens": ["a", [1.5]],
    "bad_words_ids": [[1, 2], [[]], "word", [["a"]]],
    "early_stopping": ["always", 3],
    "generation_config": [{"max_new_tokens": 2}, "greedy", 5],
    "logits_processor": [5, [5], "a", LogitsProcessor, [LogitsProcessor]],
    "stopping_criteria": [5, [None], lambda ids, scores: False],
    "attention_mask": [[[1, 1, 1]], 1, "mask", torch.ones(3), torch.ones(1, 9)],
    "streamer": [5, print],
    "seed": [1.5, "1", -(2**63) - 1, 2**64, True],
    "state": [5, "state", {}],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_another_type(name, model):
    engine = Engine(model)
    for value in OPTIONS[name]:
        for entrance in (engine.generate, engine.submit, lambda ids, **o: list(engine.stream(ids, **o))):
            if name == "streamer" and entrance != engine.generate:
                continue
            with pytest.raises(T2RError, match=name) as caught:
                entrance(IDS, **({"max_new_tokens": 2} | {name: value}))
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) < 250
        assert not engine.busy


@pytest.mark.parametrize("name", sorted(TYPES.keys() & OPTIONS.keys()))
def test_values_of_a_configuration_are_checked_too(name, model):
    config = GenerationConfig()
    setattr(config, name, OPTIONS[name][0])
    for call in (
        lambda: Engine(model).generate(IDS, generation_config=config),
        lambda: Engine(model, config),
        lambda: t2r.generate(model, "a", tokenizer=words(), generation_config=config),
    ):
        with pytest.raises(T2RError, match=name):
            call()


@pytest.mark.parametrize(
    "ids", [[1, 2], None, 5, "text", torch.ones(1, 3), torch.ones(1, 3).bool(), torch.ones(1, 1, 1)]
)
def test_prompts_of_another_type(ids, model):
    engine = Engine(model)
    for call in (
        lambda: engine.generate(ids, max_new_tokens=2),
        lambda: engine.submit(ids, max_new_tokens=2),
        lambda: list(engine.generate_each([{"input_ids": ids, "max_new_tokens": 2}])),
    ):
        with pytest.raises(T2RError, match=r"prompts|input_ids"):
            call()


def test_other_arguments(model):
    tokenizer, source = words(), swapped("marian", torch.float32)
    read = t2r.read_document(model, tokenizer, "abc")
    calls = {
        "rows must be a whole number": lambda: Engine(model, rows=2.0),
        "rows must be at least 1": lambda: Engine(model, rows=-3),
        "max_length must be a whole number": lambda: Engine(model, max_length="8"),
        "step_tokens must be a whole number": lambda: Engine(model, step_tokens=True),
        "generation_config must be": lambda: Engine(model, {"max_new_tokens": 2}),
        "not a str": lambda: Engine("gpt2"),
        "a batch must be a dictionary": lambda: list(Engine(model).generate_each([IDS])),
        "prompts must be .*; got None": lambda: t2r.generate(model, None, tokenizer=tokenizer),
        "prompts must be .*; got 5": lambda: t2r.generate(model, 5, tokenizer=tokenizer),
        "prompts must be .*; got (a list|1.5)": lambda: t2r.generate(model, ["a", 1.5], tokenizer=tokenizer),
        "prompts must be .*; got (a list|None)": lambda: t2r.generate(model, [None], tokenizer=tokenizer),
        "tokenizer must be": lambda: t2r.generate(model, "a", tokenizer="gpt2"),
        "state must be": lambda: t2r.generate(model, "a", tokenizer=tokenizer, state=5),
        "batch_size must be": lambda: t2r.generate(model, "a", tokenizer=tokenizer, batch_size=2.0),
        "seed must be": lambda: t2r.generate(model, "a", tokenizer=tokenizer, seed="1"),
        "text must be": lambda: t2r.read_document(model, tokenizer, 5),
        "continue_from requires a tensor": lambda: model.continue_from(read, [[1, 2]]),
        "lines must be a list of texts": lambda: translate(source, tokenizer, "abc"),
        "each of lines must be a text": lambda: translate(source, tokenizer, ["abc", None]),
        "beams must be": lambda: translate(source, tokenizer, ["abc"], beams=1.5),
        "length_penalty must be": lambda: translate(source, tokenizer, ["abc"], length_penalty="1"),
    }
    for message, call in calls.items():
        with pytest.raises(T2RError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_more_than_fits_into_memory_is_one_line(model):
    needs = "need at least .*iB of memory, and .*iB are free on cpu: give fewer"
    with pytest.raises(T2RError, match=f"1,000,000,000 sequences at a time {needs}"):
        Engine(model, rows=10**9).generate(IDS, max_new_tokens=2)
    for options in ({"num_beams": 10**9}, {"num_return_sequences": 10**9, "do_sample": True}):
        with pytest.raises(T2RError, match=f"1,000,000,000 sequences at a time {needs}"):
            Engine(model).generate(IDS, max_new_tokens=2, **options)
    with pytest.raises(T2RError, match=needs):
        Engine(swapped("llama recipe kept")).generate(IDS, max_new_tokens=2**31 - 5)


def test_what_the_caller_changes_after_a_call_does_not_change_a_waiting_sequence(model):
    engine = Engine(model, rows=1)
    given = prompts([6, 5])
    expected = [alone(model, prompt, max_new_tokens=6) for prompt in given]
    mask = torch.ones_like(given[1])
    sequences = [
        engine.submit(given[0], max_new_tokens=6),
        engine.submit(given[1], attention_mask=mask, max_new_tokens=6),
    ]
    given[1].fill_(9)
    mask[0, :3] = 0
    list(engine.run())
    assert [sequence.tokens for sequence in sequences] == expected


class Changes(LogitsProcessor):
    """Changes the tokens so far in place."""

    def __call__(self, input_ids, scores):
        input_ids[:, 0] = 11
        input_ids[:, -1] += 1 if input_ids.shape[1] % 2 else 0
        return scores


class ChangesLast(StoppingCriteria):
    """Changes the token that the model reads next."""

    def __call__(self, input_ids, scores, **kwargs):
        input_ids[:, -1] = 7 + input_ids.shape[1]
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("how", [{"logits_processor": [Changes()]}, {"stopping_criteria": [ChangesLast()]}])
@pytest.mark.parametrize("case", ["gpt2", "marian"])
def test_tokens_that_are_changed_in_place(case, how):
    model, engine = swapped(case), Engine(swapped(case))
    how = {"max_new_tokens": 6, **({} if "logits_processor" in how else {"eos_token_id": None}), **how}
    if "stopping_criteria" in how:
        how["stopping_criteria"] = StoppingCriteriaList(how["stopping_criteria"])
    (prompt,) = prompts([6])
    assert torch.equal(engine.generate(prompt.clone(), **how), model.generate(prompt.clone(), **how))
