"""The engine chooses the same tokens as `generate`, independently of other running sequences."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import t2r
from engines import CASES, alone, inputs, prompts, swapped, words
from families import EOS, PAD, POSITIONS, VOCABULARY, tiny
from t2r import Engine, T2RError
from t2r.generation.engine import prefill as prefill_module
from t2r.ops import Draws
from t2r.ops.rounding import rounded
from t2r.threads import Tuner


@pytest.mark.parametrize("case", CASES)
def test_greedy_search_equals_generate(case):
    model, given = swapped(case), inputs(case)
    expected = model.generate(**given, max_new_tokens=16, do_sample=False)
    engine = Engine(model)
    assert torch.equal(engine.generate(**given, max_new_tokens=16, do_sample=False), expected)
    assert engine.rows.step.captured_as == "recording"


@pytest.mark.parametrize("case", ["gpt2", "llama recipe kept", "marian"])
def test_a_merged_model(case):
    model, given = swapped(case, merged=True), inputs(case)
    expected = model.generate(**given, max_new_tokens=8)
    assert torch.equal(Engine(model).generate(**given, max_new_tokens=8), expected)


@pytest.mark.parametrize("case", ["gpt2", "llama recipe kept", "marian"])
def test_an_engine_is_used_again_for_more_and_longer_prompts(case):
    model, given = swapped(case), inputs(case)
    engine = Engine(model)
    for rows, tokens in ((1, 4), (3, 8), (2, 12)):
        part = {name: x[:rows] for name, x in given.items()}
        expected = model.generate(**part, max_new_tokens=tokens)
        assert torch.equal(engine.generate(**part, max_new_tokens=tokens), expected)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
@pytest.mark.parametrize("model_type", ["marian", "pegasus"])
def test_a_step_is_built_again_if_the_table_of_positions_was_extended(model_type, options):
    model = t2r.swap(tiny(model_type, torch.float64, layers=1), feature_size=8, recurrent="both").eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, PAD
    engine, (source,) = Engine(model), prompts([5])
    engine.generate(source, max_new_tokens=4, **options)
    found = engine.generate(source, max_new_tokens=POSITIONS + 8, **options)
    assert torch.equal(found, model.generate(source, max_new_tokens=POSITIONS + 8, **options))


def test_a_longer_sequence_waits_for_the_table_of_positions():
    model, (first, second) = swapped("marian"), prompts([5, 7])
    engine = Engine(model, rows=2)
    short = engine.submit(first, max_new_tokens=6)
    engine.step()
    step = engine.rows.step
    long = engine.submit(second, max_new_tokens=POSITIONS + 8)  # replaces the table while the other one runs
    list(engine.run())
    assert short.tokens == alone(model, first, max_new_tokens=6)
    assert long.tokens == alone(model, second, max_new_tokens=POSITIONS + 8)
    assert engine.rows.step is not step
    assert step.positions.shape[0] == POSITIONS  # what the step has read stays allocated


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.7, "top_k": 5, "num_return_sequences": 2},
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 6},
    ],
    ids=["sampled", "top-k twice", "penalty", "n-grams"],
)
@pytest.mark.parametrize("case", ["gpt2", "llama recipe", "marian"])
def test_processors_and_seeds_are_those_of_generate(case, options):
    model, given = swapped(case), inputs(case)
    model.generation_config.eos_token_id = EOS
    torch.manual_seed(7)
    expected = model.generate(**given, max_new_tokens=12, **options)
    engine = Engine(model)
    assert torch.equal(engine.generate(**given, max_new_tokens=12, seed=7, **options), expected)
    torch.manual_seed(7)
    assert torch.equal(engine.generate(**given, max_new_tokens=12, **options), expected)


@pytest.mark.parametrize("options", [{}, {"use_cache": False}], ids=["engine", "generate"])
def test_a_seed_leaves_the_default_generator_unchanged(options):
    model, (prompt,) = swapped("gpt2"), prompts([5])
    before = torch.get_rng_state()
    first, second = (
        Engine(model).generate(prompt, seed=3, do_sample=True, max_new_tokens=8, **options) for _ in range(2)
    )
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
def test_each_sequence_stops_by_itself(options):
    model, given = swapped("gpt2"), inputs("gpt2")
    torch.manual_seed(0)
    free = model.generate(**given, max_new_tokens=20, **options)
    stops = [int(free[0, -17]), int(free[1, -12])]  # tokens that occur at different steps
    torch.manual_seed(0)
    expected = model.generate(**given, max_new_tokens=20, eos_token_id=stops, **options)
    assert (expected == PAD).sum() > (given["input_ids"] == PAD).sum()
    torch.manual_seed(0)
    assert torch.equal(Engine(model).generate(**given, max_new_tokens=20, eos_token_id=stops, **options), expected)


def test_stop_strings():
    model, (prompt,), tokenizer = swapped("gpt2"), prompts([5]), words()
    free = alone(model, prompt, max_new_tokens=20)
    text = tokenizer.decode(free[8:10])
    how = {"max_new_tokens": 20, "stop_strings": [text], "tokenizer": tokenizer}
    expected = alone(model, prompt, **how)
    assert len(expected) < 20
    assert Engine(model).generate(prompt, **how)[0, 5:].tolist() == expected
    engine = Engine(model, GenerationConfig(max_new_tokens=20, stop_strings=[text]))
    assert engine.generate(prompt, tokenizer=tokenizer)[0, 5:].tolist() == expected
    with pytest.raises(ValueError, match="tokenizer"):
        engine.generate(prompt)
    model.generation_config.stop_strings = [text]  # those of the model, unless a call has none
    engine = Engine(model)
    assert engine.generate(prompt, tokenizer=tokenizer, max_new_tokens=20)[0, 5:].tolist() == expected
    assert engine.generate(prompt, stop_strings=None, max_new_tokens=20)[0, 5:].tolist() == free
    assert not engine.said


def test_the_engines_own_configuration():
    model, (prompt,) = swapped("gpt2"), prompts([5])
    engine = Engine(model, GenerationConfig(max_new_tokens=3))
    assert engine.generate(prompt).shape == (1, 8)
    assert engine.generate(prompt, max_new_tokens=5).shape == (1, 10)
    assert engine.generate(prompt).shape == (1, 8)


def test_an_option_of_none_replaces_the_default_of_the_model():
    model, (prompt,) = swapped("gpt2"), prompts([5])
    free = alone(model, prompt, max_new_tokens=8)
    model.generation_config.eos_token_id = free[2]
    ended = free[: free.index(free[2]) + 1]
    for config in (None, GenerationConfig(max_new_tokens=8)):
        engine = Engine(model, config)
        assert engine.generate(prompt, max_new_tokens=8)[0, 5:].tolist() == ended != free
        assert engine.generate(prompt, max_new_tokens=8, eos_token_id=None)[0, 5:].tolist() == free


def test_without_eos_tokens_all_sequences_end_together():
    model, given = swapped("gpt2"), inputs("gpt2")
    length = given["input_ids"].shape[1]

    class After(StoppingCriteria):
        """Ends row i after i + 2 new tokens."""

        def __call__(self, ids, scores, **kwargs):
            return torch.arange(len(ids)) + 2 <= ids.shape[1] - length

    how = {"max_new_tokens": 16, "stopping_criteria": StoppingCriteriaList([After()])}
    expected = model.generate(**given, **how)
    assert expected.shape[1] < length + 16
    assert torch.equal(Engine(model).generate(**given, **how), expected)


def test_a_configuration_given_to_a_call():
    model, (prompt,) = swapped("gpt2"), prompts([5])
    engine = Engine(model, GenerationConfig(max_new_tokens=3))
    given = GenerationConfig(max_new_tokens=6, repetition_penalty=1.5)
    expected = alone(model, prompt, generation_config=given)
    assert engine.generate(prompt, generation_config=given)[0, 5:].tolist() == expected
    assert engine.generate(prompt, generation_config=given, max_new_tokens=4)[0, 5:].tolist() == expected[:4]
    assert engine.submit(prompt, generation_config=given).index == 0
    assert given.max_new_tokens == 6
    for more in ({}, {"use_cache": False}):  # in the engine, and in generate
        assert engine.generate(prompt, generation_config=None, **more).shape == (1, 8)


class Heard(BaseStreamer):
    def __init__(self):
        self.parts, self.ended = [], False

    def put(self, value):
        self.parts.append(value.tolist())

    def end(self):
        self.ended = True


@pytest.mark.parametrize("case", ["llama recipe", "marian"])
def test_streaming(case):
    model, given = swapped(case), inputs(case)
    engine, how = Engine(model), {"max_new_tokens": 6, "repetition_penalty": 1.1}
    expected = model.generate(**given, **how)
    start = expected.shape[1] - 6
    heard: dict[int, list[int]] = {}
    for row, token in engine.stream(**given, **how):
        heard.setdefault(row, []).append(token)
    assert [heard[row] for row in range(len(expected))] == expected[:, start:].tolist()
    one = {name: x[:1] for name, x in given.items()}
    ours, theirs = Heard(), Heard()
    engine.generate(**one, **how, streamer=ours)
    model.generate(**one, **how, streamer=theirs)
    assert (ours.parts, ours.ended) == (theirs.parts, theirs.ended)
    with pytest.raises(T2RError, match="one sequence"):
        engine.generate(**given, **how, streamer=Heard())
    assert not engine.busy


def in_threads(works):
    """Run functions at the same time, each in a thread of its own, and return their results."""
    together = threading.Barrier(len(works))
    with ThreadPoolExecutor(len(works)) as pool:
        running = [pool.submit(lambda work=work: (together.wait(), work())[1]) for work in works]
        return [work.result() for work in running]


def test_calls_of_several_threads():
    model, given = swapped("gpt2 kept", torch.float32), prompts([5, 2, 7, 4])
    how = {"max_new_tokens": 8, "do_sample": False}
    expected = [alone(model, prompt, **how) for prompt in given]
    engine, times = Engine(model), 2

    def generated(prompt):
        return [engine.generate(prompt, **how)[0, prompt.shape[1] :].tolist() for _ in range(times)]

    def streamed(prompt):
        return [[token for _, token in engine.stream(prompt, **how)] for _ in range(times)]

    def each(prompt):
        return [tokens for _, tokens in engine.generate_each({"input_ids": prompt, **how} for _ in range(times))]

    for works in ([generated] * 4, [generated, streamed, each, streamed]):
        found = in_threads([partial(work, prompt) for work, prompt in zip(works, given, strict=True)])
        assert found == [[tokens] * times for tokens in expected]
    assert not engine.busy


def test_tokens_generated_during_another_call_are_not_lost():
    model, (first, second, third) = swapped("gpt2"), prompts([5, 2, 7])
    engine = Engine(model, rows=3)
    stream = engine.stream(first, max_new_tokens=6)
    heard = [next(stream)[1]]
    submitted = engine.submit(second, max_new_tokens=8)
    numbered = engine.generate_each([{"input_ids": first, "max_new_tokens": n} for n in (2, 7)])
    short = next(numbered)
    engine.generate(third, max_new_tokens=12)  # all other sequences end meanwhile
    assert submitted.finished
    events = list(engine.run())
    assert [token for _, token in events] == alone(model, second, max_new_tokens=8)
    assert {sequence for sequence, _ in events} == {submitted}
    heard += [token for _, token in stream]
    assert heard == alone(model, first, max_new_tokens=6)
    assert [short, *numbered] == [(i, alone(model, first, max_new_tokens=n)) for i, n in enumerate((2, 7))]
    assert not engine.busy


@pytest.mark.parametrize("case", ["gpt2 kept", "llama", "llama recipe", "marian", "bart"])
def test_sequences_join_and_leave_a_running_batch(case):
    """Five prompts with different lengths and options on two rows have the same results as alone."""
    model = swapped(case)
    given = prompts([5, 1, 9, 3, 7])
    options = [
        {"max_new_tokens": 12},
        {"max_new_tokens": 3},
        {"max_new_tokens": 8, "repetition_penalty": 1.4},
        {"max_new_tokens": 6, "do_sample": True, "seed": 3},
        {"max_new_tokens": 1},
    ]
    engine = Engine(model, rows=2, max_length=40)
    sequences = [engine.submit(p, **o) for p, o in zip(given[:3], options[:3], strict=True)]
    heard: dict[int, list[int]] = {}
    for count, (sequence, token) in enumerate(engine.run()):
        heard.setdefault(id(sequence), []).append(token)
        if count == 4:  # while others are running
            sequences += [engine.submit(p[0], **o) for p, o in zip(given[3:], options[3:], strict=True)]
    assert not engine.busy
    assert sorted(engine.rows.free) == [0, 1]
    for prompt, option, sequence in zip(given, options, sequences, strict=True):
        torch.manual_seed(option.pop("seed", 0))
        expected = alone(model, prompt, **option)
        assert sequence.tokens == heard[id(sequence)] == expected
        assert sequence.finished


@pytest.mark.parametrize("case", ["gpt2", "gpt2 kept"])
def test_batches_follow_each_other_in_a_running_batch(case):
    """Ended sequences make room for the next batch. Forbidden, first and last tokens are those of `generate`."""
    model, given = swapped(case), prompts([5, 2, 7, 5, 3, 6, 4])
    free = [alone(model, prompt, max_new_tokens=9) for prompt in given]
    stops, common = [free[0][2], free[1][5]], {"max_new_tokens": 9, "pad_token_id": PAD}
    common |= {"eos_token_id": stops, "forced_eos_token_id": stops[0], "bad_words_ids": [[free[2][3]]]}
    other = {"bad_words_ids": None, "suppress_tokens": sorted({*free[4][:3], *free[5][:3]} - set(stops))}
    options = [common] * 4 + [common | other] * 3
    expected = [alone(model, prompt, **how) for prompt, how in zip(given, options, strict=True)]
    assert len({len(tokens) for tokens in expected}) > 2
    assert any(len(tokens) == 9 for tokens in expected)
    engine, running = Engine(model, rows=2, max_length=16, source_length=8), []
    engine.scheduler.look_every = 4
    found = {}
    batches = [{"input_ids": x, "attention_mask": torch.ones_like(x), **o} for x, o in zip(given, options, strict=True)]
    for number, tokens in engine.generate_each(batches):
        found[number] = tokens
        running.append(len(engine.scheduler.running))
    assert [found[i] for i in range(7)] == expected
    assert any(running)  # a sequence ended while another one ran
    assert not engine.busy
    assert sorted(engine.rows.free) == [0, 1]
    generation = engine.generate_each(batches)
    next(generation)
    generation.close()
    assert not engine.busy


@pytest.mark.parametrize("case", ["gpt2 kept", "llama recipe", "marian"])
def test_stops_between_two_reads(case):
    """Tokens generated after a stop token and before the next read are dropped and do not affect other rows."""
    model, given = swapped(case), prompts([5, 1, 9, 3])
    free = [alone(model, p, max_new_tokens=21) for p in given]
    stops = [[tokens[k]] for tokens, k in zip(free, (2, 9, 13, 20), strict=True)]
    engine = Engine(model, rows=2, max_length=30)
    engine.scheduler.look_every = 8
    sequences = [engine.submit(p, max_new_tokens=21, eos_token_id=s) for p, s in zip(given, stops, strict=True)]
    assert max(len(engine.step()) for _ in range(3)) > 4  # more than a first and a next token for each row
    list(engine.run())
    for prompt, stop, sequence in zip(given, stops, sequences, strict=True):
        assert sequence.tokens == alone(model, prompt, max_new_tokens=21, eos_token_id=stop)


@pytest.mark.parametrize("case", ["gpt2 kept", "llama recipe"])
def test_continuing_from_a_state(case):
    model, (read, first, second) = swapped(case), prompts([11, 2, 5])
    state = model.make_cache()
    model(read, past_key_values=state)
    engine = Engine(model, rows=2, max_length=64)
    joined = [engine.submit(p, state=state, max_new_tokens=8) for p in (first, second)]
    list(engine.run())
    for prompt, sequence in zip((first, second), joined, strict=True):
        assert sequence.tokens == alone(model, torch.cat([read, prompt], 1), max_new_tokens=8)
    assert state.get_seq_length() == 11
    padded = torch.tensor([[PAD] * 3 + first[0].tolist(), second[0].tolist()])
    mask = (torch.arange(5)[None] >= torch.tensor([[3], [0]])).long()
    out = engine.generate(padded, attention_mask=mask, state=state, max_new_tokens=8)
    assert out[:, 5:].tolist() == [sequence.tokens for sequence in joined]


@pytest.mark.parametrize("case", ["llama", "gpt2 kept"])
@torch.no_grad()
def test_processors_see_the_history_of_a_state(case):
    """With the tokens that a state has read, a continuation is that of the whole text."""
    model, (whole,) = swapped(case), prompts([14])
    state = model(whole[:, :9], past_key_values=model.make_cache()).past_key_values
    engine = Engine(model)
    for options in (
        {"repetition_penalty": 1.7, "no_repeat_ngram_size": 1},
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2, "min_length": 18},
        {"do_sample": True, "top_k": 5, "repetition_penalty": 1.7},
        {"max_length": 17},
    ):
        how = {"max_new_tokens": 10, **options} if "max_length" not in options else options
        sequence = engine.submit(
            whole[:, 9:], state=state, history=whole[0, :9], seed=3, keep_state=True, logprobs=0, **how
        )
        list(engine.run())
        torch.manual_seed(3)
        assert sequence.tokens == alone(model, whole, **how)
        assert len(sequence.logprobs) == len(sequence.tokens)
        assert sequence.state.get_seq_length() == 13 + len(sequence.tokens)
    for history in (whole[0, :8], whole[:, :9].float(), whole[:, :9].expand(2, -1)):
        with pytest.raises(T2RError, match=r"history|whole numbers"):
            engine.submit(whole[:, 9:], state=state, history=history)
    with pytest.raises(T2RError, match="the 0 tokens"):
        engine.submit(whole[:, 9:], history=whole[:, :9])


@torch.no_grad()
def test_a_state_may_change_while_a_sequence_waits():
    model, (whole, other) = swapped("llama"), prompts([9, 5])
    state = model(whole[:, :5], past_key_values=model.make_cache()).past_key_values
    engine = Engine(model, rows=1)
    first = engine.submit(other, max_new_tokens=3)
    second = engine.submit(whole[:, 5:], state=state, max_new_tokens=6)
    for token in other[0]:
        model(token.view(1, 1), past_key_values=state)
    list(engine.run())
    assert first.tokens == alone(model, other, max_new_tokens=3)
    assert second.tokens == alone(model, whole, max_new_tokens=6)


@pytest.mark.parametrize("case", ["gpt2 kept", "llama recipe"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_a_state_can_be_kept_and_continued(case, tokens, tmp_path):
    model, (prompt,) = swapped(case), prompts([6])
    whole = alone(model, prompt, max_new_tokens=tokens + 5)
    engine = Engine(model, rows=2, max_length=64)
    first = engine.submit(prompt, max_new_tokens=tokens, keep_state=True)
    engine.submit(prompt, max_new_tokens=tokens + 2)
    list(engine.run())
    assert first.state.get_seq_length() == 6 + tokens - 1
    first.state.save(tmp_path / "state")
    state = model.load_state(tmp_path / "state")
    rest = engine.submit(torch.tensor(first.tokens[-1:]), state=state, max_new_tokens=5)
    list(engine.run())
    assert first.tokens + rest.tokens == whole


def test_a_sequence_can_be_cancelled():
    model, given = swapped("gpt2"), prompts([4, 4, 4])
    engine = Engine(model, rows=1)
    sequences = [engine.submit(prompt, max_new_tokens=5) for prompt in given]
    engine.step()
    engine.cancel(sequences[0])
    engine.cancel(sequences[1])
    list(engine.run())
    assert len(sequences[0].tokens) == 2
    assert sequences[1].tokens == []
    assert sequences[2].tokens == alone(model, given[2], max_new_tokens=5)


class Failing(LogitsProcessor):
    """Fails at the fourth token."""

    calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        if self.calls == 4:
            raise RuntimeError("a processor failed")
        return scores


def test_a_sequence_that_fails_does_not_affect_the_others():
    model, (first, second) = swapped("gpt2"), prompts([4, 5])
    expected = alone(model, second, max_new_tokens=10)
    engine = Engine(model, rows=4)
    failing = engine.submit(first, max_new_tokens=10, logits_processor=LogitsProcessorList([Failing()]))
    other = engine.submit(second, max_new_tokens=10)
    list(engine.run())
    assert failing.finished
    assert len(failing.tokens) == 3
    assert "a processor failed" in str(failing.error)
    assert other.tokens == expected
    assert other.error is None

    def fail(model, args, inputs):
        if inputs["input_ids"].shape[1] == 2:
            raise IndexError("this prompt cannot be read")

    hook = model.register_forward_pre_hook(fail, with_kwargs=True)
    unreadable = engine.submit(first[:, :2], max_new_tokens=4)  # fails when it is read
    assert engine.generate(second, max_new_tokens=10)[0, 5:].tolist() == expected
    hook.remove()
    assert isinstance(unreadable.error, IndexError)
    assert not engine.busy
    how = {"max_new_tokens": 10, "logits_processor": LogitsProcessorList([Failing()])}
    with pytest.raises(RuntimeError, match="a processor failed"):
        engine.generate(first, **how)
    how["logits_processor"][0].calls = 0
    with pytest.raises(RuntimeError, match="a processor failed"):
        list(engine.generate_each([{"input_ids": first, **how}]))
    assert engine.generate(second, max_new_tokens=10)[0, 5:].tolist() == expected


def test_padding_in_several_places_of_a_row_falls_back_to_generate(caplog):
    model = swapped("llama recipe kept")
    given = {"input_ids": torch.tensor([[3, 0, 4, 0, 5, 6]]), "attention_mask": torch.tensor([[1, 0, 1, 0, 1, 1]])}
    expected = model.generate(**given, max_new_tokens=4)
    assert torch.equal(Engine(model).generate(**given, max_new_tokens=4), expected)
    assert "padding in several places" in caplog.text


def test_an_abandoned_stream_ends():
    model, (prompt,) = swapped("gpt2"), prompts([4])
    engine = Engine(model)
    for _ in engine.stream(prompt, max_new_tokens=20):
        break
    assert not engine.busy
    assert engine.generate(prompt, max_new_tokens=4)[0, 4:].tolist() == alone(model, prompt, max_new_tokens=4)


@pytest.mark.parametrize("pieces", [2, 3])
def test_prompts_are_read_in_pieces(pieces, monkeypatch):
    for case in ("gpt2 kept", "llama recipe"):
        model, given = swapped(case), inputs(case)
        expected = model.generate(**given, max_new_tokens=6)
        monkeypatch.setattr(prefill_module, "PIECE", pieces)
        assert torch.equal(Engine(model).generate(**given, max_new_tokens=6), expected)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_cache": False}, "use_cache"),
        ({"prompt_lookup_num_tokens": 2}, "assisted"),
        ({"cache_implementation": "static"}, "cache_implementation"),
    ],
)
def test_unsupported_options_fall_back_to_generate(options, reason, caplog):
    model, (prompt,) = swapped("gpt2"), prompts([5])
    expected = alone(model, prompt, max_new_tokens=4, **options)
    with caplog.at_level(logging.WARNING, "t2r"):
        out = Engine(model).generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, **options)
    assert out[0, 5:].tolist() == expected
    assert [record.getMessage() for record in caplog.records if reason in record.getMessage()]


@pytest.mark.parametrize("name", ["token_type_ids", "position_ids"])
def test_inputs_that_the_engine_does_not_read_fall_back_to_generate(name, caplog):
    model, (prompt,) = swapped("gpt2"), prompts([6])
    how = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8}
    given = {name: 3 * torch.arange(6)[None] + 5}
    with caplog.at_level(logging.WARNING, "t2r"):
        out = Engine(model).generate(prompt, **how, **given)
    assert torch.equal(out, model.generate(prompt, **how, **given))
    assert not torch.equal(out, model.generate(prompt, **how))  # the input has an effect
    assert name in caplog.text
    with pytest.raises(T2RError, match=name):
        Engine(model).submit(prompt, max_new_tokens=8, **given)


@pytest.mark.parametrize("beams", [1, 2])
def test_padded_prompts_of_a_decoder_fall_back_to_generate(beams, caplog):
    model, given = swapped("marian kept"), inputs("marian kept")
    start = torch.randint(3, VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(0))
    real = torch.ones_like(start)
    how = {**given, "decoder_input_ids": start, "max_new_tokens": 8, "num_beams": beams}
    with caplog.at_level(logging.WARNING, "t2r"):
        whole = Engine(model).generate(**how, decoder_attention_mask=real)
        assert torch.equal(whole, model.generate(**how))
        assert not caplog.records
        real[0, :6] = 0
        out = Engine(model).generate(**how, decoder_attention_mask=real)
    assert torch.equal(out, model.generate(**how, decoder_attention_mask=real))
    assert "decoder_attention_mask" in caplog.text


@pytest.mark.parametrize(("model_type", "reason"), [("mistral", "sliding window"), ("t5", "relative bias")])
def test_softmax_layers_without_a_static_cache_fall_back_to_generate(model_type, reason, caplog):
    model = t2r.swap(tiny(model_type, torch.float64), feature_size=8, recurrent="both", softmax_layers=[0]).eval()
    (prompt,) = prompts([5])
    with caplog.at_level(logging.WARNING, "t2r"):
        out = Engine(model).generate(prompt, max_new_tokens=4, pad_token_id=PAD)
    assert reason in caplog.text
    assert torch.equal(out, model.generate(prompt, max_new_tokens=4, pad_token_id=PAD))


def causal_layers(cache):
    return getattr(cache, "self_attention_cache", cache).layers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["llama recipe kept", "gpt2 signed", "marian"])
def test_a_state_in_half_precision_is_rounded_after_every_token(case, dtype):
    """Compare with a loop that rounds the states of a default cache: those of the prompt to the nearest number."""
    model, (prompt,) = swapped(case), prompts([7])
    engine = Engine(model, state_dtype=dtype)
    found = engine._attempt(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8).result()
    cache, tokens, name = model.make_cache(), found[:, :-8], "input_ids"
    encoded = {}
    if model.config.is_encoder_decoder:
        name, encoded = "decoder_input_ids", {"encoder_outputs": model.get_encoder()(prompt)}
    new = tokens
    with torch.no_grad():
        for step in range(8):
            out = model(**{name: new}, **encoded, past_key_values=cache, use_cache=True)
            for layer in (layer for layer in cache.all_layers() if layer.state is not None):
                state = layer.state.map(lambda x: x.to(dtype))
                if step and layer in causal_layers(cache):
                    draws = Draws(torch.tensor([tokens.shape[1] - 1]), causal_layers(cache).index(layer))
                    state = rounded(layer.state, dtype, draws)
                layer.recurrence.state = state.map(torch.Tensor.double)
            new = out.logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, new], dim=1)
    assert torch.equal(found, tokens)
    states = [x for layer in engine.rows.step.own.layers if layer.state for x in layer.state if x is not None]
    expected = [x for layer in causal_layers(cache) if layer.state for x in layer.state if x is not None]
    assert {x.dtype for x in states} == {dtype}
    for own, other in zip(states, expected, strict=True):
        assert torch.equal(own[:1].double(), other)
    with pytest.raises(T2RError, match="state_dtype"):
        Engine(model, state_dtype=torch.int8)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("case", ["marian", "t5"])
def test_encoder_outputs_replace_the_sources(case, num_beams):
    model, given = swapped(case), inputs(case)
    engine, options = Engine(model), {"max_new_tokens": 6, "num_beams": num_beams}
    with torch.no_grad():
        encoded = model.get_encoder()(**given)
    expected = model.generate(**given, **options)
    mask = given["attention_mask"]
    assert torch.equal(engine._attempt(encoder_outputs=encoded, attention_mask=mask, **options).result(), expected)
    assert torch.equal(engine.generate(encoder_outputs=encoded, attention_mask=mask, **options), expected)
    batch_ = {"encoder_outputs": encoded, "attention_mask": mask, "max_new_tokens": 6}
    if num_beams == 1:
        found = dict(engine.generate_each([batch_]))
        assert [found[i] for i in range(len(expected))] == expected[:, 1:].tolist()
    with pytest.raises(T2RError, match="give input_ids, or encoder_outputs"):
        engine.generate(max_new_tokens=2)


def test_adapters_are_merged_first():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    adapted = peft.get_peft_model(swapped("gpt2"), config)
    with pytest.raises(T2RError, match="merge_and_unload"):
        Engine(adapted)
    Engine(adapted.merge_and_unload())


def test_short_prompts_are_read_with_the_threads_of_a_step():
    model, (short, long) = swapped("llama"), prompts([5, 65])
    engine, seen = Engine(model), []
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        engine.generate(short, max_new_tokens=2)
        recording = engine.rows.step.recording
        recording.tuned, recording.tuners = True, {2: Tuner(2)}
        recording.tuners[2].count = 1
        model.register_forward_pre_hook(lambda *given: seen.append(torch.get_num_threads()))
        for prompt in (short, long):
            engine.generate(prompt, max_new_tokens=2)
        assert seen == [1, 2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_user_errors():
    model, (prompt,) = swapped("gpt2 kept"), prompts([5])
    with pytest.raises(T2RError, match="there are no prompts: give input_ids"):
        Engine(model).generate(max_new_tokens=2)
    with pytest.raises(T2RError, match="continuing from a state requires input_ids"):
        Engine(model).generate(state=model.make_cache(), max_new_tokens=2)
    with pytest.raises(T2RError, match="rows must be at least 1"):
        Engine(model, rows=0)
    with pytest.raises(T2RError, match="2 rows"):
        Engine(model, rows=2).generate(prompt.expand(3, -1), max_new_tokens=2)
    with pytest.raises(T2RError, match="max_length of 8"):
        Engine(model, max_length=8).generate(prompt, max_new_tokens=5)
    with pytest.raises(T2RError, match="positions"):
        Engine(model).generate(prompt, max_new_tokens=5000)
    with pytest.raises(T2RError, match="cannot join"):
        Engine(model).submit(prompt, num_beams=2)
    with pytest.raises(T2RError, match="submit each"):
        Engine(model).submit(prompt.expand(2, -1))


@pytest.mark.parametrize("case", ["gpt2", "marian"])
def test_empty_prompts_are_refused(case):
    engine = Engine(swapped(case))
    for shape, message in (((1, 0), "prompt has no tokens"), ((0, 3), "batch has no prompts")):
        for options in ({}, {"num_beams": 2}, {"do_sample": True}):
            with pytest.raises(T2RError, match=message):
                engine.generate(torch.empty(shape, dtype=torch.long), max_new_tokens=2, **options)
    with pytest.raises(T2RError, match="prompt has no tokens"):
        engine.submit(torch.empty(0, dtype=torch.long), max_new_tokens=2)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["gpt2", "gpt2 kept", "llama", "llama recipe", "llama recipe kept", "marian"])
def test_a_captured_step_equals_generate(case, dtype):
    """Compare tokens up to a position where the two most likely ones are within 1e-3 of each other."""
    model, given = swapped(case, dtype).cuda(), {name: x.cuda() for name, x in inputs(case).items()}
    engine = Engine(model)
    how = {"max_new_tokens": 24, "do_sample": False}
    got = engine.generate(**given, **how)
    assert engine.rows.step.captured_as == "CUDA graph"
    out = model.generate(**given, **how, output_logits=True, return_dict_in_generate=True)
    start, close = out.sequences.shape[1] - 24, 0
    for row, expected in enumerate(out.sequences.tolist()):
        for t in range(start, len(expected)):
            if got[row, t] == expected[t]:
                continue
            logits = out.logits[t - start][row].float()
            best = logits.topk(2).values
            # bfloat16 has 8 bits, of which about 5 are accurate after a few layers.
            limit = 1e-3 if dtype == torch.float32 else float(logits.max() - logits.min()) * 2**-5
            assert best[0] - best[1] <= limit, f"row {row} differs at {t - start}, where nothing is close"
            close += 1
            break
    print(f"{case}, {dtype}: {close} of {len(got)} sequences part at a tie")
    assert dtype != torch.float32 or close <= len(got) // 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("case", ["gpt2 kept", "llama recipe", "marian"])
def test_joining_and_leaving_on_a_gpu(case):
    """In float64, where there are no near ties. Tokens are read every few steps, and stops occur in between."""
    model, given = swapped(case).cuda(), [p.cuda() for p in prompts([5, 1, 9, 3])]
    free = [alone(model, p, max_new_tokens=21) for p in given]
    stops = [[tokens[k]] for tokens, k in zip(free, (2, 9, 13, 20), strict=True)]
    engine = Engine(model, rows=2, max_length=64)
    sequences = [engine.submit(p, max_new_tokens=21, eos_token_id=s) for p, s in zip(given[:3], stops[:3], strict=True)]
    engine.step()
    sequences.append(engine.submit(given[3], max_new_tokens=21, do_sample=True, top_k=1))
    list(engine.run())
    for prompt, stop, sequence in zip(given, [*stops[:3], None], sequences, strict=True):
        assert sequence.tokens == alone(model, prompt, max_new_tokens=21, eos_token_id=stop)
