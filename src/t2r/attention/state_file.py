"""The header of a saved state: its format, and the fingerprint of the model that it belongs to."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from t2r.attention.joint import refuse_quantized_layers
from t2r.errors import T2RError
from t2r.sharding import tensors_of
from t2r.storage import Output

FORMAT = 2
"""The format of saved states. In format 1, the fingerprint did not include `rotary`."""


def is_state(path: Path) -> bool:
    """Return whether a file is a saved state, of any version."""
    try:
        with safe_open(path, framework="pt") as file:
            return "t2r_state" in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


STATE = Output("a state", is_state)


def read_header(path: str | Path) -> dict[str, Any]:
    """Return the header of a saved state: its format, number of rows, lengths, and the fingerprint of its model.
    The state of a conversation has `chat` too: its messages and their text.

    Raises T2RError if the file is not a saved state."""
    if not Path(path).is_file():
        raise T2RError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise T2RError(f"{path} is not a saved state, or is truncated ({error})") from error
    if "t2r_state" not in metadata:
        raise T2RError(f"{path} is a safetensors file, but not a saved state")
    try:
        header: dict[str, Any] = json.loads(metadata["t2r_state"])
        numbers = [header["format"], header["rows"], *header["lengths"].values()]
        if not all(type(number) is int and number >= 0 for number in numbers) or header["format"] < 1:
            raise ValueError
        if type(header["fingerprint"]) is not str:
            raise ValueError
        check_chat(header.get("chat"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise T2RError(f"{path} is not a saved state: its header is damaged") from error
    if header["format"] > FORMAT:
        raise T2RError(
            f"{path} has state format {header['format']}; this version of t2r supports up to {FORMAT}: upgrade t2r"
        )
    return header


def check_chat(chat: Any) -> None:
    """Raise an error unless this is a conversation (see `t2r.generation.turns.Transcript`), or None."""
    if chat is None:
        return
    types = {"messages": list, "text": str, "document": bool, "tokens": int}
    words = [word for message in chat["messages"] for word in (message["role"], message["content"])]
    if not all(type(chat[name]) is kind for name, kind in types.items()) or not all(type(w) is str for w in words):
        raise ValueError


@torch.no_grad()
def fingerprint(model: nn.Module, format: int = FORMAT) -> str:
    """Return a hash that identifies a model, from the names, shapes and a few values of all tensors."""
    refuse_quantized_layers(model, "save and load states with")
    digest = hashlib.sha256()
    config: Any = getattr(model, "t2r_config", None)
    if config is not None:  # options that do not affect the names and shapes of tensors
        if format == 1:
            options = f"{config.feature_map} {config.activation} {(config.softmax_every, config.softmax_layers)}"
        else:
            swapped: Any = model
            options = f"{config.feature_map} {config.activation} {config.rotary} {swapped.kept_layers()}"
            options += "" if config.plan is None else f" {config.plan}"
        digest.update(options.encode())
    samples = []
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        for part in tensors_of(tensor):
            flat = part.flatten()
            samples.append(flat[:: max(1, flat.numel() // 16)][:16].to(torch.float32))
    digest.update(torch.cat(samples).cpu().numpy().tobytes())
    return digest.hexdigest()
