"""What is refused, and that nothing is left behind."""

import asyncio
import gc
import json
from contextlib import suppress

import pytest

from serving_models import running, served
from t2r.serving.served import ServedModel
from t2r.serving.states import States
from t2r.serving.worker import Job

CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3}
TEXT = {"prompt": "abc", "max_tokens": 3}
RESPONSE = {"input": "abc", "max_output_tokens": 3}


def of(route, **fields):
    path, body = {
        "text": ("/v1/completions", TEXT),
        "chat": ("/v1/chat/completions", CHAT),
        "response": ("/v1/responses", RESPONSE),
        "state": ("/v1/states", {"text": "abc"}),
        "tokenize": ("/tokenize", {}),
    }[route]
    return path, {**body, **fields}


# The route, the fields, the field that the error names, and words of its message.
REFUSED = [
    ("text", {"tools": []}, "tools", "not supported"),
    ("text", {"best_of": 3}, "best_of", "supports only 1"),
    ("text", {"echo": True}, "echo", "supports only False"),
    ("text", {"suffix": "x"}, "suffix", "supports only"),
    ("text", {"prompt": ["a", "b"]}, "prompt", ""),
    ("text", {"prompt": None}, "prompt", ""),
    ("text", {"prompt": ""}, "prompt", "no tokens"),
    ("text", {"prompt": []}, "prompt", "no tokens"),
    ("text", {"prompt": [5, 97]}, "prompt", "are 0 to 96"),
    ("text", {"prompt": [-1]}, "prompt", ""),
    ("text", {"prompt": [10**30]}, "prompt", ""),
    ("text", {"prompt": b"\\ud800".decode("unicode_escape")}, "prompt", ""),
    ("text", {"max_tokens": 0}, "max_tokens", ""),
    ("text", {"max_tokens": 10**9}, "max_tokens", "at most 4096"),
    ("text", {"max_tokens": "3"}, "max_tokens", "integer"),
    ("text", {"max_tokens": 3.5}, "max_tokens", "integer"),
    ("text", {"max_tokens": True}, "max_tokens", "integer"),
    ("text", {"temperature": -1}, "temperature", ""),
    ("text", {"temperature": "hot"}, "temperature", ""),
    ("text", {"top_p": 0}, "top_p", ""),
    ("text", {"n": 1000}, "n", ""),
    ("text", {"seed": 1 << 70}, "seed", ""),
    ("text", {"stop": [""]}, "stop", ""),
    ("text", {"stop": ["a"] * 100}, "stop", ""),
    ("text", {"logprobs": 99}, "logprobs", ""),
    ("text", {"logit_bias": {"x": 1}}, "logit_bias", "not a token"),
    ("text", {"logit_bias": {"5": 1000}}, "logit_bias", "-100 to 100"),
    ("text", {"logit_bias": {"97": 1}}, "logit_bias", "not a token"),
    ("text", {"stream_options": {"include_usage": True}}, "stream_options", "set stream"),
    ("text", {"model": "other"}, "model", "there is rnn"),
    ("text", {"state": "../../etc/passwd"}, "state", "no state"),
    ("chat", {"response_format": {"type": "json_object"}}, "response_format.type", "supports only 'text'"),
    ("chat", {"messages": []}, "messages", ""),
    ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", ""),
    ("chat", {"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages.0.name", "not supported"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", ""),
    ("chat", {"top_logprobs": 3}, "top_logprobs", "requires logprobs"),
    ("chat", {"max_completion_tokens": 3}, "max_tokens", "not both"),
    ("chat", {"functions": []}, "functions", "not supported"),
    ("chat", {"user": "me"}, "user", "not supported"),
    ("response", {"tools": [{"type": "web_search"}]}, "tools", "not supported"),
    ("response", {"text": {"format": {"type": "json_schema"}}}, "text.format.type", "supports only 'text'"),
    ("response", {"background": True}, "background", "supports only False"),
    ("response", {"previous_response_id": "resp_no"}, "previous_response_id", "no state"),
    ("response", {"input": [{"type": "function_call", "role": "user", "content": "x"}]}, "input", ""),
    ("text", {"stop": ["a"] * 17}, "stop", "at most 16"),
    ("text", {"prompt": ["a", "b"]}, "prompt.0", "valid integer"),
    ("text", {"logit_bias": {"1": 5.0, "01": -5.0}}, "logit_bias", "'01' is not a token"),
    ("state", {"text": "", "chat": False}, "prompt", "no tokens"),
    ("state", {"text": 3}, "text", ""),
    ("tokenize", {}, "text", "give text or messages"),
]


def test_fields_that_are_not_supported_are_named():
    async def main():
        async with running(served()) as (client, _):
            for route, fields, param, words in REFUSED:
                path, body = of(route, **fields)
                try:
                    answer = await client.post(path, json=body)
                except UnicodeEncodeError:  # httpx does not send lone surrogates as they are
                    answer = await client.post(path, content=b'{"prompt": "\\ud800"}', headers=JSON)
                assert answer.status_code in (400, 404), (fields, answer.text)
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert error["param"] == param or (not words and error["param"].startswith(param)), (fields, error)
                assert words in error["message"], (fields, error)
            neutral = {"best_of": 1, "echo": False, "suffix": None, "logprobs": None, "stream": False, "n": 1}
            path, body = of("text", **neutral)
            assert (await client.post(path, json=body)).status_code == 200

    asyncio.run(main())


JSON = {"content-type": "application/json"}


def test_the_key_the_origin_and_the_size():
    async def main():
        how = {"key": "secret", "cors": ["http://here.example"], "max_body": 1}
        async with running(served(), **how) as (client, _):
            assert (await client.get("/health")).status_code == 200
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
                for path in ("/v1/models", "/metrics", "/v1/states", "/nothing"):
                    answer = await client.get(path, headers=headers)
                    assert answer.status_code == 401
                    assert answer.json()["error"]["code"] == "invalid_api_key"
            good = {"authorization": "Bearer secret"}
            assert (await client.get("/v1/models", headers=good)).status_code == 200
            origin = {"origin": "http://here.example"}
            asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
            answer = await client.options("/v1/completions", headers=origin | asked)
            assert answer.headers["access-control-allow-origin"] == "http://here.example"
            answer = await client.get("/v1/models", headers=good | {"origin": "http://there.example"})
            assert "access-control-allow-origin" not in answer.headers
            answer = await client.get("/v1/models", headers=good | {"host": "evil.example"})
            assert answer.status_code == 403
            large = b'{"prompt": "' + b"a" * (1 << 20) + b'"}'

            async def parts():
                for start in range(0, len(large), 1000):
                    yield large[start : start + 1000]

            for content in (large, parts()):
                answer = await client.post("/v1/completions", content=content, headers=good | JSON)
                assert answer.status_code == 413
                assert answer.json()["error"]["code"] == "too_large"

    asyncio.run(main())


def test_without_cors_no_other_page_may_use_the_server():
    async def main():
        async with running(served()) as (client, _):
            answer = await client.post("/v1/completions", json=TEXT, headers={"origin": "http://evil.example"})
            assert "access-control-allow-origin" not in answer.headers
            # What a page may send without asking is not a request.
            for kind in ("text/plain", "application/x-www-form-urlencoded"):
                answer = await client.post(
                    "/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": kind}
                )
                assert answer.status_code == 400

    asyncio.run(main())


async def until(true, seconds=60):
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.01)


