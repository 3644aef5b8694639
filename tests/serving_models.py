"""Tiny models for tests of the server, and a server in this process, without a network or with a port."""

import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from typing import Any

import httpx
import uvicorn

from engines import swapped, words
from families import tiny
from t2r.options.serving import ServeOptions
from t2r.serving.app import make_app
from t2r.serving.served import ServedModel
from t2r.serving.service import Service

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}~{{ m.content }}|{% endfor %}{% if add_generation_prompt %}a~{% endif %}"
)
STOP = 95
"""A token that ends answers. It has no text."""


@cache
def model(case: str = "llama", stop: int | None = None) -> Any:
    made = swapped(case)
    made.generation_config.eos_token_id = stop
    return made


@cache
def teacher() -> Any:
    made = tiny("llama").eval()
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = None, 1
    return made


def tokenizer() -> Any:
    made = words()
    made.chat_template = TEMPLATE
    return made


def served(case: str = "llama", stop: int | None = None, name: str = "rnn", rows: int | None = None) -> ServedModel:
    return ServedModel(name, model(case, stop), tokenizer(), rows)


@asynccontextmanager
async def running(
    *models: ServedModel, key: str | None = None, **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Service]]:
    """A server of these models, and a client of it."""
    service = Service(models, ServeOptions(**options))
    app = make_app(service, key)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=120) as client:
            yield client, service


@contextmanager
def listening(*models: ServedModel, key: str | None = None, **options: Any) -> Iterator[tuple[str, Service]]:
    """A server of these models on a port of this machine. Yields its address and its service."""
    service = Service(models, ServeOptions(**options))
    app = make_app(service, key)
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="on", log_config=None, ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until = time.monotonic() + 60
        while not server.started:
            assert thread.is_alive()
            assert time.monotonic() < until
            time.sleep(0.02)
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}/", service
    finally:
        server.should_exit = True
        thread.join(60)
