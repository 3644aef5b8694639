"""States in files. A file is a saved state of t2r, with the tokens that were read and what the server knows of it."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from t2r.attention.cache import load_state
from t2r.attention.state_file import read_header
from t2r.errors import T2RError
from t2r.serving.stored import Stored
from t2r.storage import whole_file

FIELDS: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "model": str,
    "kind": str,
    "created": int,
    "unread": list,
    "digest": str,
    "tokens": (str, type(None)),
    "own": bool,
    "told": (dict, type(None)),
}


def write(path: Path, stored: Stored) -> int:
    """Write a state that is in memory, and return the size of the file. Raises OSError or T2RError if it cannot."""
    cache = stored.cache
    assert cache is not None
    tensors, header = cache.as_saved(stored.fingerprint)
    header |= {"chat": stored.chat} if stored.chat is not None else {}
    about = {name: getattr(stored, name) for name in FIELDS if name not in ("digest", "tokens")}
    about["tokens"] = None if stored.tokens is None else packed(stored.tokens)
    about["digest"] = digest(tensors, about["tokens"])
    metadata = {"t2r_state": json.dumps(header), "t2r_serving": json.dumps(about)}
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with whole_file(path) as temporary:
            save_file(tensors, temporary, metadata=metadata)
    except SafetensorError as error:
        raise T2RError(f"{path} cannot be written: {error}") from error
    stored.digest = about["digest"]
    return path.stat().st_size


def packed(tokens: Sequence[int]) -> str:
    """Return tokens as text, four bytes each."""
    return base64.b64encode(np.array(tokens, dtype="<i4").tobytes()).decode()


def unpacked(text: str) -> list[int]:
    """Return the tokens of `packed`. Raises ValueError if it is something else."""
    tokens: list[int] = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4").tolist()
    return tokens


def digest(tensors: dict[str, Tensor], tokens: str | None) -> str:
    """Return a hash of the data of a file, to find out if it is damaged."""
    hashed = hashlib.blake2b((tokens or "").encode(), digest_size=16)
    for name in sorted(tensors):
        hashed.update(name.encode())
        hashed.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def read_about(path: Path) -> Stored:
    """Return a state without its tensors. Raises T2RError if the file is not a state of a server."""
    header = read_header(path)
    if header["rows"] != 1:
        raise T2RError(f"{path.name} has {header['rows']} sequences: a state of the server has one")
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
        about = json.loads(metadata.get("t2r_serving", "null"), parse_constant=refuse_constant)
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise T2RError(f"{path.name} is damaged ({error})") from error
    length = max(header["lengths"].values(), default=0)
    known = {"fingerprint": header["fingerprint"], "chat": header.get("chat"), "length": length}
    if about is None:
        return Stored(id="", model="", kind="upload", tokens=None, **known)
    try:
        about = {"own": True, **about} if isinstance(about, dict) else about  # earlier versions do not write it
        check_about(about)
        tokens = None if about["tokens"] is None else unpacked(about["tokens"])
        if tokens is not None and (len(tokens) != length or min(tokens, default=0) < 0):
            raise ValueError
    except ValueError as error:
        raise T2RError(f"{path.name} is not a state of a server: its header is damaged") from error
    return Stored(**known, **(about | {"tokens": tokens}))


def check_about(about: Any) -> None:
    """Raise ValueError unless this is what `write` writes."""
    right = isinstance(about, dict) and about.keys() == FIELDS.keys()
    right = right and all(isinstance(about[name], kind) for name, kind in FIELDS.items())
    if not right or not all(type(token) is int and 0 <= token < 1 << 31 for token in about["unread"]):
        raise ValueError
    if len(about["unread"]) > 1:
        raise ValueError


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def check_tokens(stored: Stored, vocabulary: int) -> None:
    """Raise T2RError for tokens that the model does not have."""
    if max([*(stored.tokens or ()), *stored.unread], default=0) >= vocabulary:
        raise T2RError("the file is damaged: it has tokens that the model does not have")


def load(path: Path, model: Any, stored: Stored) -> Any:
    """Load a state. Raises T2RError if it is damaged, or is not the one that was written."""
    cache = load_state(path, model, stored.fingerprint)
    if cache.padding is not None:
        raise T2RError(f"{path.name} has padding: a state of the server has none")
    # The tensors of a file are mapped: they would change with it, and end the process if it became shorter.
    cache = cache.copied()
    tensors, _ = cache.as_saved(stored.fingerprint)
    tokens = None if stored.tokens is None else packed(stored.tokens)
    if stored.digest is not None and digest(tensors, tokens) != stored.digest:
        raise T2RError(f"{path.name} is damaged: its data has changed")
    return cache
