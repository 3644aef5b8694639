"""/v1/states: what was read, as something to make, list, download, upload and delete. These routes are not OpenAI's."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect

from t2r.serving import prompts, transfer
from t2r.serving.api.answers import Json, at_once, service_of
from t2r.serving.api.fields import Name, Strict, Text
from t2r.serving.choosing import Choosing
from t2r.serving.errors import ApiError
from t2r.serving.prompts import Prompt
from t2r.serving.served import ServedModel
from t2r.serving.service import Call, Running, Service
from t2r.serving.states import new_id, remove
from t2r.serving.stored import Stored

router = APIRouter()


class StateRequest(Strict):
    """A document to read."""

    text: Text
    model: Name | None = None
    chat: bool | None = None
    """Whether the document is the beginning of a message of a conversation. None: if the model has a template."""
    previous_response_id: Name | None = None
    """A state after which the document is read."""


@router.post("/v1/states")
async def make(body: StateRequest, http: Request) -> Response:
    service = service_of(http)
    model = service.model(body.model)
    if model.translates:
        raise ApiError(f"{model.name} translates, and has no states", param="model")
    stored = service.stored(model, body.previous_response_id, "previous_response_id")
    service.check_size(model, [body.text])
    prompt = await service.in_text_thread(prompt_of, model, body, stored)
    running = await service.begin(Call(model, prompt, Choosing(1, temperature=0.0)))
    return await at_once(http, running, whole(service, running))


def prompt_of(model: ServedModel, body: StateRequest, stored: Stored | None) -> Prompt:
    chat = model.templated if body.chat is None else body.chat
    if chat and not model.templated:
        raise ApiError(f"{model.name} has no chat template: set chat to false", param="chat", code="no_chat_template")
    return prompts.of_document(model, body.text, chat, stored)


async def whole(service: Service, running: Running) -> dict[str, Any]:
    await service.text_of(running, running.jobs[0])
    stored = service.keep(running, new_id("state"), "", kind="document")
    assert stored is not None
    details = {"cached_tokens": running.cached}
    return stored.described() | {"usage": {"input_tokens": running.prompt_tokens, "input_tokens_details": details}}


@router.get("/v1/states")
async def states(http: Request) -> Response:
    kept = service_of(http).states
    kept.expire()
    found = [stored.described() for stored in reversed(kept.by_id.values())]
    return Json({"object": "list", "data": found, "memory_bytes": kept.in_memory, "disk_bytes": kept.on_disk})


@router.post("/v1/states/content")
async def upload(http: Request) -> Response:
    try:
        stored = await transfer.take_in(service_of(http), http.stream())
    except ClientDisconnect:
        return Response(status_code=499)
    return Json(stored.described())


@router.get("/v1/states/{id}")
async def state(id: str, http: Request) -> Response:
    return Json(service_of(http).states.get(id, "id").described())


@router.get("/v1/states/{id}/content")
async def download(id: str, http: Request) -> Response:
    service = service_of(http)
    path = await transfer.export(service, service.states.get(id, "id"))
    return FileResponse(
        path,
        media_type="application/octet-stream",
        filename=f"{id}.safetensors",
        background=BackgroundTask(remove, path),
    )


@router.delete("/v1/states/{id}")
async def delete(id: str, http: Request) -> Response:
    kept = service_of(http).states
    kept.forget(kept.get(id, "id"))
    return Json({"id": id, "object": "state", "deleted": True})
