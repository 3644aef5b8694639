"""What is checked before a request is read: the key, the host, and the size of the body."""

from __future__ import annotations

import asyncio
import hmac
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from t2r.serving.errors import ApiError, internal
from t2r.serving.metrics import Metrics

logger = logging.getLogger(__name__)

OPEN = ("/health", "/", "/favicon.ico")
OPEN_FOLDER = "/page/"
"""Paths that need no key: the page asks for it."""
LOCAL = {"localhost", "127.0.0.1", "[::1]"}


class Gate:
    """Lets requests through to an application.

    Args:
        app: the application.
        key: the key that clients must send. None: none.
        most: the maximum size of a body, in bytes. Paths in `larger` have their own, and take the body in parts.
        seconds: the time in which a body must arrive.
        local: whether only requests to this machine are allowed. A page of another site whose name leads here cannot
            use the server then.
        metrics: counts requests.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        key: str | None,
        most: int,
        larger: dict[str, int],
        seconds: float,
        local: bool,
        metrics: Metrics,
    ) -> None:
        self.app, self.key, self.most, self.larger, self.seconds = app, key, most, larger, seconds
        self.local, self.metrics = local, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        path: str = scope["path"]
        begun = False

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                route = scope.get("route")
                known = getattr(route, "path", "other")
                self.metrics.requests.labels(known, str(message["status"])).inc()
            await send(message)

        try:
            self.check(path, headers)
            limited = self.limited(path, receive)
            await self.app(scope, limited if path in self.larger else await at_once(limited), counted)
        except ApiError as error:
            if begun:
                raise
            await refuse(error, scope, receive, counted)
        except Exception:
            if begun:
                raise
            logger.exception("a request has failed")
            await refuse(internal(), scope, receive, counted)

    def check(self, path: str, headers: dict[bytes, bytes]) -> None:
        """Raise ApiError if a request may not come through."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self.local and (host if host.endswith("]") else host.rpartition(":")[0] or host) not in LOCAL:
            raise ApiError("this server is for this machine only: use the host 127.0.0.1 or localhost", 403)
        if self.key is not None and path not in OPEN and not path.startswith(OPEN_FOLDER):
            kind, _, given = headers.get(b"authorization", b"").partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self.key.encode()):
                raise ApiError(
                    "a valid key is required: send it as `Authorization: Bearer KEY`",
                    401,
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > self.largest(path):
            raise self.too_large(path)

    def largest(self, path: str) -> int:
        return self.larger.get(path, self.most)

    def too_large(self, path: str) -> ApiError:
        most = self.largest(path)
        return ApiError(f"the request has more than the {most >> 20} MiB that are allowed here", 413, code="too_large")

    def limited(self, path: str, receive: Receive) -> Receive:
        """Return `receive` with limits for the size of the body and the time in which it arrives."""
        read, done = 0, False
        until = asyncio.get_running_loop().time() + self.seconds

        async def checked() -> Message:
            nonlocal read, done
            if done:  # what comes next is that the client goes
                return await receive()
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                raise ApiError("the request did not arrive in time", 408, code="timeout") from None
            read += len(message.get("body", b""))
            done = not message.get("more_body", False)
            if read > self.largest(path):
                raise self.too_large(path)
            return message

        return checked


async def at_once(receive: Receive) -> Receive:
    """Read a whole body, and return a `receive` that has it in one part."""
    parts: list[bytes] = []
    message: Message = {"type": "http.request", "more_body": True}
    while message["type"] == "http.request" and message.get("more_body", False):
        message = await receive()
        parts.append(message.get("body", b""))
    left: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]
    if message["type"] != "http.request":
        left = [message]

    async def replayed() -> Message:
        return left.pop() if left else await receive()

    return replayed


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    from t2r.serving.api.answers import refusal

    await refusal(error)(scope, receive, send)
