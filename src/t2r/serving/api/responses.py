"""/v1/responses: conversations of which the server keeps the state. An answer costs its new tokens only."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from t2r.serving import prompts
from t2r.serving.api.answers import Events, Json, at_once, encoded, service_of
from t2r.serving.api.fields import Name, ResponseFormat, Sampling, Strict, Text
from t2r.serving.errors import ApiError, unknown_state
from t2r.serving.prompts import Prompt
from t2r.serving.served import ServedModel
from t2r.serving.service import Call, Running, Service
from t2r.serving.states import new_id
from t2r.serving.stored import Stored
from t2r.serving.worker import Job

router = APIRouter()


class Part(Strict):
    """A part of a message, also of an answer that the client sends back."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Field(max_length=0)] | None = None


class Item(Strict):
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[Part]
    id: Name | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None

    def plain(self) -> dict[str, str]:
        """Return the message as templates read it."""
        role = "system" if self.role == "developer" else self.role
        parts = self.content
        return {"role": role, "content": parts if isinstance(parts, str) else "".join(part.text for part in parts)}


class TextOptions(Strict):
    format: ResponseFormat | None = None


class ResponseRequest(Sampling):
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=100_000)]
    instructions: Text | None = None
    previous_response_id: Name | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    store: bool | None = None
    metadata: dict[str, str] | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None

    @property
    def texts(self) -> list[str]:
        """The texts of all messages, and the instructions."""
        parts = [self.input] if isinstance(self.input, str) else [item.plain()["content"] for item in self.input]
        return [*parts, self.instructions or ""]


@router.post("/v1/responses")
async def respond(body: ResponseRequest, http: Request) -> Response:
    service = service_of(http)
    model = service.model(body.model)
    stored = service.stored(model, body.previous_response_id, "previous_response_id")
    service.check_size(model, body.texts, len(body.texts) - 1)
    prompt = await service.in_text_thread(prompt_of, model, body, stored)
    before = 0 if prompt.stored is None else prompt.stored.length
    default = service.default_tokens(model, before + len(prompt.tokens))
    limit = service.options.max_tokens
    choosing = body.choosing(limit, body.max_output_tokens, default, "max_output_tokens")
    stream = bool(body.stream)
    call = Call(model, prompt, choosing, seed=body.seed, streams=stream, keep=body.store is not False)
    running = await service.begin(call)
    head = head_of(model, body)
    if stream:
        events = Stream(service, running, head)
        return Events(service, running, events.events(), events.failed)
    return await at_once(http, running, whole(service, running, head))


def prompt_of(model: ServedModel, body: ResponseRequest, stored: Stored | None) -> Prompt:
    """Return what is read: a conversation, or for a model without a chat template a text that goes on."""
    if stored is not None and body.instructions is not None:
        raise ApiError(
            "instructions are read before a conversation, which cannot be changed afterwards: "
            "send a message with the role `developer` instead",
            param="instructions",
        )
    if not model.templated and not model.translates:
        if not isinstance(body.input, str) or body.instructions is not None:
            raise ApiError(
                f"{model.name} has no chat template: input must be a text, which goes on, without instructions",
                param="input",
                code="no_chat_template",
            )
        return prompts.of_text(model, body.input, stored)
    if isinstance(body.input, str):
        messages = [{"role": "user", "content": body.input}]
    else:
        messages = [item.plain() for item in body.input]
    if body.instructions is not None:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    return prompts.of_messages(model, messages, stored)


def head_of(model: ServedModel, body: ResponseRequest) -> dict[str, Any]:
    """Return a response that has not begun."""
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model.name,
        "output": [],
        "parallel_tool_calls": False,
        "previous_response_id": body.previous_response_id,
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "none",
        "tools": [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def part_of(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def item_of(id: str, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [part_of(text)]
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}


def usage(running: Running) -> dict[str, Any]:
    """Return the numbers of tokens of a response, also of one that runs."""
    read, generated = running.prompt_tokens, running.generated
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": running.cached, "cache_write_tokens": 0},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + generated,
    }


def finished(service: Service, running: Running, head: dict[str, Any], item: str, text: str) -> dict[str, Any]:
    """Return a response that has ended, and keep its state."""
    job = running.jobs[0]
    status = "incomplete" if job.reason == "length" else "completed"
    details = {"reason": "max_output_tokens"} if job.reason == "length" else None
    told = {
        "status": status,
        "incomplete_details": details,
        "output": [item_of(item, text, status)],
        "usage": usage(running),
    }
    response = head | told
    if running.call.keep:
        service.keep(running, head["id"], text, response)
    return response


async def whole(service: Service, running: Running, head: dict[str, Any]) -> dict[str, Any]:
    text = await service.text_of(running, running.jobs[0])
    return finished(service, running, head, new_id("msg"), text)


def event(kind: str, number: int, **fields: Any) -> bytes:
    value = {"type": kind, "sequence_number": number, **fields}
    return f"event: {kind}\n".encode() + b"data: " + encoded(value) + b"\n\n"


class Stream:
    """The events of one response."""

    def __init__(self, service: Service, running: Running, head: dict[str, Any]) -> None:
        self.service, self.running, self.head = service, running, head
        self.number = -1
        self.item = new_id("msg")

    def event(self, kind: str, **fields: Any) -> bytes:
        self.number += 1
        return event(f"response.{kind}", self.number, **fields)

    def failed(self, error: ApiError) -> bytes:
        self.number += 1
        return event("error", self.number, code=error.code or "error", message=error.message, param=error.param)

    async def events(self) -> AsyncIterator[bytes]:
        job: Job = self.running.jobs[0]
        place: dict[str, Any] = {"item_id": self.item, "output_index": 0, "content_index": 0}
        yield self.event("created", response=self.head)
        yield self.event("in_progress", response=self.head | {"usage": usage(self.running)})
        yield self.event("output_item.added", output_index=0, item=item_of(self.item, None, "in_progress"))
        yield self.event("content_part.added", **place, part=part_of(""))
        text = ""
        async for piece in self.service.pieces(self.running, job):
            if piece.text:
                text += piece.text
                yield self.event("output_text.delta", **place, delta=piece.text, logprobs=[])
        response = finished(self.service, self.running, self.head, self.item, text)
        yield self.event("output_text.done", **place, text=text, logprobs=[])
        yield self.event("content_part.done", **place, part=part_of(text))
        yield self.event("output_item.done", output_index=0, item=response["output"][0])
        yield self.event(response["status"], response=response)


def answered(service: Service, id: str) -> Stored:
    """Return the state after a response. Raises ApiError if there is none, or if it is that of something else."""
    stored = service.states.get(id, "id")
    if stored.told is None:
        raise unknown_state(id, "id")
    return stored


@router.get("/v1/responses/{id}")
async def retrieve(id: str, http: Request) -> Response:
    return Json(answered(service_of(http), id).told)


@router.delete("/v1/responses/{id}")
async def delete(id: str, http: Request) -> Response:
    service = service_of(http)
    service.states.forget(answered(service, id))
    return Json({"id": id, "object": "response", "deleted": True})
