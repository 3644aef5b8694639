"""`t2r generate URL` with what is not a server of t2r, or one that ends an answer early: one line, never half an answer
without a word."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from commands import is_one_line, runner

WHOLE = b'data: {"choices": [{"text": "the sea", "delta": {"content": "the sea"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
OTHER = "is no server of t2r: its answers have another form"
ANSWERS = {
    "page": (b"<html>hello</html>", "is no server of t2r: its answer is not a stream of events"),
    "empty": (b"", "its answer is not a stream of events"),
    "json": (b"[]", "its answer is not a stream of events"),
    "no JSON": (b"data: nonsense\n\n", "has ended the answer: Expecting value"),
    "a list": (b"data: []\n\n" + DONE, OTHER),
    "no choices": (b'data: {"choices": 3}\n\n' + DONE, OTHER),
    "choices of another form": (b'data: {"choices": [{"delta": 3}]}\n\n' + DONE, OTHER),
    "half an event": (b'data: {"choices": [{"text": "ha', "has ended the answer: Unterminated string"),
    "bytes": (b'data: {"choices": "\xff"}\n\n', "has ended the answer: 'utf-8' codec can't decode"),
    "an error": (b'data: {"error": {"message": "no rows are left"}}\n\n', ": no rows are left"),
    "an error of another form": (b'data: {"error": 3}\n\n', OTHER),
    "no end": (WHOLE, "has ended the answer before it was complete"),
}


@pytest.fixture
def run(monkeypatch, capsys):
    return runner(monkeypatch, capsys)


@pytest.fixture(scope="module")
def server():
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            if self.server.answer == b"garbage":
                self.wfile.write(b"\x00garbage\r\n\r\n")
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.server.answer)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("name", ANSWERS)
def test_answers_of_others(run, server, name, chat):
    server.answer, says = ANSWERS[name]
    code, stdout, stderr = run("generate", f"http://127.0.0.1:{server.server_port}", "hello", *["--chat"] * chat)
    assert code == 2
    assert says in stderr
    assert is_one_line(stderr), stderr
    assert stdout == ("the sea" if name == "no end" else "")


def test_a_whole_answer(run, server):
    server.answer = WHOLE + DONE
    assert run("generate", f"http://127.0.0.1:{server.server_port}", "hello") == (0, "the sea\n", "")


def test_a_server_of_another_protocol(run, server):
    server.answer = b"garbage"
    code, _, stderr = run("generate", f"http://127.0.0.1:{server.server_port}", "hello")
    assert (code, is_one_line(stderr)) == (2, True)
    assert "there is no server at" in stderr


@pytest.mark.parametrize("url", ["http://", "http://127.0.0.1:port", "http://[::1", "http://127.0.0.1:99999"])
def test_addresses(run, url):
    code, _, stderr = run("generate", url, "hello")
    assert (code, is_one_line(stderr)) == (2, True)
    assert "there is no server at" in stderr


def test_nobody_listens(run):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        code, _, stderr = run("generate", f"http://127.0.0.1:{bound.getsockname()[1]}", "hello")
    assert (code, is_one_line(stderr)) == (2, True)
