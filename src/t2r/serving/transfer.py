"""States that leave the server as files, and files that become states."""

from __future__ import annotations

import asyncio
import copy
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from t2r.errors import T2RError
from t2r.serving import state_files
from t2r.serving.errors import ApiError
from t2r.serving.served import ServedModel
from t2r.serving.service import Service
from t2r.serving.states import new_id, remove
from t2r.serving.stored import Stored

T = TypeVar("T")


async def export(service: Service, stored: Stored) -> Path:
    """Write a state to a temporary file that `t2r generate --load-state` reads too. The caller removes it."""
    cache = await service.states.load(stored)
    model = service.states.models[stored.fingerprint]
    whole = copy.copy(stored)
    whole.cache = cache
    if stored.unread:
        await asyncio.wrap_future(service.worker.call(lambda: read_rest(model, whole)))
    with tempfile.NamedTemporaryFile(suffix=".safetensors", delete=False) as file:
        path = Path(file.name)
    try:
        await in_thread(service, state_files.write, path, whole)
    except (T2RError, OSError) as error:
        remove(path)
        raise ApiError(f"the state cannot be written to a temporary file: {error}", 507, code="disk_full") from error
    return path


@torch.no_grad()
def read_rest(model: ServedModel, stored: Stored) -> None:
    """Read the tokens of a state that were not read. Its cache becomes another one."""
    stored.cache = stored.cache.fork()
    ids = torch.tensor([stored.unread], device=model.model.device)
    model.model(input_ids=ids, past_key_values=stored.cache, use_cache=True)
    if stored.tokens is not None:
        stored.tokens = [*stored.tokens, *stored.unread]
    stored.length, stored.unread = stored.length + len(stored.unread), []


async def take_in(service: Service, body: AsyncIterator[bytes]) -> Stored:
    """Make a state of a file. Raises ApiError if it is not one, is damaged, or belongs to another model."""
    with tempfile.NamedTemporaryFile(suffix=".safetensors", delete=False) as file:
        path = Path(file.name)
    try:
        try:
            with path.open("wb") as out:
                async for part in body:
                    await in_thread(service, out.write, part)
        except OSError as error:
            raise ApiError(f"the upload cannot be stored: {error.strerror}", 507, code="disk_full") from error
        try:
            stored = await in_thread(service, opened, service, path)
        except T2RError as error:
            text = str(error).replace(str(path), "the file").replace(path.name, "the file")
            raise ApiError(text, code="invalid_state") from error
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    service.states.add(stored)
    return stored


def opened(service: Service, path: Path) -> Stored:
    stored = state_files.read_about(path)
    model = service.states.models.get(stored.fingerprint)
    if model is None:
        known = ", ".join(each.name for each in service.states.models.values()) or "none"
        raise T2RError(f"the file is the state of another model (or of the same with other weights); here is {known}")
    if stored.length == 0:
        raise T2RError("the file is an empty state")
    state_files.check_tokens(stored, model.vocabulary)
    stored.cache = state_files.load(path, model.model, stored)
    fresh = Stored(new_id("state"), model.name, "upload", model.fingerprint, stored.length, stored.tokens)
    fresh.unread, fresh.chat, fresh.cache, fresh.own = stored.unread, stored.chat, stored.cache, False
    if fresh.chat is not None and fresh.chat["tokens"] != stored.length + len(stored.unread):
        fresh.chat = None  # more was read after the conversation
    return fresh


async def in_thread(service: Service, function: Callable[..., T], *args: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(service.states.thread, function, *args)
