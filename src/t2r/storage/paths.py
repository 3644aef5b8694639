"""What a path is."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from t2r.errors import T2RError


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
