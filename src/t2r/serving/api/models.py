"""/v1/models, /tokenize, /health and /metrics: what the server has, and how it does."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from t2r._version import __version__
from t2r.serving import prompts
from t2r.serving.api.answers import Json, service_of
from t2r.serving.api.chat import Message
from t2r.serving.api.fields import Name, Strict, Text
from t2r.serving.errors import ApiError, closing
from t2r.serving.served import ServedModel

router = APIRouter()


def described(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "t2r",
        "t2r": model.facts,
    }


@router.get("/v1/models")
async def models(http: Request) -> Response:
    return Json({"object": "list", "data": [described(model) for model in service_of(http).models.values()]})


@router.get("/v1/models/{name:path}")
async def model(name: str, http: Request) -> Response:
    return Json(described(service_of(http).model(name)))


class TokenizeRequest(Strict):
    """A text, or messages as they are read in a conversation."""

    model: Name | None = None
    text: Text | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, http: Request) -> Response:
    service = service_of(http)
    model = service.model(body.model)
    if (body.text is None) == (body.messages is None):
        raise ApiError("give text or messages", param="text")
    if body.text is not None:
        service.check_size(model, [body.text])
        tokens = await service.in_text_thread(model.encode, body.text, body.add_special_tokens)
    else:
        messages = [message.plain() for message in body.messages or []]
        if not messages:
            raise ApiError("messages is empty", param="messages")
        service.check_size(model, [message["content"] for message in messages], len(messages))
        tokens = (await service.in_text_thread(prompts.of_messages, model, messages)).tokens
    return Json({"model": model.name, "count": len(tokens), "tokens": tokens})


@router.get("/health")
async def health(http: Request) -> Response:
    service = service_of(http)
    if service.closing:
        raise closing()
    load = {name: each._asdict() for name, each in service.worker.load.items()}
    seconds = int(time.time()) - service.started
    return Json({"status": "ok", "version": __version__, "seconds": seconds, "models": load})


@router.get("/metrics")
async def metrics(http: Request) -> Response:
    return Response(service_of(http).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
