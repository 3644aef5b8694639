"""The real server in its own process, with the real client of OpenAI: faults, restarts, and what is not HTTP."""

import functools
import io
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import httpx
import openai
import pytest
import torch

from engines import alone
from processes import same_threads
from serving_models import STOP, model, tokenizer
from t2r import T2RError, cli
from t2r.cli.remote import Remote, RemoteConversation


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "tiny"
    model(stop=STOP).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


class Server:
    """A process that serves a model."""

    def __init__(self, folder, *options, limit=None):
        command = [sys.executable, "-m", "t2r.cli", "serve", str(folder), "--port", "0", *options]

        def limited():
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env=same_threads(T2R_API_KEY="secret"),
            preexec_fn=limited,
        )
        self.lines = []
        for line in self.process.stderr:
            self.lines.append(line)
            if " at http://" in line:
                break
        assert self.lines, self.process.wait()
        assert " at http://" in self.lines[-1], self.lines
        self.url = self.lines[-1].split(" at ")[1].split(" ")[0]
        self.port = int(self.url.rpartition(":")[2])
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True)
        self.reader.start()
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="secret", max_retries=0, timeout=120)
        self.http = httpx.Client(base_url=self.url, headers={"authorization": "Bearer secret"}, timeout=120)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()

    def end(self, how):
        self.process.send_signal(how)
        return self.process.wait(120)

    def running(self):
        return self.http.get("/health").json()["models"]["tiny"]["running"]

    def files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def raw(self, data):
        """Send bytes, and return what comes back until the server closes or says no more."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            found = b""
            while part := connection.recv(65536):
                found += part
            return found


def wanted(text, tokens):
    found = alone(model(stop=STOP), torch.tensor([tokenizer()(text).input_ids]), max_new_tokens=tokens)
    return tokenizer().decode([token for token in found if token != STOP])


def until(true, seconds=120):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def use(client):
    """Use the routes as the client of OpenAI does."""
    (only,) = client.models.list().data
    assert client.models.retrieve(only.id).id == only.id == "tiny"
    made = client.completions.create(model="tiny", prompt="abc", max_tokens=5, logprobs=1)
    assert made.choices[0].text == wanted("abc", 5)
    assert len(made.choices[0].logprobs.tokens) == made.usage.completion_tokens
    messages = [{"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=6, logprobs=True)
    said = chat.choices[0].message.content
    assert said == wanted("u~Hello|a~", 6)
    assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "one"}]
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == wanted(f"u~Hello|a~{said}|u~one|a~", 6)
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == len(f"u~Hello|a~{said}") - (len(said) == 6)
    with pytest.raises(openai.BadRequestError, match="'tools' is not supported") as refused:
        client.chat.completions.create(model="tiny", messages=messages, tools=[])
    assert refused.value.param == "tools"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tiny", input="a", previous_response_id="resp_no")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def converse(client):
    """Return the id of an answer, what was said, and the answer to a second turn."""
    events = list(client.responses.create(model="tiny", input="Hello", max_output_tokens=6, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    first = events[-1].response
    assert first.output_text == text == wanted("u~Hello|a~", 6)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    again = client.responses.create(model="tiny", input="one", previous_response_id=first.id, max_output_tokens=6)
    assert again.output_text == wanted(f"u~Hello|a~{text}|u~one|a~", 6)
    assert again.usage.input_tokens_details.cached_tokens == first.usage.total_tokens - 1
    assert client.responses.retrieve(first.id).output_text == text
    return first.id, again.output_text


def in_the_terminal(server, tmp_path):
    """`t2r generate URL` completes prompts, and chats."""

    def generate(*arguments, given=""):
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setenv("T2R_API_KEY", "secret")
            patch.setattr(sys, "argv", ["t2r", "generate", server.url, *arguments])
            patch.setattr(sys, "stdin", io.StringIO(given))
            with pytest.raises(SystemExit) as ended:
                cli.main()
        return ended.value.code, out.getvalue(), err.getvalue()

    answers = f"{wanted('abc', 5)}\n\n{wanted('xyz', 5)}\n"
    assert generate("--max-new-tokens", "5", given="abc\n\nxyz\n") == (None, answers, "")
    assert generate("--chat", "Hello", "--max-new-tokens", "5") == (None, wanted("u~Hello|a~", 5) + "\n", "")
    for arguments, words in ((["abc", "--num-beams", "3"], "num_beams is not possible"), (["abc", "--json"], "--json")):
        code, _, told = generate(*arguments)
        assert code == 2
        assert words in told
    conversation = RemoteConversation(Remote(server.url), {"max_tokens": 6})
    with pytest.raises(T2RError, match="a valid key is required"):
        conversation.say("Hello")
    conversation.remote.send = functools.partial(with_key, conversation.remote.send)
    first = conversation.say("Hello")
    assert first == wanted("u~Hello|a~", 6)
    conversation.save(tmp_path / "chat.state")
    second = conversation.say("one")
    assert second == wanted(f"u~Hello|a~{first}|u~one|a~", 6)
    resumed = RemoteConversation(conversation.remote, {"max_tokens": 6}, tmp_path / "chat.state")
    assert resumed.say("one") == second
    conversation.reset()
    assert conversation.say("Hello") == first
    (tmp_path / "chat.state").unlink()


def with_key(send, *args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("T2R_API_KEY", "secret")
        return send(*args)


def the_page(server):
    """The examples of docs/serving.md run."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = code.replace("http://127.0.0.1:8000", server.url).replace('"none"', '"secret"').replace('"out"', '"tiny"')
    names = {"print": lambda *args: None}
    exec(compile(code, "docs/serving.md", "exec"), names)
    assert names["second"].usage.input_tokens_details.cached_tokens == names["first"].usage.total_tokens - 1
    (line,) = re.findall(r"^    curl \S*/v1/states .* -d '(.*)'$", page, re.MULTILINE)
    id = server.http.post("/v1/states", json=json.loads(line)).json()["id"]
    (line,) = re.findall(r"^        -d '(.*)'$", page, re.MULTILINE)
    answer = server.http.post(
        "/v1/responses", json=json.loads(line.replace("state_...", id)) | {"max_output_tokens": 3}
    )
    assert answer.json()["usage"]["input_tokens_details"]["cached_tokens"] > 20


