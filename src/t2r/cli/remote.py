"""`t2r generate URL`: the prompts and chats of `t2r generate` on a server (`t2r serve`)."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

from t2r.errors import T2RError
from t2r.storage import whole_file

FIELDS = {
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "repetition_penalty": "repetition_penalty",
}
"""Options of `generate` and the fields of the API."""
SCHEMES = ("http://", "https://")
DONE = b"[DONE]"
"""The last event of completions. Responses end with an event of these types."""
ENDS = ("response.completed", "response.incomplete")


def is_remote(model: str) -> bool:
    """Return whether this is the address of a server, not a folder or a name on the Hub."""
    return model.startswith(SCHEMES)


class Remote:
    """A server. Raises T2RError for what it refuses, and if there is none.

    Args:
        url: its address, with or without `/v1` at the end.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")

    def send(self, path: str, body: dict[str, Any] | bytes | None = None) -> Any:
        """Send a request, and return the open answer."""
        headers = {"Content-Type": "application/octet-stream" if isinstance(body, bytes) else "application/json"}
        if key := os.environ.get("T2R_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            return urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers))
        except urllib.error.HTTPError as error:
            raise T2RError(f"{self.url} refuses: {refusal(error)}") from error
        except (OSError, HTTPException, ValueError) as error:
            raise T2RError(f"there is no server at {self.url}: {getattr(error, 'reason', error)}") from error

    def json(self, path: str, body: dict[str, Any] | bytes | None = None) -> dict[str, Any]:
        with self.send(path, body) as answer:
            try:
                found: dict[str, Any] = json.loads(answer.read())
            except (OSError, HTTPException, ValueError) as error:
                raise T2RError(f"{self.url} is no server of t2r: its answer is not JSON") from error
        return found

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream. Raises T2RError if one is an error, or if the last one is missing."""
        count, ended = 0, False
        with self.send(path, {**body, "stream": True}) as answer:
            try:
                for line in answer:
                    if not line.startswith(b"data: "):
                        continue
                    count += 1
                    if line[6:].strip() == DONE:
                        ended = True
                        continue
                    event = json.loads(line[6:])
                    with self.understood():
                        if event.get("type") == "error" or ("error" in event and "id" not in event):
                            raise T2RError(f"{self.url}: {event.get('message') or event['error']['message']}")
                        ended = ended or event.get("type") in ENDS
                    yield event
            except T2RError:
                raise
            except (OSError, HTTPException, ValueError) as error:
                raise T2RError(f"{self.url} has ended the answer: {error}") from error
        if not count:
            raise T2RError(f"{self.url} is no server of t2r: its answer is not a stream of events")
        if not ended:
            raise T2RError(f"{self.url} has ended the answer before it was complete")

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Convert the errors of code that reads an answer of another form to T2RError."""
        try:
            yield
        except T2RError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise T2RError(f"{self.url} is no server of t2r: its answers have another form") from error


def refusal(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"status {error.code}"


def fields_of(options: dict[str, Any], seed: int | None) -> dict[str, Any]:
    """Return options of `generate` as fields of the API. Raises T2RError for those that it lacks."""
    given = dict(options)
    sample = given.pop("do_sample", None)
    for name in given:
        if name not in FIELDS:
            raise T2RError(f"{name} is not possible on a server: omit it")
    fields = {FIELDS[name]: value for name, value in given.items()}
    if sample is not None:
        fields["temperature"] = fields.get("temperature", 1.0) if sample else 0.0
    return fields | ({} if seed is None else {"seed": seed})


class RemoteConversation:
    """A conversation on a server, with the methods of `Conversation`. The server keeps its state."""

    def __init__(self, remote: Remote, fields: dict[str, Any], load_state: Path | None = None) -> None:
        self.remote = remote
        self.fields = {("max_output_tokens" if k == "max_tokens" else k): v for k, v in fields.items()}
        self.first: str | None = None
        if load_state is not None:
            try:
                content = load_state.read_bytes()
            except OSError as error:
                raise T2RError(f"{load_state} cannot be read: {error.strerror or error}") from error
            with self.remote.understood():
                self.first = self.remote.json("/v1/states/content", content)["id"]
        self.id = self.first
        """The id of the last answer."""

    def say(
        self, line: str, on_text: Callable[[str], None] | None = None, stop: Callable[[], bool] | None = None
    ) -> str:
        """Return the answer to a turn of the user. If it is stopped, the turn is not part of the conversation."""
        body = {"input": line, **self.fields}
        body |= {} if self.id is None else {"previous_response_id": self.id}
        answer = ""
        for event in self.remote.events("/v1/responses", body):
            piece = ""
            with self.remote.understood():
                if event["type"] == "response.output_text.delta":
                    piece = str(event["delta"])
                elif event["type"] in ENDS:
                    self.id = event["response"]["id"]
            answer += piece
            if piece and on_text is not None:
                on_text(piece)
            if stop is not None and stop():
                break
        return answer

    def reset(self) -> None:
        self.id = self.first

    def save(self, path: str | Path) -> None:
        """Download the state of the conversation."""
        if self.id is None:
            raise T2RError("nothing was said yet: there is no state to save")
        with self.remote.send(f"/v1/states/{self.id}/content") as answer:
            try:
                with whole_file(path) as temporary:
                    temporary.write_bytes(answer.read())
            except HTTPException as error:
                raise T2RError(f"{self.remote.url} has ended the answer before it was complete") from error
            except OSError as error:
                raise T2RError(f"{path} cannot be written: {error}") from error


def complete(remote: Remote, prompt: str, chat: bool, fields: dict[str, Any]) -> Iterator[str]:
    """Yield the pieces of the completion of a prompt, or with `chat` of the answer to a message."""
    body: dict[str, Any] = {"max_tokens": 128} | fields
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    for event in remote.events("/v1/chat/completions" if chat else "/v1/completions", body):
        with remote.understood():
            pieces = [(each["delta"].get("content") or "") if chat else each["text"] for each in event["choices"]]
        yield from map(str, pieces)