def test_a_full_queue_and_a_client_that_leaves():
    """Who leaves frees its row, waiting or running, and nobody else notices."""

    async def main():
        async with running(served(rows=1), max_queue=1) as (client, service):
            engine = service.models["rnn"].engine
            long = {"prompt": "abc", "max_tokens": 4000}
            first = asyncio.create_task(client.post("/v1/completions", json=long))
            await until(lambda: service.worker.load["rnn"].running == 1)
            second = asyncio.create_task(client.post("/v1/completions", json=TEXT))
            await until(lambda: len(service.running) == 2)
            full = await client.post("/v1/completions", json=TEXT)
            assert full.status_code == 429
            assert full.json()["error"]["code"] == "queue_full"
            assert full.headers["retry-after"]
            first.cancel()
            assert (await second).status_code == 200
            await until(lambda: not engine.busy)
            # a stream that nobody reads to its end
            async with client.stream("POST", "/v1/completions", json=TEXT | {"stream": True}) as response:
                assert response.status_code == 200
            await until(lambda: not engine.busy and not engine.rows.held and not service.running)
            assert (await client.post("/v1/completions", json=TEXT)).status_code == 200

    asyncio.run(main())


def test_a_request_that_takes_too_long():
    async def main():
        async with running(served(), timeout=0.05) as (client, service):
            long = {"prompt": "abc", "max_tokens": 4000}
            answer = await client.post("/v1/completions", json=long)
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "timeout"
            answer = await client.post("/v1/completions", json=long | {"stream": True})
            assert '"code":"timeout"' in answer.text
            answer = await client.post("/v1/responses", json={"input": "abc", "stream": True})
            numbers = [
                json.loads(line[6:])["sequence_number"] for line in answer.text.split("\n") if line[:6] == "data: "
            ]
            assert '"type":"error"' in answer.text
            assert numbers == list(range(len(numbers)))
            await until(lambda: not service.models["rnn"].engine.busy and not service.running)

    asyncio.run(main())


