"""How answers are sent: at once or as a stream, while it is watched whether the client is still there."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from t2r.serving.errors import ApiError, internal
from t2r.serving.service import Call, Running, Service

logger = logging.getLogger(__name__)

T = TypeVar("T")

GRACE = 30.0
"""Seconds after its deadline that a client has to take the rest of a stream."""


def service_of(http: Request) -> Service:
    service: Service = http.app.state.service
    return service


def encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        return encoded(content)


def refusal(error: ApiError) -> Json:
    return Json(error.body, error.status, error.headers)


def usage(running: Running) -> dict[str, Any]:
    """Return the numbers of tokens of a completion."""
    prompt, generated = running.prompt_tokens, running.generated
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": running.cached},
    }


class Left(Exception):
    """The client has gone."""


async def while_connected(http: Request, work: Awaitable[T]) -> T:
    """Return the result of some work. Raises Left if the client goes first; the work is then cancelled."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Left
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def on_left(http: Request, left: Exception) -> Response:
    return Response(status_code=499)


async def begun(http: Request, call: Call) -> Running:
    """Begin a call. Raises Left if the client goes while a prompt is read for several choices."""
    begin = service_of(http).begin(call)
    return await (begin if call.n == 1 else while_connected(http, begin))


async def at_once(http: Request, running: Running, work: Awaitable[dict[str, Any]]) -> Response:
    """Answer with the result of some work on a running call, which is cancelled if the client goes."""
    try:
        return Json(await while_connected(http, work))
    finally:
        service_of(http).leave(running)


class Events(StreamingResponse):
    """A stream of events of the server. The call is cancelled if the client goes, at whatever point."""

    def __init__(
        self, service: Service, running: Running, events: AsyncIterator[bytes], failed: Callable[[ApiError], bytes]
    ) -> None:
        self.service, self.running, self.events, self.failed = service, running, events, failed
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(self.checked(), media_type="text/event-stream", headers=headers)

    async def checked(self) -> AsyncIterator[bytes]:
        """Yield the events. An error is one too: the status was sent already."""
        try:
            async for event in self.events:
                yield event
        except ApiError as error:
            yield self.failed(error)
        except Exception:
            logger.exception("a stream has failed")
            yield self.failed(internal())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self.service.until(self.running) + GRACE):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            logger.warning("a client did not take its stream in time")
        finally:
            self.service.leave(self.running)


def data(value: Any) -> bytes:
    return b"data: " + encoded(value) + b"\n\n"


def failed_completion(error: ApiError) -> bytes:
    return data(error.body)


DONE = b"data: [DONE]\n\n"


async def merged(service: Service, running: Running) -> AsyncIterator[tuple[int, Any]]:
    """Yield the pieces of all choices of a call as they come, with the number of the choice."""
    if len(running.jobs) == 1:
        async for piece in service.pieces(running, running.jobs[0]):
            yield 0, piece
        return
    found: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()

    async def follow(number: int) -> None:
        try:
            async for piece in service.pieces(running, running.jobs[number]):
                found.put_nowait((number, piece))
        except Exception as error:
            found.put_nowait((number, error))

    tasks = [asyncio.create_task(follow(number)) for number in range(len(running.jobs))]
    try:
        left = len(tasks)
        while left:
            number, piece = await found.get()
            if isinstance(piece, Exception):
                raise piece
            left -= piece.last
            yield number, piece
    finally:
        for task in tasks:
            task.cancel()
