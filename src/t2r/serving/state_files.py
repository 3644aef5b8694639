"""States in files. A file is a saved state of t2r, with the tokens that were read and what the server knows of it."""

from __future__ import annotations

import hashlib
import json
import logging
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

logger = logging.getLogger(__name__)

TOKENS = "tokens"
FIELDS: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "model": str,
    "kind": str,
    "created": int,
    "unread": list,
    "digest": str,
    "told": (dict, type(None)),
}


def write(path: Path, stored: Stored) -> int:
    """Write a state that is in memory, and return the size of the file. Raises OSError or T2RError if it cannot."""
    cache = stored.cache
    assert cache is not None
    tensors, header = cache.contents(stored.fingerprint)
    tensors[TOKENS] = torch.from_numpy(np.array(stored.tokens, dtype=np.int64))
    header |= {"chat": stored.chat} if stored.chat is not None else {}
    about = {name: getattr(stored, name) for name in FIELDS if name != "digest"}
    about["digest"] = digest(tensors)
    metadata = {"t2r_state": json.dumps(header), "t2r_serving": json.dumps(about)}
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with whole_file(path) as temporary:
            save_file(tensors, temporary, metadata=metadata)
    except SafetensorError as error:
        raise T2RError(f"{path} cannot be written: {error}") from error
    return path.stat().st_size


def digest(tensors: dict[str, Tensor]) -> str:
    """Return a hash of tensors, to find a file whose data is damaged."""
    hashed = hashlib.blake2b(digest_size=16)
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
            tokens = file.get_tensor(TOKENS).tolist() if TOKENS in file.keys() else None  # noqa: SIM118
        about = json.loads(metadata["t2r_serving"]) if "t2r_serving" in metadata else None
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise T2RError(f"{path.name} is damaged ({error})") from error
    length = max(header["lengths"].values(), default=0)
    known = {"fingerprint": header["fingerprint"], "chat": header.get("chat"), "length": length}
    if about is None:
        return Stored(id="", model="", kind="upload", tokens=None, **known)
    check_about(path, about, tokens, length)
    return Stored(tokens=tokens, **known, **about)


def check_about(path: Path, about: Any, tokens: Any, length: int) -> None:
    """Raise T2RError unless this is what `write` writes."""
    right = isinstance(about, dict) and about.keys() == FIELDS.keys()
    right = right and all(isinstance(about[name], kind) for name, kind in FIELDS.items())
    numbers = [*about["unread"], *(tokens or [])] if right else []
    right = right and all(type(token) is int and token >= 0 for token in numbers)
    if not right or not (tokens is None or (isinstance(tokens, list) and len(tokens) == length)):
        raise T2RError(f"{path.name} is not a state of a server: its header is damaged")


def load(path: Path, model: Any, stored: Stored) -> Any:
    """Load the tensors of a state. Raises T2RError if they are damaged."""
    cache = load_state(path, model, stored.fingerprint)
    tensors = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensors[name] = file.get_tensor(name)
    if stored.digest is not None and digest(tensors) != stored.digest:
        raise T2RError(f"{path.name} is damaged: its data has changed")
    if not all(bool(x.isfinite().all()) for x in tensors.values()):
        raise T2RError(f"{path.name} is damaged: it has numbers that are not finite")
    if cache.padding is not None:
        raise T2RError(f"{path.name} has padding: a state of the server has none")
    return cache