def test_lengths():
    async def main():
        async with running(served(), max_length=20, max_tokens=12) as (client, _):
            for body in (TEXT | {"prompt": "a" * 18}, TEXT | {"prompt": "a" * 9, "max_tokens": 12}):
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 400
                assert answer.json()["error"]["code"] == "context_length_exceeded"
            answer = await client.post("/v1/chat/completions", json={"messages": CHAT["messages"]})
            assert answer.json()["usage"]["completion_tokens"] == 12
            assert answer.json()["choices"][0]["finish_reason"] == "length"

    asyncio.run(main())


LONG = "a" * 70_000
TOO_LONG = [
    ("text", {"prompt": LONG}, "70,000 characters are more than the 65,536"),
    ("text", {"prompt": [5] * 101}, "101 tokens or more are more than the 100"),
    ("chat", {"messages": [{"role": "user", "content": LONG[:35_000]}] * 2}, "70,000 characters are more"),
    ("chat", {"messages": [{"role": "user", "content": ""}] * 101}, "101 tokens or more are more"),
    ("response", {"input": "a", "instructions": LONG}, "70,001 characters are more"),
    ("response", {"input": [{"role": "user", "content": ""}] * 101}, "101 tokens or more are more"),
    ("state", {"text": LONG}, "70,000 characters are more"),
    ("tokenize", {"text": LONG}, "70,000 characters are more"),
    ("tokenize", {"messages": [{"role": "user", "content": ""}] * 101}, "101 tokens or more are more"),
]


@pytest.mark.parametrize(("route", "fields", "words"), TOO_LONG)
def test_what_is_certainly_too_long_is_refused_before_it_is_read(route, fields, words, monkeypatch):
    """To tokenize 15 MiB, and to render 90,000 messages, stopped all other clients for a minute."""
    read = []
    monkeypatch.setattr(ServedModel, "encode", lambda self, *args, **how: read.append(args))

    async def main():
        async with running(served(), max_length=100) as (client, _):
            path, body = of(route, **fields)
            answer = await client.post(path, json=body)
            assert answer.status_code == 400
            assert words in answer.json()["error"]["message"]
            assert answer.json()["error"]["code"] == "context_length_exceeded"

    asyncio.run(main())
    assert not read


def test_a_long_prompt_is_not_looked_up_before_its_length_is_known(monkeypatch):
    """Its beginnings are hashed in the event loop."""
    monkeypatch.setattr(States, "longest", lambda self, *args: pytest.fail("it is looked up"))

    async def main():
        async with running(served(), max_length=100) as (client, _):
            answer = await client.post("/v1/completions", json=TEXT | {"prompt": "a" * 5000})
            assert answer.json()["error"]["code"] == "context_length_exceeded"

    asyncio.run(main())


