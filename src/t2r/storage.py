"""Files and folders that are written whole or not at all."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from t2r.errors import T2RError


def kind_of(path: str | Path) -> str | None:
    """`folder`, `file`, or `other` (a device, a pipe, a socket); None where there is nothing.

    Raises T2RError for what can never be a path: links that go in circles, names that are too long."""
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
    """JSON that every reader accepts: NaN and infinities become null."""
    return json.dumps(finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def finite(value: Any) -> Any:
    """The same with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """A temporary path to write to, which becomes `path` when the block ends well: a reader never sees half a file.

    What is written is flushed to the disk first, so that a crash leaves either the old file or the new one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, whole."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Whatever goes wrong inside is about writing: a full disk, in the words of torch, safetensors or Python."""
    try:
        yield
    except T2RError:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        raise T2RError(
            f"{place} cannot be written ({error}): free some space and repeat the command to go on"
        ) from error


@contextmanager
def whole_folder(out: str, *, overwrite: bool = False) -> Iterator[Path]:
    """A new folder to write into, which becomes `out` if the block ends well, and vanishes if it does not.

    A model that is in `out` already is refused at once, unless it is to be overwritten; then it goes only when
    the new one can take its place."""
    final = Path(os.path.realpath(out))  # of a link, what it points to is replaced
    check_destination(final, overwrite)
    folder, old = (final.with_name(f".{final.name}.{os.getpid()}.{word}") for word in ("partial", "old"))
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        yield folder
        try:
            if final.exists():
                final.rename(old)
            folder.rename(final)
        except BaseException:
            if old.exists() and not final.exists():
                old.rename(final)
            raise
    except (OSError, SafetensorError) as error:  # a full disk, no permission
        raise T2RError(f"{out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def check_destination(final: Path, overwrite: bool) -> None:
    """Refuse to make a folder where something is that would be lost: anything but nothing, or an empty folder."""
    kind = kind_of(final)
    if kind == "file":
        raise T2RError(f"{final} is a file: name a folder to make")
    if kind == "other":
        raise T2RError(f"{final} is a device, a pipe or a socket: name a folder to make")
    try:
        if kind is None or not any(final.iterdir()):
            return
    except OSError as error:
        raise T2RError(f"{final} cannot be read: {error.strerror}") from error
    if not overwrite:
        raise T2RError(f"{final} exists already: name another folder, or say --overwrite to replace it")
    if not (final / "config.json").is_file():
        raise T2RError(f"{final} is not a saved model, so --overwrite will not replace it: remove it yourself")