def post(path, body, *more, length=None):
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Authorization: Bearer secret", "Connection: close"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body) if length is None else length}", *more]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def malformed():
    """Return 200 requests that are wrong in different ways: as bytes, and the statuses that they may have."""
    generator = random.Random(0)
    head = "Host: 127.0.0.1\r\nAuthorization: Bearer secret\r\n"

    yield b"\r\n\r\n\x00\x01\x02\xff\r\n\r\n"
    yield b"GET\r\n\r\n"
    yield b"GET /health HTTP/9.9\r\n\r\n"
    yield b"GET /health HTTP/1.1\r\n\r\n"  # without a host
    yield f"GET /health HTTP/1.1\r\n{head}bad header\r\n\r\n".encode()
    yield f"GET /{'a' * 100_000} HTTP/1.1\r\n{head}\r\n".encode()
    yield f"GET /v1/models HTTP/1.1\r\n{head}x: {'y' * 100_000}\r\n\r\n".encode()
    yield f"GET /v1/states/{'%2e%2e%2f' * 20}etc%2fpasswd/content HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode()
    yield f"BREW /v1/models HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode()
    yield post("/v1/completions", b'{"prompt"', length=100)  # cut off
    yield post("/v1/completions", b"{}", length="-1")
    yield post("/v1/completions", b"{}", length="9" * 30)
    yield post("/v1/completions", b"zz\r\nnothing", "Transfer-Encoding: chunked")
    yield f"POST /v1/completions HTTP/1.1\r\n{head}Content-Type: applicat".encode()  # headers cut off
    right = {
        "/v1/completions": {"prompt": "abc", "max_tokens": 2, "temperature": 0.5, "stop": "x", "n": 1, "stream": False},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "seed": 3},
        "/v1/responses": {"input": "abc", "max_output_tokens": 2, "store": False, "metadata": {}},
        "/v1/states": {"text": "abc", "chat": False},
    }
    values = ["x", -1, 10**40, 1.5, True, [], [[]], {}, {"a": 1}, ["x", 1], "\x00", "../../x"]
    for number in range(270):
        path = generator.choice(list(right))
        body, field = dict(right[path]), generator.choice([*right[path], "model", "something_else"])
        if number % 10 == 0:
            text = json.dumps(body).encode()
            place = generator.randrange(len(text))
            yield post(path, text[:place] + bytes([generator.choice([0, 255, 192, 123])]) + text[place:])
        elif number % 10 == 1:
            yield post(path, b"[" * generator.randrange(1, 100_000))
        elif number % 10 == 2:
            yield post("/v1/states/content", generator.randbytes(generator.randrange(300)))
        else:
            body[field] = generator.choice(values)
            yield post(path, json.dumps(body).encode())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="requires Linux")
