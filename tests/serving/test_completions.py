"""Texts and conversations over HTTP: equal to `generate`, whatever runs beside, in the form of OpenAI's API."""

import asyncio
import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engines import alone
from serving_models import STOP, TEMPLATE, model, running, served, tokenizer
from t2r.serving.served import ServedModel
from t2r.serving.service import SHARED
from t2r.serving.tokens import LOWEST
from t2r.serving.worker import Worker

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def ids(text):
    return torch.tensor([tokenizer()(text).input_ids])


def text_alone(text, case="llama", stop=None, seed=0, **options):
    """Return what `generate` adds to a text."""
    torch.manual_seed(seed)
    made = alone(model(case, stop), ids(text), **options)
    return tokenizer().decode([token for token in made if token != stop])


async def events(response):
    """Return the data of a stream."""
    lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def streamed(client, path, **body):
    async with client.stream("POST", path, json={"stream": True, **body}) as response:
        assert response.status_code == 200, await response.aread()
        return await events(response)


SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
KINDS = (
    ({}, {}),
    (SAMPLED, {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 0}),
    (
        {"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.5, "seed": 7},
        {"do_sample": True, "top_k": 5, "repetition_penalty": 1.5},
    ),
    ({"logit_bias": {"40": 100, "41": -100}}, {"sequence_bias": [[[40], 100.0], [[41], -100.0]]}),
)


def test_any_mix_of_requests_is_that_of_generate():
    """Requests that join, leave and are streamed have the texts that they have alone."""
    kinds = [(LETTERS[: 1 + 7 * i % 40], *KINDS[i % len(KINDS)], 4 + i % 5) for i in range(16)]

    async def one(client, number, text, fields, tokens):
        await asyncio.sleep(0.02 * (number % 5))
        body = {"prompt": text, "max_tokens": tokens, "model": "rnn", **fields}
        if number % 3 == 0:
            made = await streamed(client, "/v1/completions", **body)
            assert made[-1]["choices"][0]["finish_reason"] == "length"
            return "".join(chunk["choices"][0]["text"] for chunk in made)
        if number % 3 == 1:  # leaves
            leaving = asyncio.create_task(client.post("/v1/completions", json=body | {"max_tokens": 500}))
            await asyncio.sleep(0.05)
            leaving.cancel()
        response = await client.post("/v1/completions", json=body)
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "length"
        return choice["text"]

    async def main():
        async with running(served(rows=3)) as (client, service):
            calls = [one(client, i, text, fields, n) for i, (text, fields, _, n) in enumerate(kinds)]
            texts = await asyncio.gather(*calls)
            assert not service.running
            return texts

    texts = asyncio.run(main())
    for made, (text, _, options, tokens) in zip(texts, kinds, strict=True):
        assert made == text_alone(text, seed=7, max_new_tokens=tokens, **options)


def test_a_completion():
    async def main():
        async with running(served(stop=STOP)) as (client, _):
            answer = (await client.post("/v1/completions", json={"prompt": "abc", "logprobs": 2})).json()
            assert answer["object"] == "text_completion"
            assert answer["model"] == "rnn"
            (choice,) = answer["choices"]
            made = alone(model(stop=STOP), ids("abc"), max_new_tokens=16)
            assert choice["text"] == text_alone("abc", stop=STOP, max_new_tokens=16)
            numbers = {"prompt_tokens": 3, "completion_tokens": len(made), "total_tokens": 3 + len(made)}
            assert answer["usage"] == numbers | {"prompt_tokens_details": {"cached_tokens": 0}}
            logprobs = choice["logprobs"]
            assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(made)
            assert logprobs["token_logprobs"] == [max(top.values()) for top in logprobs["top_logprobs"]]
            # tokens in place of a text, and several choices
            same = (await client.post("/v1/completions", json={"prompt": ids("abc")[0].tolist()})).json()
            assert same["choices"][0]["text"] == choice["text"]
            several = {"prompt": "abc", "n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 6}
            many = (await client.post("/v1/completions", json=several)).json()
            how = {"max_new_tokens": 6, "do_sample": True, "top_k": 0}
            expected = [text_alone("abc", stop=STOP, seed=5 + i, **how) for i in range(3)]
            assert [each["text"] for each in many["choices"]] == expected
            assert len(set(expected)) > 1
            pieces = await streamed(client, "/v1/completions", **several)
            assert many["usage"]["completion_tokens"] <= 18
            for i in range(3):
                own = [p["choices"][0] for p in pieces if p["choices"][0]["index"] == i]
                assert "".join(p["text"] for p in own) == expected[i]
                assert [p["finish_reason"] for p in own][:-1] == [None] * (len(own) - 1)

    asyncio.run(main())


@pytest.mark.parametrize("length", [SHARED, 3 * SHARED])
def test_a_prompt_is_read_once_for_all_choices(length, monkeypatch):
    """If it is long. The choices are those of a prompt that is read for each."""
    prompt, read = ids("abcd" * SHARED)[0, :length].tolist(), []
    submit = Worker.submit
    monkeypatch.setattr(Worker, "submit", lambda self, job: (read.append(len(job.tokens)), submit(self, job))[1])

    async def main():
        async with running(served()) as (client, service):
            body = {"prompt": prompt, "n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 6, "frequency_penalty": 0.5}
            many = (await client.post("/v1/completions", json=body)).json()
            assert read == ([length] * 3 if length <= SHARED else [length - 1, 1, 1, 1])
            monkeypatch.setattr("t2r.serving.service.SHARED", 10**6)
            same = (await client.post("/v1/completions", json=body)).json()
            assert [each["text"] for each in many["choices"]] == [each["text"] for each in same["choices"]]
            assert many["usage"] == same["usage"]
            assert not service.running
            assert not service.worker.jobs
            assert f't2r_tokens_total{{kind="read",model="rnn"}} {2 * length}.0' in (await client.get("/metrics")).text

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(stream):
    """The text ends before the first stop string, also if it consists of several tokens, and its row is free."""
    whole = text_alone("abcde", max_new_tokens=30)
    stop = whole[9:11]

    async def main():
        async with running(served()) as (client, service):
            body = {"prompt": "abcde", "max_tokens": 30, "stop": ["never there", stop], "logprobs": 0}
            if stream:
                made = await streamed(client, "/v1/completions", **body, stream_options={"include_usage": True})
                *made, last = made
                text = "".join(chunk["choices"][0]["text"] for chunk in made)
                reason, usage = made[-1]["choices"][0]["finish_reason"], last["usage"]
                assert last["choices"] == []
            else:
                answer = (await client.post("/v1/completions", json=body)).json()
                text, reason = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
                usage = answer["usage"]
            assert (text, reason) == (whole[: whole.index(stop)], "stop")
            assert usage["completion_tokens"] < 30
            await client.get("/health")
            assert not service.models["rnn"].engine.rows.held

    asyncio.run(main())


@pytest.mark.parametrize(("tokens", "reason"), [(9, "length"), (10, "length"), (11, "stop"), (12, "stop")])
def test_a_stop_string_may_come_with_the_last_token(tokens, reason):
    whole = text_alone("abcde", max_new_tokens=30)
    stop = whole[9:11]
    assert whole.index(stop) == 9

    async def main():
        async with running(served()) as (client, _):
            body = {"prompt": "abcde", "max_tokens": tokens, "stop": stop}
            choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
            pieces = await streamed(client, "/v1/completions", **body)
            text = "".join(piece["choices"][0]["text"] for piece in pieces)
            found = [(choice["text"], choice["finish_reason"]), (text, pieces[-1]["choices"][0]["finish_reason"])]
            assert found == [(whole[: min(tokens, 9 if reason == "stop" else tokens)], reason)] * 2

    asyncio.run(main())


def test_penalties():
    async def main():
        async with running(served()) as (client, _):
            body = {"prompt": "abc", "max_tokens": 20, "frequency_penalty": 2.0, "presence_penalty": 2.0}
            text = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
            plain = text_alone("abc", max_new_tokens=20)
            assert len(set(text)) / len(text) > len(set(plain)) / len(plain)

    asyncio.run(main())


@pytest.mark.parametrize("penalty", [{"repetition_penalty": 1.5}, {"presence_penalty": 1.5}])
def test_penalties_do_not_depend_on_what_a_state_has_read(penalty):
    """A prompt whose beginning is known, and one after a state, have the answer that they have from the beginning."""

    async def post(client, prompt, **fields):
        body = {"prompt": prompt, "max_tokens": 12, **penalty, **fields}
        answer = (await client.post("/v1/completions", json=body)).json()
        return answer, answer["choices"][0]["text"]

    async def main():
        async with running(served()) as (client, _):
            _, expected = await post(client, LETTERS)
            state = (await client.post("/v1/states", json={"text": LETTERS[:20], "chat": False})).json()
            known, found = await post(client, LETTERS)
            assert known["usage"]["prompt_tokens_details"]["cached_tokens"] == 20
            assert found == expected
            assert (await post(client, LETTERS[20:], state=state["id"]))[1] == expected

    asyncio.run(main())


def spaced():
    """Return a tokenizer of the letters, each with a space before it, which it removes from the beginning of a text."""
    pieces = {f"▁{chr(33 + i)}": i for i in range(94)}
    backend = Tokenizer(models.WordLevel(pieces, unk_token="▁!"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="▁!")
    made.chat_template = TEMPLATE
    return made


def test_a_text_goes_on_with_its_space():
    """An answer is a text of its own, which begins without one."""
    mine = ServedModel("rnn", model(), spaced())

    async def main():
        async with running(mine) as (client, _):
            body = {"prompt": "a b c", "max_tokens": 6, "logprobs": 1, "logit_bias": {"0": -100}}
            answer = (await client.post("/v1/completions", json=body)).json()["choices"][0]
            text = answer["text"]
            new = [*map(mine.tokenizer.convert_tokens_to_ids, [f"▁{letter}" for letter in text.split()])]
            assert text == "".join(f" {letter}" for letter in text.split())
            assert mine.tokenizer("a b c" + text).input_ids == [*mine.tokenizer("a b c").input_ids, *new]
            assert answer["logprobs"]["tokens"] == [f" {letter}" for letter in text.split()]
            assert answer["logprobs"]["text_offset"] == [2 * i for i in range(6)]
            pieces = await streamed(client, "/v1/completions", **body)
            assert "".join(piece["choices"][0]["text"] for piece in pieces) == text
            long = [*map(ord, "A" * 2 * SHARED)]
            many = (await client.post("/v1/completions", json=body | {"prompt": long, "n": 2})).json()["choices"]
            assert all(each["text"].startswith(" ") for each in many)
            chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "logit_bias": {"0": -100}}
            said = (await client.post("/v1/chat/completions", json=chat)).json()["choices"][0]["message"]["content"]
            assert said == said.strip() != ""

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_are_impossible_have_numbers(stream, monkeypatch):
    mine = served()
    monkeypatch.setattr(mine.defaults, "suppress_tokens", [*range(90)])

    async def main():
        async with running(mine) as (client, _):
            body = {"prompt": "abc", "max_tokens": 2, "logprobs": 20}
            if stream:
                (top, *_) = (await streamed(client, "/v1/completions", **body))[0]["choices"][0]["logprobs"][
                    "top_logprobs"
                ]
            else:
                answer = await client.post("/v1/completions", json=body)
                (top, _) = answer.json()["choices"][0]["logprobs"]["top_logprobs"]
            assert min(top.values()) == LOWEST
            assert -50 < max(top.values()) <= 0

    asyncio.run(main())


def test_penalties_of_a_translation_do_not_count_its_source():
    """They begin with its first token, however long the source is."""

    async def main():
        async with running(served("marian", name="mt")) as (client, _):
            texts = []
            for penalty in (0.0, 2.0):
                body = {
                    "prompt": LETTERS[:8],
                    "max_tokens": 8,
                    "presence_penalty": penalty,
                    "frequency_penalty": penalty,
                }
                texts.append((await client.post("/v1/completions", json=body)).json()["choices"][0]["text"])
            return texts

    plain, penalized = asyncio.run(main())
    assert plain[0] == plain[1] == penalized[0] != penalized[1]
    assert len(set(penalized)) > len(set(plain))


def test_a_chat():
    """The template renders messages. A later call finds the state of what was said before."""

    async def main():
        async with running(served(stop=STOP)) as (client, _):
            messages = [{"role": "system", "content": "xyz"}, {"role": "user", "content": "Hello"}]
            body = {"messages": messages, "max_completion_tokens": 8}
            answer = (await client.post("/v1/chat/completions", json=body)).json()
            said = answer["choices"][0]["message"]
            expected = text_alone("s~xyz|u~Hello|a~", stop=STOP, max_new_tokens=8)
            assert said == {"role": "assistant", "content": expected, "refusal": None}
            assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
            messages = [*messages, {"role": "assistant", "content": expected}, {"role": "user", "content": "And"}]
            parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
            body = {"messages": parts, "max_tokens": 8, "stream_options": {"include_usage": True}}
            chunks = await streamed(client, "/v1/chat/completions", **body, logprobs=True, top_logprobs=1)
            text = f"s~xyz|u~Hello|a~{expected}|u~And|a~"
            *chunks, last = chunks
            made = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            assert made == text_alone(text, stop=STOP, max_new_tokens=8)
            assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
            # The last token of the answer was not read.
            cached = len("s~xyz|u~Hello|a~") + answer["usage"]["completion_tokens"] - 1
            assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
            assert last["usage"]["prompt_tokens"] == len(text)
            listed = [c["choices"][0]["logprobs"]["content"] for c in chunks if c["choices"][0]["logprobs"]]
            assert sum(map(len, listed)) == last["usage"]["completion_tokens"]

    asyncio.run(main())


def test_a_translation():
    """An encoder-decoder translates over the same routes, and its users run beside each other."""

    async def main():
        async with running(served("marian", name="mt")) as (client, _):
            texts = [LETTERS[: 2 + 3 * i] for i in range(5)]
            bodies = [{"messages": [{"role": "user", "content": t}], "max_tokens": 4 + i} for i, t in enumerate(texts)]
            answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))
            found = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
            wanted = [text_alone(t, "marian", max_new_tokens=4 + i, num_beams=1) for i, t in enumerate(texts)]
            assert found == wanted
            answer = await client.post("/v1/completions", json={"prompt": texts[1], "max_tokens": 5})
            assert answer.json()["choices"][0]["text"] == wanted[1]
            answer = await client.post("/v1/responses", json={"input": texts[1], "max_output_tokens": 5})
            assert answer.json()["output"][0]["content"][0]["text"] == wanted[1]
            answer = await client.post("/v1/states", json={"text": "abc"})
            assert "has no states" in answer.json()["error"]["message"]

    asyncio.run(main())
