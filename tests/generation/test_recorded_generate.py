"""`generate()` with a recorded step: the same tokens as without, whoever looks, and whatever changes between calls."""

import logging
import threading

import pytest
import torch

from engines import inputs, swapped
from t2r import compat
from t2r.generation import recorded
from t2r.model.modeling import T2RModel

MANY = {"max_new_tokens": 6}
STOCK = {"cache_implementation": "dynamic"}
"""With it, `generate()` is always that of transformers."""


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Recordings are worth their time from the first token on. Yields whether each call was decoded by one."""
    found = []

    def generate(*call):
        ids = recorded.generate(*call)
        if "custom_generate" not in call[2]:  # a call of the engine, which only prepares
            found.append(ids is not None)
        return ids

    monkeypatch.setattr(recorded, "LEAST", {"cpu": 1})
    monkeypatch.setattr(T2RModel, "recorded", staticmethod(generate))
    return found


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 5}, {"num_beams": 2}, {"num_return_sequences": 2,
    "do_sample": True}], ids=["greedy", "sampled", "beams", "two of each"])  # fmt: skip
@pytest.mark.parametrize("case", ["gpt2", "llama recipe kept", "marian"])
def test_generate_has_the_same_tokens_with_a_recorded_step(case, options, calls):
    model, given = swapped(case), inputs(case)
    torch.manual_seed(3)
    expected = model.generate(**given, **MANY, **options, **STOCK)
    torch.manual_seed(3)
    assert torch.equal(model.generate(**given, **MANY, **options), expected)
    assert calls == [False, True]


def test_positional_arguments_and_configurations(calls):
    model, prompt = swapped("gpt2"), torch.tensor([[5, 6, 7]])
    config = type(model.generation_config)(max_length=8, do_sample=False)
    expected = model.generate(prompt, config, **STOCK)
    assert torch.equal(model.generate(prompt, config), expected)
    assert torch.equal(model.generate(inputs=prompt, generation_config=config), expected)
    assert calls == [False, True, True]


def test_changed_weights_are_used(calls):
    model, given = swapped("llama recipe"), inputs("llama recipe")
    before = model.generate(**given, **MANY)
    for parameter in model.parameters():
        parameter.data.mul_(1.5)  # which no version counter sees
    after = model.generate(**given, **MANY)
    assert not torch.equal(before, after)
    assert torch.equal(after, model.generate(**given, **MANY, **STOCK))


class Streamer:
    def __init__(self):
        self.got = []

    def put(self, value):
        self.got.append(value.flatten().tolist())

    def end(self):
        self.got.append("end")


def test_a_streamer_receives_the_same(calls):
    model, prompt, got = swapped("gpt2"), torch.tensor([[5, 6, 7]]), []
    for options in (STOCK, {}):
        streamer = Streamer()
        model.generate(prompt, streamer=streamer, **MANY, **options)
        got.append(streamer.got)
    assert got[0] == got[1]
    assert calls == [False, True]


def test_hooks_see_every_forward_pass(calls):
    model, prompt, seen = swapped("gpt2"), torch.tensor([[5, 6, 7]]), []
    with model.transformer.h[0].register_forward_hook(lambda *_: seen.append(1)):
        model.generate(prompt, **MANY)
    assert len(seen) == 6
    assert calls == [False]
    model.transformer.h[0].forward = model.transformer.h[0].forward
    assert compat.is_watched(model)


def test_modes_see_every_operation(calls):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        swapped("gpt2").generate(torch.tensor([[5, 6, 7]]), **MANY)
    assert calls == [False]


@pytest.mark.parametrize(
    "options",
    [
        {"output_scores": True, "return_dict_in_generate": True},
        {"use_cache": False},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"max_new_tokens": 0},
        {"max_new_tokens": 2.5},
        {"temperature": "warm", "do_sample": True},
        {"no_such_option": 1},
        {"num_beams": 2, "streamer": Streamer()},
        {"attention_mask": torch.tensor([[1, 1, 0]])},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_the_engine_does_not_take_is_as_in_transformers(options, calls, caplog):
    model, prompt, got = swapped("gpt2"), torch.tensor([[5, 6, 7]]), []
    for more in (STOCK, {}):
        try:
            out = model.generate(prompt, **{**MANY, **options}, **more)
            got.append(getattr(out, "sequences", out).tolist())
        except Exception as error:
            got.append((type(error), str(error)))
    assert got[0] == got[1]
    assert not any(calls)


def test_few_tokens_are_not_worth_a_recording(calls, monkeypatch):
    monkeypatch.setattr(recorded, "LEAST", {"cpu": 7})
    model, prompt = swapped("gpt2"), torch.tensor([[5, 6, 7]])
    model.generate(prompt, max_new_tokens=6)
    model.generate(prompt, max_new_tokens=7)
    model.generate(prompt, max_length=9)
    model.generate(prompt, max_length=10)
    assert calls == [False, True, False, True]


def test_a_model_in_training_mode_and_a_cache(calls):
    model, prompt = swapped("gpt2"), torch.tensor([[5, 6, 7]])
    model.train()
    model.generate(prompt, **MANY)
    model.eval()
    model.generate(prompt, past_key_values=model.make_cache(), **MANY)
    cache = model.make_cache()
    model(prompt, past_key_values=cache)
    model.continue_from(cache, prompt, **MANY)
    assert not any(calls)


def test_threads_do_not_wait_for_each_other(calls):
    model, results = swapped("gpt2"), {}
    prompts = [torch.tensor([[5 + i, 6, 7]]) for i in range(3)]
    expected = [model.generate(prompt, **MANY, **STOCK) for prompt in prompts]

    def work(i):
        results[i] = model.generate(prompts[i], **MANY)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[i], expected[i]) for i in range(3))
    assert calls[3:] == [True] * 3


def test_a_model_whose_step_cannot_be_recorded(calls, caplog):
    """It is said once, and the next call does not try again."""
    model, prompt = swapped("gpt2"), torch.tensor([[5, 6, 7]])
    expected = model.generate(prompt, **MANY, **STOCK)
    own = type(model.transformer.h[0].mlp).forward

    class Reading(type(model.transformer.h[0].mlp)):
        def forward(self, x):
            assert x.sum().item() is not None
            return own(self, x)

    model.transformer.h[0].mlp.__class__ = Reading
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(model.generate(prompt, **MANY), expected)
    assert [record for record in caplog.text.splitlines() if "cannot be captured" in record] == caplog.text.splitlines()
    assert calls == [False, True, False]
