"""Files that commands write where the user says.

Such a file replaces only one of its own kind: a state a state, a page a page. A mistake in a command then cannot
destroy the input of the command, a file of a model, or any other file of the user.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from t2r.errors import T2RError
from t2r.storage.files import write_text
from t2r.storage.paths import kind_of, shortened

BEGINNING = 2048
"""Bytes of a file by which its kind is recognized."""


@dataclass(frozen=True)
class Output:
    """A kind of files that commands write."""

    name: str
    """With its article, as in "a state"."""
    recognizes: Callable[[Path], bool]
    """Whether an existing file is of this kind."""

    def check(self, path: str | Path, *, inputs: Iterable[Any] = ()) -> None:
        """Raise T2RError unless the path is free or a file of this kind, and none of these inputs.

        Call it before the work, too, whose result would be lost."""
        kind = kind_of(path)
        if kind in ("folder", "other"):
            what = "folder" if kind == "folder" else "device, a pipe or a socket"
            raise T2RError(f"{shortened(path)} is a {what}: give the name of a file for {self.name}")
        refuse_input(path, inputs)
        if kind == "file" and not self.recognizes(Path(path)):
            raise T2RError(
                f"{shortened(path)} exists and is not {self.name} of t2r, so it is not replaced: choose another name"
            )

    def write(self, path: str | Path, text: str, *, inputs: Iterable[Any] = ()) -> None:
        """Write a text file atomically, in place of one of this kind or of none."""
        self.check(path, inputs=inputs)
        write_text(path, text)


def refuse_input(path: str | Path, inputs: Iterable[Any]) -> None:
    """Raise T2RError if a file that is written is one of the inputs, also by another name."""
    real = os.path.realpath(path)
    for given in inputs:
        if isinstance(given, str | Path) and kind_of(given) == "file" and os.path.realpath(given) == real:
            raise T2RError(f"{shortened(path)} is an input of the command, so it is not replaced: choose another name")


def beginning(path: Path) -> str:
    """Return the beginning of a file. Bytes that are no text are replaced. Raises T2RError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(BEGINNING).decode("utf-8", "replace")
    except OSError as error:
        raise T2RError(f"{shortened(path)} cannot be read: {error.strerror or error}") from error
