"""What a cached file was made from. A cache is named by this, so one that is out of date is never found."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

SMALL = 1 << 20
"""Files up to this many bytes are known by what is in them, larger ones by when they were written."""


def cache_folder(kind: str) -> Path:
    """Where caches go unless told otherwise: `T2R_CACHE`, or `t2r` in the user's cache folder."""
    if root := os.environ.get("T2R_CACHE"):
        return Path(root).expanduser() / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "t2r" / kind


def digest(value: Any) -> str:
    """A short name for anything that JSON can write; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def of_file(path: Path) -> list[Any]:
    """The file and its version: a clock can be too coarse for two quick edits, so small files are read."""
    stat = path.stat()
    if stat.st_size <= SMALL:
        return [str(path.absolute()), hashlib.sha256(path.read_bytes()).hexdigest()]
    return [str(path.absolute()), stat.st_size, stat.st_mtime_ns]


def of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """All that decides which tokens a text becomes."""
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # How the last batch was padded or cut is a state of the object, and not a part of the tokenizer.
        del backend["padding"], backend["truncation"]
    else:
        backend = tokenizer.get_vocab()
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return digest([type(tokenizer).__name__, backend, special, tokenizer.chat_template])


def of_model(model: PreTrainedModel) -> str:
    """Configuration, name, and a few weights of every tensor: a model that was trained on is another one."""
    config = model.config.to_dict()
    config.pop("transformers_version", None)
    weights = {}
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        weights[name] = flat[:: max(1, flat.numel() // 16)].float().tolist()
    return digest([config, model.config.name_or_path, weights])
