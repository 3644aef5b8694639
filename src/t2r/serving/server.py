"""The process: it loads the models, listens, and ends in order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from t2r.errors import T2RError
from t2r.hub import load, need_tokenizer
from t2r.options import check
from t2r.options.serving import ServeOptions
from t2r.serving.api.answers import encoded
from t2r.serving.app import make_app
from t2r.serving.errors import ApiError
from t2r.serving.served import ServedModel, name_of
from t2r.serving.service import Service

logger = logging.getLogger(__name__)

FIRST_REQUEST = 30.0
"""Seconds in which the head of a request must arrive after a connection was made."""
KEY = "T2R_API_KEY"


class Protocol(H11Protocol):
    """HTTP/1.1, whose own errors have the form of the others. A connection without a request is closed."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.silence = self.loop.call_later(FIRST_REQUEST, self.close_silent)

    def close_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.silence.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        error = ApiError("this is not a request of HTTP/1.1", code="invalid_http")
        body = encoded(error.body)
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


class Server(uvicorn.Server):
    """Refuses what waits when it is asked to end, and finishes what runs. Asked again, it ends at once."""

    def __init__(self, config: uvicorn.Config, service: Service, ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self.service, self.ready = service, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self.servers:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.service.refuse_new()


def load_models(
    model: str, teacher: str | None, options: ServeOptions, *, dtype: str, device: str, **hub: Any
) -> list[ServedModel]:
    """Load a model, and its teacher beside it. Raises T2RError if one cannot be loaded or served."""
    served: list[ServedModel] = []
    for source in [model] if teacher is None else [model, teacher]:
        name = name_of(source)
        if any(name == other.name for other in served):
            name += "-teacher"
        loaded = load(source, dtype=dtype, device=device, **hub)
        served.append(ServedModel(name, loaded, need_tokenizer(source, **hub), options.rows))
    return served


def serve(models: list[ServedModel], options: ServeOptions, ready: Callable[[str], None]) -> None:
    """Serve models until the process is asked to end. `ready` is called with the address.

    Raises T2RError if an option is not allowed, or the address or the folder of states cannot be used."""
    check(ServeOptions, vars(options))
    key = os.environ.get(KEY) if options.api_key is None else options.api_key
    if key is not None:
        key = key.strip()  # clients cannot send spaces at its ends
        if not key or not key.isascii() or not key.isprintable():
            raise T2RError(f"the key ({'--api-key' if options.api_key is not None else KEY}) must be printable ASCII")
    service = Service(models, options)
    app = make_app(service, key)
    listening = bound(options.host, options.port)
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
    )
    server = Server(config, service, ready)
    # uvicorn raises the signal again when everything has ended: that is then no error.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        service.find_states()  # uvicorn would log an error of the user with its traceback
        asyncio.run(server.serve([listening]))
    finally:
        signal.signal(signal.SIGTERM, before)
        listening.close()
    if not server.started:
        raise T2RError("the server could not start: its log has the reason")


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises T2RError if the address cannot be used."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise T2RError(f"{host} is not an address to listen on: {error}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise T2RError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port (0 for a free one)"
        ) from error
    return listening
