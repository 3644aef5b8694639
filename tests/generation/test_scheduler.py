"""Requests that run beside each other have the results they have alone, end once, and do not wait for each other."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList

from engines import alone, prompts, swapped
from t2r import Engine, T2RError
from t2r.generation.engine import rows as rows_module
from t2r.generation.engine.recording import NoValues

SAMPLED = {"do_sample": True, "top_k": 0}
KINDS = (
    {},
    {"suppress_tokens": [3, 4, 5, 6, 7, 8, 9, 10]},
    {"bad_words_ids": [[11], [12]], "suppress_tokens": [13]},
    {"sequence_bias": [[[20], 4.0], [[21], -4.0]]},
    {"repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 1},  # chosen by the processors of transformers
    {"min_new_tokens": 3, "do_sample": True},  # also, if there are stops
    SAMPLED,
    {"do_sample": True, "top_k": 3},
    SAMPLED | {"top_p": 0.6},
    SAMPLED | {"min_p": 0.2, "temperature": 1.5},
    SAMPLED | {"temperature": 0.5, "top_p": 0.9, "top_k": 12, "repetition_penalty": 1.3, "suppress_tokens": [17, 30]},
    SAMPLED | {"sequence_bias": [[[22], 3.0]], "repetition_penalty": 0.8},
)


@cache
def model():
    return swapped("gpt2 kept")


@cache
def prompt_of(length, seed):
    return prompts([length], seed)[0]


@cache
def expected(length, seed, kind, new_tokens, stops):
    torch.manual_seed(seed)
    how = {"max_new_tokens": new_tokens, "eos_token_id": list(stops) or None}
    return alone(model(), prompt_of(length, seed), **how, **KINDS[kind])


requests = st.fixed_dictionaries(
    {
        "length": st.integers(1, 14),
        "seed": st.integers(0, 3),
        "kind": st.integers(0, len(KINDS) - 1),
        "new_tokens": st.integers(1, 9),
        "stops": st.sampled_from([(), tuple(range(3, 20))]),
    }
)
arrivals = st.lists(st.tuples(requests, st.integers(0, 8), st.none() | st.integers(0, 5)), min_size=1, max_size=7)


@settings(max_examples=20)
@given(arrivals, st.sampled_from([None, 1, 2, 3]), st.integers(1, 6), st.sampled_from([1, 3]))
def test_any_mix_of_requests(mix, rows, budget, look_every):
    """Each result is that of the request alone. Each request ends with one event that has a reason, in time."""
    engine = Engine(model(), rows=rows, step_tokens=budget)
    engine.rows.block = 8  # buffers are too small for later requests
    engine.scheduler.look_every = look_every
    sequences, events, now = {}, {}, 0
    pieces = sum(-(-request["length"] // budget) + request["new_tokens"] for request, _, _ in mix)
    while len(sequences) < len(mix) or engine.busy:
        for i, (request, start, _) in enumerate(mix):
            if start == now:
                how = {"max_new_tokens": request["new_tokens"], "eos_token_id": list(request["stops"]) or None}
                prompt = prompt_of(request["length"], request["seed"])
                sequences[i] = engine.submit(prompt, seed=request["seed"], **how, **KINDS[request["kind"]])
        for i, (_, start, patience) in enumerate(mix):
            if patience is not None and start + patience == now:
                engine.cancel(sequences[i])
        for event in engine.step():
            events.setdefault(event.sequence, []).append(event)
        now += 1
        assert now <= 9 + pieces + len(mix)  # nobody waits longer than for all others, one after the other
    for event in engine.run():
        events.setdefault(event.sequence, []).append(event)
    assert not engine.rows.held
    for i, sequence in sequences.items():
        request, own = mix[i][0], events[sequence]
        assert [event.reason for event in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].reason == sequence.reason
        assert [event.token for event in own if event.token is not None] == sequence.tokens
        whole = expected(**request)
        if sequence.reason == "cancelled":
            assert mix[i][2] is not None
            assert sequence.tokens == whole[: len(sequence.tokens)]
            continue
        assert sequence.tokens == whole
        assert sequence.reason == ("stop" if whole[-1] in request["stops"] else "length")


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_options_that_are_numbers_are_chosen_on_the_device(kind):
    """Without reading a value of a tensor: nothing waits for the device. With two prompts, as in `generate`."""
    ids = torch.cat(prompts([5, 5], seed=kind))
    how = {"max_new_tokens": 12, **KINDS[kind]}
    torch.manual_seed(5)
    wanted = model().generate(ids, attention_mask=torch.ones_like(ids), **how)
    engine = Engine(model())
    assert torch.equal(engine.generate(ids, seed=5, **how), wanted)
    engine.submit(ids[0], seed=5, **how)
    engine.step()
    (group,) = engine.scheduler.running
    assert (group.choice is None) == ("no_repeat_ngram_size" in how)
    if group.choice is not None and not group.choice.greedy:
        with NoValues():
            engine.rows.step.run()
            engine.scheduler.sampler.choose(engine.rows.step)


def test_steps_inside_and_outside_of_inference_mode():
    engine, (prompt,) = Engine(model()), prompts([5])
    how = {"max_new_tokens": 6, "seed": 2, **KINDS[-1]}
    sequence = engine.submit(prompt, **how)
    with torch.inference_mode():
        engine.step()
    longer = engine.submit(torch.cat([prompt] * 3, 1), **how)
    engine.step()
    with torch.inference_mode():
        engine.step()
    list(engine.run())
    for ids, found in ((prompt, sequence), (torch.cat([prompt] * 3, 1), longer)):
        assert found.tokens == Engine(model()).generate(ids, **how)[0, ids.shape[1] :].tolist()


class Custom(LogitsProcessor):
    def __call__(self, ids, scores):
        return scores - scores.new_tensor(range(scores.shape[1])).remainder(7)


def test_every_reason():
    (prompt,) = prompts([5])
    free = expected(5, 0, 0, 9, ())

    class Failing(Custom):
        def __call__(self, ids, scores):
            raise ValueError("no")

    engine = Engine(model())
    ends = {
        "length": {"max_new_tokens": 4},
        "stop": {"max_new_tokens": 9, "eos_token_id": free[3]},
        "error": {"max_new_tokens": 4, "logits_processor": LogitsProcessorList([Failing()])},
        "cancelled": {"max_new_tokens": 40},
    }
    sequences = {reason: engine.submit(prompt, **how) for reason, how in ends.items()}
    forced = engine.submit(prompt, max_new_tokens=4, eos_token_id=2, forced_eos_token_id=2)
    events = [event for _ in range(10) for event in engine.step()]
    engine.cancel(sequences["cancelled"])
    engine.cancel(sequences["cancelled"])  # has ended: nothing happens
    engine.cancel(sequences["stop"])
    events += list(engine.run())
    for reason, sequence in sequences.items():
        assert sequence.reason == reason
        assert [event.reason for event in events if event.sequence is sequence and event.reason] == [reason]
        assert sequence.finished
    assert sequences["stop"].tokens == free[: free.index(free[3]) + 1]
    assert [event.token for event in events if event.reason in ("error", "cancelled")] == [None, None]
    assert (forced.reason, forced.tokens[-1]) == ("length", 2)


def test_a_long_prompt_delays_nobody():
    """While it is read, in pieces, others advance by a token in each step, and a shorter prompt behind it starts."""
    long, short, third = prompts([40, 3, 4])
    engine = Engine(model(), step_tokens=4)
    running = engine.submit(short, max_new_tokens=30)
    engine.step()
    waits = engine.submit(long, max_new_tokens=2)
    for count in range(3, 8):
        engine.step()
        assert len(running.tokens) == count
        assert not waits.tokens
    behind = engine.submit(third, max_new_tokens=2)
    engine.step()
    engine.step()
    assert len(behind.tokens) == 2
    assert not waits.tokens
    list(engine.run())
    for prompt, sequence in ((long, waits), (short, running), (third, behind)):
        assert sequence.tokens == alone(model(), prompt, max_new_tokens=len(sequence.tokens))


@pytest.mark.parametrize("state_dtype", [None, torch.float16])
@pytest.mark.parametrize("case", ["gpt2 kept", "llama recipe kept", "marian kept", "marian cross", "t5"])
def test_a_step_grows_while_sequences_run(case, state_dtype):
    """Neither more sequences nor a longer one, nor one with more biases, has to wait until the others have ended."""
    model, given = swapped(case), prompts([5, 3, 9, 4])
    options = [
        {"max_new_tokens": 14},
        {"max_new_tokens": 14, "do_sample": True, "top_k": 4},
        {"max_new_tokens": 30},
        {"max_new_tokens": 6, "suppress_tokens": list(range(3, 23))},
    ]
    wanted = []
    for prompt, how in zip(given, options, strict=True):
        engine = Engine(model, state_dtype=state_dtype)
        wanted.append(engine.generate(prompt, attention_mask=torch.ones_like(prompt), seed=1, **how))
    engine = Engine(model, state_dtype=state_dtype)
    engine.rows.block = 2
    sequences, sizes = [], []
    for prompt, how in zip(given, options, strict=True):
        sequences.append(engine.submit(prompt, seed=1, **how))
        engine.step()
        assert sequences[-1].tokens
        sizes.append(engine.rows.step.rows)
    assert sizes == [1, 2, 4, 4]
    assert not any(sequence.finished for sequence in sequences)
    list(engine.run())
    for sequence, whole in zip(sequences, wanted, strict=True):
        assert sequence.tokens == whole[0, -len(sequence.tokens) :].tolist()


def test_a_request_that_does_not_fit_ends_alone(monkeypatch):
    """One that never fits is refused when it is submitted. If memory is exhausted, it ends with an error."""
    (prompt,) = prompts([5])
    engine = Engine(model(), max_length=20)
    with pytest.raises(T2RError, match="exceed the engine's max_length"):
        engine.submit(prompt, max_new_tokens=16)
    assert not engine.busy
    engine = Engine(model())
    engine.rows.block = 8
    first = engine.submit(prompt, max_new_tokens=12)
    engine.step()
    build = rows_module.Rows.build

    def exhausted(self, rows, room, *args, **options):
        if room.length > 50:
            raise torch.OutOfMemoryError("out of memory")
        return build(self, rows, room, *args, **options)

    monkeypatch.setattr(rows_module.Rows, "build", exhausted)
    long, behind = engine.submit(prompt, max_new_tokens=50), engine.submit(prompt, max_new_tokens=13)
    events = list(engine.run())
    assert (long.reason, long.tokens) == ("error", [])
    assert isinstance(long.error, torch.OutOfMemoryError)
    assert [event.token for event in events if event.sequence is long] == [None]
    assert first.tokens == expected(5, 0, 0, 12, ())
    assert behind.tokens == expected(5, 0, 0, 13, ())


def test_rows_by_memory(monkeypatch):
    given = prompts([4] * 7)
    engine = Engine(model())
    sequences = [engine.submit(prompt, max_new_tokens=8) for prompt in given]
    engine.step()
    assert engine.rows.step.rows == 7
    assert all(sequence.row is not None for sequence in sequences)
    one = engine.rows.step.cache.nbytes // 7
    engine = Engine(model())
    memory = 8 * one
    monkeypatch.setattr(
        rows_module, "free_memory", lambda _: memory - (engine.rows.step.cache.nbytes if engine.rows.step else 0)
    )
    sequences = [engine.submit(prompt, max_new_tokens=8) for prompt in given]
    engine.step()
    running = sum(sequence.row is not None for sequence in sequences)
    assert running == engine.rows.step.rows
    assert 2 <= running <= 4  # half of the memory, which also holds logits
    list(engine.run())
    for prompt, sequence in zip(given, sequences, strict=True):
        assert sequence.tokens == alone(model(), prompt, max_new_tokens=8)
    monkeypatch.undo()
    assert rows_module.free_memory(torch.device("cpu")) > 2**20


def test_rows_that_are_not_used_are_given_up(monkeypatch):
    monkeypatch.setattr(rows_module, "CALM", 3)
    given = prompts([4] * 6)
    engine = Engine(model())
    sequences = [engine.submit(prompt, max_new_tokens=12 if i == 5 else 2) for i, prompt in enumerate(given)]
    list(engine.run())
    assert engine.rows.step.rows == 1
    for prompt, sequence in zip(given, sequences, strict=True):
        assert sequence.tokens == alone(model(), prompt, max_new_tokens=len(sequence.tokens))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_captured_steps_with_options_by_row():
    """In float64, with steps that are captured again while sequences run, and several steps between two reads."""
    model, given = swapped("llama recipe kept").cuda(), [p.cuda() for p in prompts([5, 40, 9, 3, 7] * 2)]
    options = [KINDS[i % len(KINDS)] | {"max_new_tokens": 8 + 3 * i} for i in range(len(given))]
    wanted = [
        Engine(model, step_tokens=16).generate(prompt, seed=1, **how)[0, prompt.shape[1] :].tolist()
        for prompt, how in zip(given, options, strict=True)
    ]
    engine = Engine(model, step_tokens=16)
    engine.rows.block = 16
    sequences, steps = [], set()
    for prompt, how in zip(given, options, strict=True):
        sequences.append(engine.submit(prompt, seed=1, **how))
        engine.step()
        assert engine.rows.step.captured_as == "CUDA graph"
        steps.add(id(engine.rows.step))
    assert len(steps) > 1
    list(engine.run())
    assert [sequence.tokens for sequence in sequences] == wanted
    assert {sequence.reason for sequence in sequences} == {"length"}
