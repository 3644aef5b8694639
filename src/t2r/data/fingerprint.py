"""Fingerprints of inputs. Caches are named by the fingerprints of their inputs, so outdated caches are not used."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from t2r.errors import T2RError

SMALL = 1 << 20
"""Files up to this many bytes are identified by their content, larger ones by size and modification time."""


LABELS = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "t2r")
"""Fields of a configuration that do not say what a base model computes."""


def cache_folder(kind: str) -> Path:
    """Return the default cache folder, in `T2R_CACHE` or in `t2r` in the user's cache folder.

    Raises T2RError if the user has no home folder, and neither is set."""
    own = os.environ.get("T2R_CACHE")
    try:
        root = Path(own or os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError as error:
        raise T2RError(f"there is no folder for caches: {error} Give one by T2R_CACHE") from error
    return root / kind if own else root / "t2r" / kind


def digest(value: Any) -> str:
    """Return a hash of a JSON-serializable value that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def of_file(path: Path) -> list[Any]:
    """Return the fingerprint of a file.

    Small files are hashed, because modification times can be too coarse to distinguish quick edits."""
    stat = path.stat()
    if stat.st_size <= SMALL:
        return [str(path.absolute()), hashlib.sha256(path.read_bytes()).hexdigest()]
    return [str(path.absolute()), stat.st_size, stat.st_mtime_ns]


def of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the fingerprint of everything that affects tokenization."""
    if tokenizer.is_fast:
        backend: Any = json.loads(tokenizer.backend_tokenizer.to_str())
        # Padding and truncation are those of the last call and do not belong to the tokenizer.
        del backend["padding"], backend["truncation"]
    else:
        backend = [tokenizer.get_vocab(), saved_files(tokenizer)]
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return digest([type(tokenizer).__name__, backend, special, tokenizer.chat_template])


def saved_files(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return hashes of the vocabulary files of a tokenizer: those of both languages, merges, sentencepiece models.

    The vocabulary of sources alone does not determine how text is divided, or the ids of targets. The files are written
    anew, because the tokenizer may have changed since it was loaded, and its own files may be gone."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_vocabulary(folder)
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(folder).iterdir()}


def of_model(model: PreTrainedModel) -> str:
    """Return the fingerprint of a model: its configuration, its name, and a few weights of every tensor."""
    config = model.config.to_dict()
    config.pop("transformers_version", None)
    return digest([config, model.config.name_or_path, some_weights(model)])


def of_weights(model: PreTrainedModel) -> str:
    """Return the fingerprint of the weights alone: the same for a copy of the model elsewhere, and in a wider dtype."""
    return digest(some_weights(model))


def of_config(model: PreTrainedModel) -> str:
    """Return the fingerprint of a configuration without names and versions: models with the same weights may differ in
    their positions, or in an activation."""
    return digest(told(model.config.to_dict()))


def told(fields: Any) -> Any:
    """Return what a configuration says of the computation."""
    if not isinstance(fields, dict):
        return fields
    return {str(name): told(value) for name, value in fields.items() if name not in LABELS}


def config_differences(one: PreTrainedModel, other: PreTrainedModel) -> list[str]:
    """Return the fields in which two models compute differently. Ids of tokens belong to the text, not to a model."""
    own, theirs = (told(model.config.to_dict()) for model in (one, other))
    names = sorted(name for name in own.keys() | theirs.keys() if not name.endswith("_token_id"))
    return [name for name in names if own.get(name) != theirs.get(name)]


def some_weights(model: PreTrainedModel) -> dict[str, list[float]]:
    """Return a few weights of every tensor."""
    weights = {}
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        weights[name] = flat[:: max(1, flat.numel() // 16)].float().tolist()
    return weights
