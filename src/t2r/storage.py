"""Atomic writing of files and folders."""

from __future__ import annotations

import errno
import glob
import json
import logging
import math
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from safetensors import SafetensorError

from t2r.errors import T2RError

try:
    import fcntl
except ImportError:  # not on Windows, where there is no lock
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

YOUNG = 10.0
"""Age in seconds up to which a partial folder is not taken for a leftover."""


def kind_of(path: str | Path) -> str | None:
    """Return `folder`, `file`, or `other` (a device, pipe or socket), or None if the path does not exist.

    Raises T2RError for invalid paths, such as circular links and names that are too long."""
    try:
        mode = os.stat(path).st_mode
    except ValueError as error:  # a null character
        raise T2RError(f"{str(path)!r} is not a path: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise T2RError(f"{shortened(path)} cannot be opened: {error.strerror}") from error
    return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"


def shortened(path: str | Path) -> str:
    text = str(path)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-50:]}"


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


@contextmanager
def whole_folder(out: str, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a new folder that is renamed to `out` if the block succeeds, and removed if it fails.

    Raises T2RError immediately if `out` exists, unless `overwrite` is set. The old model is then removed only when the
    new one replaces it. Without `overwrite`, a folder that was created by another process during the block is kept, and
    T2RError is raised."""
    final = Path(os.path.realpath(out))  # if `out` is a link, its target is replaced
    check_destination(final, overwrite)
    unique = f"{os.getpid()}-{secrets.token_hex(4)}"
    folder, old = (final.with_name(f".{final.name}.{unique}.{word}") for word in ("partial", "old"))
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(final)
        folder.mkdir()
        with locked_folder(folder):  # also while it is renamed
            yield folder
            check_destination(final, overwrite)
            try:
                if overwrite and final.exists():
                    final.rename(old)
                elif final.exists():
                    final.rmdir()  # fails if it is no longer empty
                folder.rename(final)
            except BaseException:
                if old.exists() and not final.exists():
                    old.rename(final)
                raise
    except Exception as error:
        if not isinstance(error, OSError | SafetensorError) and not of_tokenizers(error):
            raise
        raise T2RError(f"{out} cannot be written: {error}") from error  # a full disk, no permission
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(final: Path) -> None:
    """Remove partial folders of processes that were killed while they wrote this folder. A living one holds a lock."""
    for folder in final.parent.glob(f".{glob.escape(final.name)}.*.partial"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < YOUNG:  # it may not be locked yet
                continue
            with locked_folder(folder) as alone:
                if alone:
                    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked_folder(folder: Path) -> Iterator[bool]:
    """Lock a folder. Yields whether it could be locked: not if another process has done so, nor where the system or the
    file system has no such locks."""
    if fcntl is None:
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield lock(descriptor)
    finally:
        os.close(descriptor)


def of_tokenizers(error: Exception) -> bool:
    """Return whether tokenizers could not write a file. Its exception has no class of its own, only the message."""
    return type(error) is Exception and "(os error " in str(error)


def refuse_replacing(source: Any, out: str | Path) -> None:
    """Raise T2RError if saving to `out` would replace the model in the folder `source`."""
    if not isinstance(source, str | Path) or kind_of(source) != "folder":
        return
    if Path(os.path.realpath(source)).is_relative_to(os.path.realpath(out)):
        raise T2RError(f"saving to {out} would replace the model in {source}: choose another folder")


def refuse_deleting(files: Iterable[Any], out: str | Path) -> None:
    """Raise T2RError if saving to `out` would delete one of these files, which are given by name or as a glob."""
    for name in files:
        if not isinstance(name, str | Path):
            continue
        for path in [name] if kind_of(name) else glob.glob(str(name), recursive=True):
            if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(out)):
                raise T2RError(f"saving to {out} would delete {path}: choose another folder")


def check_destination(final: Path, overwrite: bool) -> None:
    """Raise T2RError unless the path is free, an empty folder, or a saved model that may be overwritten."""
    kind = kind_of(final)
    if kind == "file":
        raise T2RError(f"{final} is a file: give the path of a folder to create")
    if kind == "other":
        raise T2RError(f"{final} is a device, a pipe or a socket: give the path of a folder to create")
    try:
        if kind is None or not any(final.iterdir()):
            return
    except OSError as error:
        raise T2RError(f"{final} cannot be read: {error.strerror}") from error
    if not overwrite:
        raise T2RError(f"{final} already exists: choose another folder, or use --overwrite to replace it")
    if not (final / "config.json").is_file():
        raise T2RError(f"{final} is not a saved model, so --overwrite does not replace it: remove it first")


def take_lock(path: Path, *, wait: bool = False) -> IO[bytes] | None:
    """Lock a file, which is created if necessary. Returns None if another process holds the lock, unless `wait` is set.

    The operating system releases the lock when the returned file is closed, or when the process and all child processes
    that inherited the file have ended."""
    while True:
        if fcntl is None:
            return Path(os.devnull).open("ab")
        file = path.open("ab")
        if not lock(file.fileno(), wait):
            file.close()
            if wait:
                raise T2RError(f"{path} cannot be locked: its file system has no locks")
            return None
        with suppress(FileNotFoundError):  # the previous owner may have removed the file
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


# filelock, which transformers installs, locks no folders, and its release unlocks a file also for child processes that
# inherited it.
def lock(descriptor: int, wait: bool = False) -> bool:
    """Lock an open file or folder until its last descriptor is closed, also those of child processes. Returns whether
    it could be locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
