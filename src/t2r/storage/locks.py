"""Locks of files and folders between processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from t2r.errors import T2RError

try:
    import fcntl
except ImportError:  # not on Windows, where there is no lock
    fcntl = None  # type: ignore[assignment]


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
