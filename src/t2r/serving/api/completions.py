"""/v1/completions: texts that go on."""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from t2r.generation.engine.sequences import LogProbability
from t2r.serving import prompts
from t2r.serving.api.answers import DONE, Events, at_once, begun, data, failed_completion, merged, service_of, usage
from t2r.serving.api.fields import MOST_LOGPROBS, Completing, Name, Text, Token
from t2r.serving.prompts import Prompt
from t2r.serving.served import ServedModel
from t2r.serving.service import Call, Running, Service
from t2r.serving.states import new_id
from t2r.serving.stored import Stored
from t2r.serving.tokens import finite
from t2r.serving.worker import Job

router = APIRouter()

DEFAULT_TOKENS = 16
"""OpenAI's."""


class CompletionRequest(Completing):
    prompt: Text | list[Token]
    max_tokens: int | None = Field(None, ge=1)
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    state: Name | None = None
    """The id of a state after which the prompt is read. It is not OpenAI's."""
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None


@router.post("/v1/completions")
async def complete(body: CompletionRequest, http: Request) -> Response:
    service = service_of(http)
    model = service.model(body.model)
    stored = service.stored(model, body.state, "state")
    if isinstance(body.prompt, str):
        service.check_size(model, [body.prompt])
    else:
        service.check_size(model, [], len(body.prompt))
    prompt = await service.in_text_thread(prompt_of, model, body, stored)
    limit, with_usage = service.options.max_tokens, body.with_usage
    choosing = body.choosing(limit, body.max_tokens, limit if model.translates else DEFAULT_TOKENS, "max_tokens")
    how: dict[str, Any] = {"n": body.n or 1, "seed": body.seed, "stop": body.stops, "logprobs": body.logprobs}
    call = Call(model, prompt, choosing, streams=bool(body.stream), keep=(body.n or 1) == 1, **how)
    running = await begun(http, call)
    head = {"id": new_id("cmpl"), "object": "text_completion", "created": int(time.time()), "model": model.name}
    if body.stream:
        return Events(service, running, events(service, running, head, with_usage), failed_completion)
    return await at_once(http, running, whole(service, running, head))


def prompt_of(model: ServedModel, body: CompletionRequest, stored: Stored | None) -> Prompt:
    if isinstance(body.prompt, str):
        return prompts.of_text(model, body.prompt, stored)
    return prompts.checked(model, Prompt([*prompts.unread(stored), *body.prompt], stored))


async def whole(service: Service, running: Running, head: dict[str, Any]) -> dict[str, Any]:
    texts = await asyncio.gather(*(service.text_of(running, job) for job in running.jobs))
    choices = []
    for number, (text, job) in enumerate(zip(texts, running.jobs, strict=True)):
        logprobs = None
        if job.logprobs is not None and job.sequence is not None:
            logprobs = described(job, job.generated, job.sequence.logprobs, 0)
        choices.append({"index": number, "text": text, "finish_reason": job.reason, "logprobs": logprobs})
    if running.call.keep:
        service.keep(running, head["id"], texts[0])
    return {**head, "choices": choices, "usage": usage(running)}


async def events(service: Service, running: Running, head: dict[str, Any], with_usage: bool) -> AsyncIterator[bytes]:
    text, places = "", [0] * len(running.jobs)
    head |= {"usage": None} if with_usage else {}
    async for number, piece in merged(service, running):
        job, logprobs = running.jobs[number], None
        text += piece.text
        if job.logprobs is not None and piece.tokens:
            logprobs = described(job, piece.tokens, piece.logprobs, places[number])
        places[number] += len(piece.text)
        if piece.last and running.call.keep:
            service.keep(running, head["id"], text)
        if piece.text or piece.last or logprobs:
            reason = job.reason if piece.last else None
            choice = {"index": number, "text": piece.text, "finish_reason": reason, "logprobs": logprobs}
            yield data({**head, "choices": [choice]})
    if with_usage:
        yield data({**head, "choices": [], "usage": usage(running)})
    yield DONE


def described(job: Job, tokens: Sequence[int], logprobs: Sequence[LogProbability], start: int) -> dict[str, Any]:
    """Return the probabilities of tokens in the form of this route. Places in the text are those of whole tokens."""
    words, reader = job.model.words, codecs.getincrementaldecoder("utf-8")("replace")
    places = [start]
    for token in tokens[:-1]:
        places.append(places[-1] + len(reader.decode(words.bytes_of(token))))
    return {
        "tokens": [words.name(token) for token in tokens],
        "token_logprobs": [finite(each.chosen) for each in logprobs],
        "top_logprobs": [words.top(each) for each in logprobs] if job.logprobs else None,
        "text_offset": places,
    }