def test_a_server_that_is_misused_and_killed(folder, tmp_path):
    """Nothing that a client sends ends the server, or changes what others get. States survive a kill."""
    with Server(folder, "--states", str(tmp_path / "states")) as server:
        use(server.client)
        the_page(server)
        in_the_terminal(server, tmp_path)
        text, made = wanted("ab", 700), []  # a prompt whose answer does not end by itself
        assert len(text) > 500

        def beside():
            for chunk in server.client.completions.create(model="tiny", prompt="ab", max_tokens=700, stream=True):
                made.append(chunk.choices[0].text)

        other = threading.Thread(target=beside)
        other.start()
        before = server.files()
        refused = 0
        for request in malformed():
            answer = server.raw(request)
            if not answer:
                continue  # a request that was cut off
            status = int(answer.split(b" ")[1])
            assert status < 500, (request[:300], answer)
            if status >= 400:
                refused += 1
                error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
                assert set(error) == {"message", "type", "param", "code"}, (request[:300], answer)
                assert error["message"]
        assert refused >= 200
        other.join()
        assert "".join(made) == text
        assert server.files() <= before + 2
        id, second = converse(server.client)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["states"]
        # a client that goes in the middle of a stream
        stream = server.client.completions.create(model="tiny", prompt="ab", max_tokens=4000, stream=True)
        next(iter(stream))
        stream.close()
        until(lambda: not server.running())
        # and one that goes while it waits for its answer
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(post("/v1/completions", b'{"prompt": "ab", "max_tokens": 4000}'))
            until(server.running)
        until(lambda: not server.running())
        # and one that goes while its prompt is read for several choices
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            body = json.dumps({"prompt": [9] * 3000, "n": 3, "max_tokens": 900}).encode()
            connection.sendall(post("/v1/completions", body))
            until(server.running)
        until(lambda: not server.running())
        until(lambda: all(state["saved"] for state in server.http.get("/v1/states").json()["data"]))
        states = len(server.http.get("/v1/states").json()["data"])
        assert server.end(signal.SIGKILL) == -signal.SIGKILL

    # Files of this process have at most 100 bytes, as on a full disk.
    with Server(folder, "--states", str(tmp_path / "states"), limit=100) as server:
        assert len(server.http.get("/v1/states").json()["data"]) == states
        again = server.client.responses.create(model="tiny", input="one", previous_response_id=id, max_output_tokens=6)
        assert again.output_text == second
        after = server.client.responses.create(
            model="tiny", input="a", previous_response_id=again.id, max_output_tokens=6
        )
        assert after.usage.input_tokens_details.cached_tokens == again.usage.total_tokens - 1
        until(lambda: "t2r_state_failures 2.0" in server.http.get("/metrics").text)
        # What runs is finished.
        stream = iter(server.client.completions.create(model="tiny", prompt="ab", max_tokens=700, stream=True))
        first = next(stream).choices[0].text
        server.process.send_signal(signal.SIGTERM)
        assert first + "".join(chunk.choices[0].text for chunk in stream) == text
        assert server.process.wait(300) == 0
        server.reader.join(60)
        assert sum("states cannot be written to" in line for line in server.lines) == 1
        assert not any("Traceback" in line for line in server.lines)
        assert not list((tmp_path / "states").glob("*/.*"))
