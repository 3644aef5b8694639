"""/v1/chat/completions: conversations of which the client sends everything each time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from t2r.generation.engine.sequences import LogProbability
from t2r.serving import prompts
from t2r.serving.api.answers import DONE, Events, at_once, begun, data, failed_completion, merged, service_of, usage
from t2r.serving.api.fields import MOST_LOGPROBS, Completing, ResponseFormat, Strict, Text
from t2r.serving.errors import ApiError
from t2r.serving.service import Call, Running, Service
from t2r.serving.states import new_id
from t2r.serving.tokens import finite
from t2r.serving.worker import Job

router = APIRouter()


class TextPart(Strict):
    type: Literal["text", "input_text", "output_text"]
    text: Text


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]

    def plain(self) -> dict[str, str]:
        """Return the message as templates read it."""
        role = "system" if self.role == "developer" else self.role
        parts = self.content
        return {"role": role, "content": parts if isinstance(parts, str) else "".join(part.text for part in parts)}


class ChatRequest(Completing):
    messages: Annotated[list[Message], Field(min_length=1, max_length=100_000)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    response_format: ResponseFormat | None = None
    store: Literal[False] | None = None


@router.post("/v1/chat/completions")
async def chat(body: ChatRequest, http: Request) -> Response:
    service = service_of(http)
    model = service.model(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError("top_logprobs requires logprobs: set it to true", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError("give max_tokens or max_completion_tokens, not both", param="max_tokens")
    messages = [message.plain() for message in body.messages]
    service.check_size(model, [message["content"] for message in messages], len(messages))
    prompt = await service.in_text_thread(prompts.of_messages, model, messages)
    field = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
    choosing = body.choosing(
        service.options.max_tokens, getattr(body, field), service.default_tokens(model, len(prompt.tokens)), field
    )
    how: dict[str, Any] = {"n": body.n or 1, "seed": body.seed, "stop": body.stops}
    how["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    with_usage = body.with_usage
    call = Call(model, prompt, choosing, streams=bool(body.stream), keep=(body.n or 1) == 1, **how)
    running = await begun(http, call)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = {"id": new_id("chatcmpl"), "object": kind, "created": int(time.time()), "model": model.name}
    if body.stream:
        return Events(service, running, events(service, running, head, with_usage), failed_completion)
    return await at_once(http, running, whole(service, running, head))


async def whole(service: Service, running: Running, head: dict[str, Any]) -> dict[str, Any]:
    texts = await asyncio.gather(*(service.text_of(running, job) for job in running.jobs))
    choices = []
    for number, (text, job) in enumerate(zip(texts, running.jobs, strict=True)):
        logprobs = None
        if job.logprobs is not None and job.sequence is not None:
            logprobs = described(job, job.generated, job.sequence.logprobs)
        message = {"role": "assistant", "content": text, "refusal": None}
        choices.append({"index": number, "message": message, "finish_reason": job.reason, "logprobs": logprobs})
    if running.call.keep:
        service.keep(running, head["id"], texts[0])
    return {**head, "choices": choices, "usage": usage(running)}


async def events(service: Service, running: Running, head: dict[str, Any], with_usage: bool) -> AsyncIterator[bytes]:
    head |= {"usage": None} if with_usage else {}

    def chunk(number: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": number, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return data({**head, "choices": [choice]})

    text = ""
    for number in range(len(running.jobs)):
        yield chunk(number, {"role": "assistant", "content": ""})
    async for number, piece in merged(service, running):
        job, logprobs = running.jobs[number], None
        text += piece.text
        if job.logprobs is not None and piece.tokens:
            logprobs = described(job, piece.tokens, piece.logprobs)
        if piece.last and running.call.keep:
            service.keep(running, head["id"], text)
        if piece.text or logprobs:
            yield chunk(number, {"content": piece.text}, None, logprobs)
        if piece.last:
            yield chunk(number, {}, job.reason)
    if with_usage:
        yield data({**head, "choices": [], "usage": usage(running)})
    yield DONE


def described(job: Job, tokens: Sequence[int], logprobs: Sequence[LogProbability]) -> dict[str, Any]:
    """Return the probabilities of tokens in the form of this route."""

    words = job.model.words

    def one(token: int, value: float) -> dict[str, Any]:
        return {"token": words.name(token), "logprob": finite(value), "bytes": list(words.bytes_of(token))}

    content = [
        {**one(token, each.chosen), "top_logprobs": [one(*pair) for pair in each.top]}
        for token, each in zip(tokens, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}
