"""Atomic and resumable writing of files."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from safetensors import SafetensorError

from t2r.errors import T2RError
from t2r.storage.locks import take_lock

logger = logging.getLogger(__name__)


def json_text(value: Any, indent: int | None = None) -> str:
    """Serialize to standard JSON. NaN and infinities become null."""
    return json.dumps(finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not support, by None."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `path` if the block succeeds, so that readers never see a partial file.

    The data is flushed to disk before the rename: after a crash, the file is either the old or the new one."""
    path = Path(path)
    # Process numbers are not unique in a folder that machines share.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


class Resumed(NamedTuple):
    """A file that is written in parts."""

    file: IO[str]
    """Open for appending."""
    done: int
    """The number of parts that it has already."""


@contextmanager
def resumable_file(path: Path, lines: int = 1) -> Iterator[Resumed | None]:
    """Yield a text file to append to, which is renamed to `path` if the block succeeds; None if `path` exists.

    If the block fails, the file stays as a `.partial` file, from which the next call resumes. It consists of parts of
    `lines` lines; an incomplete last part is removed. Only one process writes: another one waits until the first has
    finished, and then gets None, or has failed, and then resumes."""
    if path.exists():
        yield None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.with_suffix(".lock")
    held = take_lock(name)
    if held is None:
        logger.warning("waiting for another process, which is writing %s", path)
        held = take_lock(name, wait=True)
    assert held is not None
    with held:
        try:
            if path.exists():  # written by the process that held the lock
                yield None
                return
            partial = path.with_suffix(".partial")
            done = complete_parts(partial, lines)
            with partial.open("a", encoding="utf-8", newline="\n") as file:
                yield Resumed(file, done)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            name.unlink(missing_ok=True)


def complete_parts(partial: Path, lines: int) -> int:
    """Return the number of complete parts of `lines` lines in a file. What follows them is removed."""
    if not partial.exists():
        return 0
    count = size = end = 0
    with partial.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            count, size = count + 1, size + len(line)
            if count % lines == 0:
                end = size
        file.truncate(end)
    return count // lines


@contextmanager
def writing(place: Path, *, then: str = "repeat the command to resume") -> Iterator[None]:
    """Convert write errors of torch, safetensors and Python, such as a full disk, to T2RError.

    `then` is what to do when there is space again."""
    try:
        yield
    except T2RError:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        # Errors of torch and safetensors have no number: a full disk is the most likely cause.
        if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise T2RError(f"{place} cannot be written: {error.strerror or error}") from error
        raise T2RError(f"{place} cannot be written ({error}): free some disk space and {then}") from error
