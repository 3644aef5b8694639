"""A state that the server keeps: immutable, named by an id, with the tokens that were read."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from t2r.generation.turns import Transcript


@dataclass(eq=False)
class Stored:
    """A state, and what is known about it. `cache` is None while it is only on disk."""

    id: str
    model: str
    """The name of its model."""
    kind: str
    """How it was made: `response`, `document` or `upload`."""
    fingerprint: str
    """That of its model."""
    length: int
    """Number of tokens that were read."""
    tokens: Sequence[int] | None
    """The tokens that were read. None: they are not known."""
    unread: list[int] = field(default_factory=list)
    """Tokens that belong to it and were not read: the last one of an answer."""
    chat: dict[str, Any] | None = None
    """What was said (`Transcript`), with the unread tokens."""
    told: dict[str, Any] | None = None
    """The response that the client got."""
    created: int = field(default_factory=lambda: int(time.time()))
    own: bool = True
    """Whether this server has read all of it. What was uploaded, and what follows it, is found by its id only: its
    tokens are those that the client says."""
    digest: str | None = None
    """That of its file, once it is written."""
    cache: Any = None
    file: Path | None = None
    """Its file, once it is written."""
    file_bytes: int = 0
    used: float = field(default_factory=time.time)
    """When it was last used."""
    writing: bool = False
    unwritable: bool = False
    removed: bool = False

    def __post_init__(self) -> None:
        if self.tokens is not None:
            self.tokens = array("i", self.tokens)  # of 4 bytes each

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in memory besides its description."""
        return 0 if self.cache is None else int(self.cache.nbytes)

    @property
    def found_by(self) -> Sequence[int]:
        """The tokens by which requests without an id find it."""
        return self.tokens if self.own and self.tokens is not None else ()

    @property
    def transcript(self) -> Transcript | None:
        """What was said before it. None: it has read a plain text."""
        return None if self.chat is None else Transcript(*(self.chat[name] for name in Transcript._fields))

    def described(self) -> dict[str, Any]:
        """Return its description for a client."""
        place = "memory" if self.cache is not None else "disk"
        return {
            "id": self.id,
            "object": "state",
            "created_at": self.created,
            "model": self.model,
            "kind": self.kind,
            "tokens": self.length + len(self.unread),
            "bytes": self.nbytes or self.file_bytes,
            "place": place,
            "saved": self.file is not None,
            "messages": None if self.chat is None else len(self.chat["messages"]),
        }
