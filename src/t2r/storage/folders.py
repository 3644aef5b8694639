"""Atomic writing of folders, and what they may replace."""

from __future__ import annotations

import glob
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from t2r.errors import T2RError
from t2r.storage.locks import locked_folder
from t2r.storage.paths import kind_of
from t2r.storage.reading import read_json

YOUNG = 10.0
"""Age in seconds up to which a partial folder is not taken for a leftover."""


@contextmanager
def whole_folder(out: str, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a new folder that is renamed to `out` if the block succeeds, and removed if it fails.

    Raises T2RError immediately if `out` exists, unless `overwrite` is set. The old model is then removed only when the
    new one replaces it. Without `overwrite`, a folder that was created by another process during the block is kept, and
    T2RError is raised."""
    check_destination(out, overwrite)
    final = Path(os.path.realpath(out))  # if `out` is a link, its target is replaced
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


def of_tokenizers(error: Exception) -> bool:
    """Return whether tokenizers could not write a file. Its exception has no class of its own, only the message."""
    return type(error) is Exception and "(os error " in str(error)


def refuse_replacing(source: Any, out: str | Path) -> None:
    """Raise T2RError if saving to `out` would replace the model in the folder `source`."""
    if not isinstance(source, str | Path) or kind_of(source) != "folder" or not str(out).strip():
        return  # a missing name is refused where the folder is checked
    if Path(os.path.realpath(source)).is_relative_to(os.path.realpath(out)):
        raise T2RError(f"saving to {out} would replace the model in {source}: choose another folder")


def refuse_deleting(files: Iterable[Any], *folders: str | Path) -> None:
    """Raise T2RError if one of these files, given by name or as a glob, is in a folder that is replaced or removed."""
    for name in files:
        if not isinstance(name, str | Path):
            continue
        for path in [name] if kind_of(name) else glob.glob(str(name), recursive=True):
            for folder in folders:
                if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
                    raise T2RError(f"saving to {folder} would delete {path}: choose another folder")


def is_model(folder: Path) -> bool:
    """Return whether a folder has the configuration of a model. Other programs have a config.json, too."""
    try:
        fields = read_json(folder / "config.json")
    except T2RError:
        return False
    return isinstance(fields, dict) and ("model_type" in fields or "architectures" in fields)


def check_named(out: str | Path, what: str = "the output folder") -> None:
    """Raise T2RError if the path of a folder is blank, as an unset variable of a shell is."""
    if not str(out).strip():
        raise T2RError(f"{what} has no name: give its path")


def check_destination(out: str | Path, overwrite: bool) -> None:
    """Raise T2RError unless the path is free, an empty folder, or a saved model that may be overwritten."""
    check_named(out)
    final, kind = Path(out), kind_of(out)
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
    if not is_model(final):
        raise T2RError(f"{final} is not a saved model, so --overwrite does not replace it: remove it first")