def test_a_choice_that_fails_is_counted_once(monkeypatch):
    """And the others, which are cancelled."""
    piece = Job.piece

    def failing(self, tokens, last):
        if self.seed == 6:
            raise ValueError("the tokenizer has failed")
        return piece(self, tokens, last)

    monkeypatch.setattr(Job, "piece", failing)

    async def main():
        async with running(served()) as (client, service):
            body = TEXT | {"n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 200}
            assert (await client.post("/v1/completions", json=body)).status_code == 400
            await until(lambda: not service.running and not service.models["rnn"].engine.busy)
            await asyncio.sleep(0.1)
            lines = (await client.get("/metrics")).text.splitlines()
            counts = [float(line.split()[-1]) for line in lines if line.startswith("t2r_sequences_total{")]
            assert sum(counts) == 3

    asyncio.run(main())


def test_the_end_of_the_server():
    """What runs is finished, what waits and what comes is refused."""

    async def main():
        async with running(served(rows=1)) as (client, service):
            running_one = asyncio.create_task(client.post("/v1/completions", json=TEXT | {"max_tokens": 800}))
            await until(lambda: service.worker.load["rnn"].running == 1)
            waiting = asyncio.create_task(client.post("/v1/completions", json=TEXT))
            await until(lambda: service.worker.load["rnn"].waiting == 1)
            service.refuse_new()
            for answer in (await waiting, await client.post("/v1/completions", json=TEXT), await client.get("/health")):
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "shutting_down"
            answer = await running_one
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 800

    asyncio.run(main())


def test_an_error_of_the_engine_ends_only_what_ran(monkeypatch):
    async def main():
        async with running(served()) as (client, service):
            engine = service.models["rnn"].engine
            with monkeypatch.context() as patch:

                def failing():
                    raise RuntimeError("the device has failed")

                patch.setattr(engine.scheduler, "advance", failing)
                answer = await client.post("/v1/completions", json=TEXT)
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "internal_error"
            assert "device" not in answer.text
            assert (await client.post("/v1/completions", json=TEXT)).status_code == 200

    asyncio.run(main())


def test_nothing_leaks():
    """After hundreds of requests, of which many leave, there are no rows, jobs or states left."""

    async def one(client, number):
        body = TEXT | {"max_tokens": 1 + number % 9, "stream": number % 2 == 0, "prompt": "abc" * (1 + number % 5)}
        task = asyncio.create_task(client.post("/v1/completions", json=body))
        if number % 3 == 0:
            await asyncio.sleep(0.001 * (number % 20))
            task.cancel()
        with suppress(asyncio.CancelledError):
            assert (await task).status_code == 200

    async def main():
        async with running(served(rows=8), max_queue=400, state_memory=0) as (client, service):
            for start in range(0, 300, 50):
                await asyncio.gather(*(one(client, start + i) for i in range(50)))
            engine = service.models["rnn"].engine
            await until(lambda: not engine.busy and not service.running)
            assert not engine.rows.held
            assert not service.worker.jobs
            assert not service.states.by_id
            assert service.states.in_memory == 0
            text = (await client.get("/metrics")).text
            assert "t2r_running" in text
            assert 'kind="generated"' in text
            assert 't2r_first_token_seconds_count{model="rnn"}' in text
            gc.collect()
            # Frames of threads may hold the last ones.
            assert sum(isinstance(each, Job) for each in gc.get_objects()) < 5

    asyncio.run(main())


def test_what_is_not_a_request():
    async def main():
        async with running(served()) as (client, _):
            deep = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
            bodies = [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b'{"prompt": NaN}', deep, b'{"prompt": 1e999}']
            bodies += [
                b'{"prompt": "abc", "temperature": NaN}',
                b'{"prompt": "\xff"}',
                b'{"a": "' + b"9" * 9999 + b'"}',
            ]
            bodies += [b'{"prompt": ' + b"9" * 9999 + b"}"]
            for body in (b"", b"[]", b"{", b"null", b'{"a":' * 3000 + b"1" + b"}" * 3000):
                answer = await client.post("/v1/completions", content=body, headers=JSON)
                assert answer.json()["error"]["message"].startswith("the body must be a JSON object")
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/states", "/tokenize"):
                for body in bodies:
                    answer = await client.post(path, content=body, headers=JSON)
                    assert answer.status_code == 400, (path, body[:20], answer.text)
                    assert answer.json()["error"]["message"]
            for method, path, status in (
                ("GET", "/v1/completions", 405),
                ("DELETE", "/health", 405),
                ("GET", "/v1/states/..%2f..%2fetc%2fpasswd", 404),
                ("DELETE", "/v1/states/../../pyproject.toml", 404),
                ("GET", "/v1/states/%00/content", 404),
                ("GET", "/v1/responses/" + "a" * 5000, 404),
                ("GET", "/v1/models/../x", 404),
                ("POST", "/docs", 404),
            ):
                answer = await client.request(method, path)
                assert answer.status_code == status, (path, answer.text)
                assert answer.json()["error"]["message"]
                assert len(answer.text) < 500
            assert (await client.post("/v1/completions", json=TEXT)).status_code == 200

    asyncio.run(main())


def test_tokenize():
    async def main():
        async with running(served()) as (client, _):
            answer = (await client.post("/tokenize", json={"text": "abc"})).json()
            assert answer == {"model": "rnn", "count": 3, "tokens": [64, 65, 66]}
            answer = (await client.post("/tokenize", json={"messages": CHAT["messages"]})).json()
            assert answer["count"] == len("u~abc|a~")

    asyncio.run(main())
