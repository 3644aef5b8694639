"""The application: routes, checks, and errors in one form."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from t2r._version import __version__
from t2r.errors import T2RError
from t2r.options.serving import MIB
from t2r.serving.api import chat, completions, models, page, responses, states
from t2r.serving.api.answers import Json, Left, on_left, refusal
from t2r.serving.errors import ApiError
from t2r.serving.gate import Gate
from t2r.serving.service import Service

ROUTERS = tuple(part.router for part in (models, completions, chat, responses, states, page))
ARRIVAL = 60.0
"""Seconds in which a request must arrive."""


def make_app(service: Service, key: str | None = None) -> FastAPI:
    """Return the application of a service. Its lifespan starts and closes the service."""
    options = service.options

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(title="t2r", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(Left, on_left)
    app.add_exception_handler(T2RError, on_mistake)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    local = options.host in ("127.0.0.1", "localhost", "::1")
    larger = {"/v1/states/content": max(options.max_body, options.state_memory) * MIB}
    gate: dict[str, Any] = {"key": key, "most": options.max_body * MIB, "larger": larger, "seconds": ARRIVAL}
    app.add_middleware(Gate, local=local, metrics=service.metrics, **gate)
    if options.cors:  # outermost: a browser asks for permission without a key
        app.add_middleware(
            CORSMiddleware, allow_origins=options.cors, allow_methods=["*"], allow_headers=["*"], max_age=600
        )
    return app


async def on_api_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return refusal(error)


async def on_mistake(http: Request, error: Exception) -> Response:
    return refusal(ApiError(str(error)))


async def on_http_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = http.url.path[:200]
    if error.status_code == 400:  # of FastAPI, if the body cannot be parsed
        return refusal(no_json())
    told = {404: f"there is nothing at {path}", 405: f"{http.method} is not possible at {path}"}
    message = told.get(error.status_code, str(error.detail))
    return Json(ApiError(message, error.status_code).body, error.status_code, dict(error.headers or {}))


async def on_invalid(http: Request, error: Exception) -> Response:
    """Tell the first thing that is wrong with the fields of a request."""
    assert isinstance(error, RequestValidationError)
    return refusal(explained(first(error.errors())))


def no_json() -> ApiError:
    return ApiError("the body must be a JSON object, sent as application/json", code="invalid_json")


TYPES = {"str", "int", "float", "bool", "dict", "list"}


def first(errors: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the first error. Of a field that is a text or a list, and is a list, it is what is wrong with the list."""
    wrong = errors[0]
    others = [each for each in errors[1:] if each["loc"][:2] == wrong["loc"][:2] and each["type"] != "list_type"]
    return others[0] if wrong["type"] == "string_type" and others else wrong


def explained(wrong: dict[str, Any]) -> ApiError:
    """Return what is wrong with a field."""
    kind: str = wrong["type"]
    place = [str(part) for part in wrong["loc"] if part != "body"]
    if kind != "extra_forbidden":  # without the names of types, of which there may be several
        place = [part for part in place if part not in TYPES and part.replace("_", "").isalnum()]
    field = ".".join(place)[:200]
    if kind == "extra_forbidden":
        return ApiError(f"the field {field!r} is not supported", param=field, code="unsupported_field")
    if kind == "json_invalid" or (not field and kind != "extra_forbidden"):
        return no_json()
    if kind == "missing":
        return ApiError(f"the field {field!r} is missing", param=field, code="missing_field")
    reason = wrong["msg"][:1].lower() + wrong["msg"][1:300]
    if kind == "literal_error":
        only = wrong["ctx"]["expected"]
        return ApiError(f"the field {field!r} supports only {only}", param=field, code="unsupported_value")
    return ApiError(f"the field {field!r} is not valid: {reason}", param=field or None, code="invalid_value")
