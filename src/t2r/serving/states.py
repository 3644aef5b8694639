"""The states that the server keeps, within a budget of memory and of disk.

With a folder, each state is written soon after it was made, so that a restart finds it, and the least recently used
ones leave the memory. Without one, or where it cannot be written, they are forgotten. Methods are called in the event
loop; files are read and written by a thread, one after the other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from t2r.errors import T2RError
from t2r.options.serving import MIB
from t2r.serving import state_files
from t2r.serving.errors import ApiError, unknown_state
from t2r.serving.prefixes import Prefixes
from t2r.serving.served import ServedModel
from t2r.serving.stored import Stored
from t2r.storage import take_lock

logger = logging.getLogger(__name__)

BACKLOG = 256 * MIB
"""If states are made faster than they are written, they may take this much more memory than the budget, or twice the
budget if that is more."""
TOGETHER = 64
"""The number of characters of a fingerprint in the name of a folder."""


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


class States:
    """Keeps states.

    Args:
        models: the models whose states they are.
        folder: the folder in which they are written. None: they are only in memory.
        memory: bytes that states in memory may take.
        disk: bytes that files may take.
        seconds: time after its last use after which a state is deleted.
    """

    def __init__(
        self, models: Sequence[ServedModel], folder: Path | None, memory: int, disk: int, seconds: float
    ) -> None:
        self.models = {model.fingerprint: model for model in models}
        self.folder, self.memory, self.disk, self.seconds = folder, memory, disk, seconds
        self.by_id: dict[str, Stored] = {}
        """Least recently used first."""
        self.prefixes = Prefixes()
        self.in_memory = self.on_disk = 0
        """Bytes."""
        self.dropped = self.failures = 0
        """States that were forgotten for lack of space, and failed reads and writes."""
        self.said = 0.0
        self.thread = ThreadPoolExecutor(1, "t2r-states")
        self.lock: IO[bytes] | None = None
        """Held by the server that uses the folder."""
        if folder is not None:
            self.find()

    def __len__(self) -> int:
        return len(self.by_id)

    # --- Finding --------------------------------------------------------------------------------------------

    def find(self) -> None:
        """Find the states of these models that are in the folder. Raises T2RError if it cannot be used."""
        assert self.folder is not None
        found = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = take_lock(self.folder / "lock")
            if self.lock is None:
                raise T2RError(f"another server keeps its states in {self.folder}: choose another folder")
            for model in self.models.values():
                place = self.place(model.fingerprint)
                place.mkdir(parents=True, exist_ok=True)
                for leftover in place.glob(".*.tmp"):  # of a process that was killed while it wrote
                    remove(leftover)
                found += [(path, model) for path in sorted(place.glob("*.safetensors")) if path.is_file()]
        except OSError as error:
            raise T2RError(f"states cannot be kept in {self.folder}: {error.strerror or error}") from error
        for path, model in sorted(found, key=lambda pair: pair[0].stat().st_mtime):
            try:
                stored = state_files.read_about(path)
                if stored.fingerprint != model.fingerprint or path.stem != stored.id:
                    raise T2RError(f"{path.name} is the state of another model, or was renamed")
                state_files.check_tokens(stored, model.vocabulary)
            except T2RError as error:
                logger.warning("a state is left out: %s", error)
                self.failures += 1
                continue
            stored.model, stored.file = model.name, path
            stored.file_bytes, stored.used = path.stat().st_size, path.stat().st_mtime
            self.on_disk += stored.file_bytes
            self.insert(stored)
        self.make_room()

    def place(self, fingerprint: str) -> Path:
        assert self.folder is not None
        return self.folder / fingerprint[:TOGETHER]

    def get(self, id: str, param: str | None = None) -> Stored:
        """Return a state by its id. Raises ApiError if there is none."""
        self.expire()
        stored = self.by_id.get(id)
        if stored is None:
            raise unknown_state(id, param)
        return stored

    def longest(self, model: ServedModel, tokens: Sequence[int]) -> Stored | None:
        """Return the state that has read the most of these tokens, but not all of them."""
        self.expire()
        id = self.prefixes.longest(model.fingerprint, tokens)
        return None if id is None else self.by_id[id]

    async def load(self, stored: Stored) -> Any:
        """Return the cache of a state, from memory or disk. Raises ApiError if its file is damaged."""
        if stored.removed:  # since it was found
            raise unknown_state(stored.id)
        self.use(stored)
        if stored.cache is not None:
            return stored.cache
        model, file = self.models[stored.fingerprint], stored.file
        assert file is not None
        loop = asyncio.get_running_loop()
        try:
            cache = await loop.run_in_executor(self.thread, state_files.load, file, model.model, stored)
        except (T2RError, OSError) as error:
            self.failures += 1
            logger.warning("a state cannot be read: %s", error)
            self.forget(stored)
            why = "its file is damaged, or was removed"
            raise ApiError(f"the state {stored.id} cannot be read: {why}", 404, code="damaged") from error
        if stored.cache is None and not stored.removed:
            stored.cache = cache
            self.in_memory += stored.nbytes
            self.make_room()
        return cache

    # --- Changing -------------------------------------------------------------------------------------------

    def add(self, stored: Stored) -> None:
        """Keep a state that is in memory."""
        self.in_memory += stored.nbytes
        self.insert(stored)
        if self.folder is not None:
            self.write(stored)
        self.expire()
        self.make_room()

    def insert(self, stored: Stored) -> None:
        self.by_id[stored.id] = stored
        self.prefixes.add(stored.fingerprint, stored.found_by, stored.id)

    def use(self, stored: Stored) -> None:
        """Note that a state is used."""
        stored.used = time.time()
        if stored.id in self.by_id:
            self.by_id[stored.id] = self.by_id.pop(stored.id)

    def forget(self, stored: Stored) -> None:
        """Delete a state, also its file."""
        if stored.removed:
            return
        stored.removed = True
        del self.by_id[stored.id]
        self.prefixes.remove(stored.fingerprint, stored.found_by, stored.id)
        self.in_memory -= stored.nbytes
        stored.cache = None
        if stored.file is not None:
            self.on_disk -= stored.file_bytes
            self.thread.submit(remove, stored.file)

    def expire(self) -> None:
        """Delete the states that were not used for a long time."""
        limit = time.time() - self.seconds
        while self.by_id and (oldest := next(iter(self.by_id.values()))).used < limit:
            self.forget(oldest)

    def make_room(self) -> None:
        """Keep the budgets: the least recently used states leave the memory, and then the disk."""
        for stored in list(self.by_id.values()) if self.in_memory > self.memory else ():
            if self.in_memory <= self.memory:
                break
            if stored.cache is None:
                continue
            if stored.file is not None:
                self.in_memory -= stored.nbytes
                stored.cache = None
            elif not stored.writing or self.in_memory > self.memory + max(self.memory, BACKLOG):
                self.dropped += 1
                self.forget(stored)
        for stored in list(self.by_id.values()) if self.on_disk > self.disk else ():
            if self.on_disk <= self.disk:
                break
            if stored.file is not None:
                self.dropped += 1
                self.forget(stored)

    # --- Files ----------------------------------------------------------------------------------------------

    def write(self, stored: Stored) -> None:
        """Write a state to disk, later. What fails stays in memory only."""
        loop = asyncio.get_running_loop()
        path = self.place(stored.fingerprint) / f"{stored.id}.safetensors"
        stored.writing = True
        writing = loop.run_in_executor(self.thread, written, path, stored)
        writing.add_done_callback(lambda done: self.note_written(stored, path, done))

    def note_written(self, stored: Stored, path: Path, done: asyncio.Future[int]) -> None:
        stored.writing = False
        if done.cancelled() or (stored.removed and done.exception() is not None):
            return
        if (error := done.exception()) is not None:
            self.failures += 1
            if time.monotonic() - self.said > 60 or not self.said:
                self.said = time.monotonic()
                logger.warning("states cannot be written to %s, and stay in memory: %s", self.folder, error)
        elif stored.removed:
            self.thread.submit(remove, path)
        else:
            stored.file, stored.file_bytes = path, done.result()
            self.on_disk += stored.file_bytes
        self.make_room()

    async def close(self) -> None:
        """Wait until everything is written, and store when states were used."""
        loop = asyncio.get_running_loop()
        used = [(stored.file, stored.used) for stored in self.by_id.values() if stored.file is not None]
        await loop.run_in_executor(self.thread, note_use, used)
        self.thread.shutdown()
        if self.lock is not None:
            self.lock.close()


def written(path: Path, stored: Stored) -> int:
    if stored.removed or stored.cache is None:
        raise T2RError("it was deleted before it was written")
    return state_files.write(path, stored)


def remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


def note_use(used: Sequence[tuple[Path, float]]) -> None:
    for path, when in used:
        with suppress(OSError):
            os.utime(path, (when, when))
