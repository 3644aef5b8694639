"""A client of a server: requests over HTTP/1.1, answers at once or as events with the time at which they arrived.

It does little for each token, so that many users fit into one process beside the server that is measured.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from t2r.errors import T2RError

LARGEST_LINE = 1 << 24


class Refused(T2RError):
    """The server has refused a request. `code` is that of its error."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class Arrived(NamedTuple):
    """An event of a stream."""

    value: dict[str, Any]
    at: float


class Client:
    """Sends requests to a server, each on its own connection. Raises T2RError if the URL is not one of HTTP."""

    def __init__(self, url: str, key: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise T2RError(f"{url!r} is not a URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise T2RError(f"{url!r} is not the URL of a server, such as http://127.0.0.1:8000")
        self.url, self.key = url.rstrip("/").removesuffix("/v1"), key
        self.secure = parts.scheme == "https"
        self.host, self.port = parts.hostname, port or (443 if self.secure else 80)
        self.name, self.base = parts.netloc, urlsplit(self.url).path

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer to a request. Raises Refused."""
        async with aclosing(self.body(path, body)) as parts:
            content = b"".join([part async for part in parts])
        found: dict[str, Any] = json.loads(content)
        return found

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[Arrived]:
        """Yield the events of a stream. Raises Refused, also for an event that is an error."""
        rest = b""
        async with aclosing(self.body(path, body | {"stream": True})) as parts:
            async for part in parts:
                at = time.perf_counter()
                *whole, rest = (rest + part).split(b"\n\n")
                for event in whole:
                    data = next((line[6:] for line in event.split(b"\n") if line.startswith(b"data: ")), b"[DONE]")
                    if data != b"[DONE]":
                        yield Arrived(checked(json.loads(data)), at)

    async def body(self, path: str, body: dict[str, Any] | None) -> AsyncGenerator[bytes, None]:
        """Yield the parts of the body of an answer. Raises Refused, and T2RError if there is no server."""
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port, ssl=self.secure, limit=LARGEST_LINE)
        except OSError as error:
            raise T2RError(f"no server answers at {self.url}: {error.strerror or error}") from error
        try:
            writer.write(self.request(path, body))
            await writer.drain()
            status, headers = await head(reader)
            parts = chunks(reader) if headers.get("transfer-encoding") == "chunked" else plain(reader, headers)
            if status != 200:
                raise refused(status, b"".join([part async for part in parts]))
            async for part in parts:
                yield part
        except (OSError, asyncio.IncompleteReadError) as error:
            raise T2RError(f"the connection to {self.url} was lost") from error
        finally:
            writer.close()

    def request(self, path: str, body: dict[str, Any] | None) -> bytes:
        content = b"" if body is None else json.dumps(body).encode()
        lines = [f"{'GET' if body is None else 'POST'} {self.base}{path} HTTP/1.1", f"host: {self.name}"]
        lines += ["connection: close", f"content-length: {len(content)}"]
        lines += [] if body is None else ["content-type: application/json"]
        lines += [] if self.key is None else [f"authorization: Bearer {self.key}"]
        return "\r\n".join([*lines, "", ""]).encode() + content


async def head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Read the status and the headers of an answer."""
    text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = text.split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    version, _, status = first.partition(" ")
    if not version.startswith("HTTP/1.") or not status[:3].isdigit():
        raise T2RError("the server does not answer in HTTP/1.1")
    return int(status[:3]), headers


async def chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readline()).split(b";")[0], 16):
        part = await reader.readexactly(size + 2)
        yield part[:-2]


async def plain(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    length = headers.get("content-length")
    yield await (reader.read() if length is None else reader.readexactly(int(length)))


def refused(status: int, content: bytes) -> Refused:
    try:
        error = json.loads(content)["error"]
        return Refused(f"the server says: {error['message']}", error.get("code"))
    except (ValueError, KeyError, TypeError):
        return Refused(f"the server has answered with status {status}")


def checked(value: dict[str, Any]) -> dict[str, Any]:
    error = value if value.get("type") == "error" else value.get("error")
    if isinstance(error, dict):
        raise Refused(f"the server says: {error.get('message')}", error.get("code"))
    return value
