"""Models on disk and on the hub: what goes wrong is said in one line.

transformers reports a mistake in a dozen kinds of exception, some of many lines. Here each becomes a `T2RError`
that says what to do, so that nobody above need know them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from t2r.errors import T2RError
from t2r.model.saving import refuse_incomplete
from t2r.surgery.adapters import FAMILIES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")


def load_config(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a model: a folder, or a name on the hub."""
    check_source(source)
    with explained(source):
        fields, _ = PreTrainedConfig.get_config_dict(source, revision=revision)
        model_type = fields.get("model_type")
        if model_type is not None and model_type not in CONFIG_MAPPING and "auto_map" not in fields:
            raise T2RError(
                f"{source} is of type {model_type!r}, which this transformers does not know; "
                f"t2r swaps {', '.join(FAMILIES)}"
            )
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
    assert isinstance(config, PreTrainedConfig)
    return config


def load_model(
    source: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A model ready to run, with all its weights: transformers would fill in a missing one at random."""
    torch_dtype, place = choose_dtype(dtype), choose_device(device)
    config = load_config(source, revision=revision, trust_remote_code=trust_remote_code)
    hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    with explained(source):
        model, info = auto_class(config).from_pretrained(
            source, config=config, dtype=torch_dtype, output_loading_info=True, **hub
        )
        # A base model's folder may hold more than we build (another task's head, say); never less.
        refuse_incomplete(source, {name: keys for name, keys in info.items() if name != "unexpected_keys"})
        return model.to(place).eval()


def load_tokenizer(
    source: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model; None if there is none."""
    check_source(source)
    if not any(has_file(source, name, revision) for name in TOKENIZER_FILES):
        return None
    with explained(source, "the tokenizer of "):
        return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)


def auto_class(config: PreTrainedConfig) -> Any:
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def choose_dtype(name: str) -> torch.dtype | str:
    if name != "auto" and name not in DTYPES:
        raise T2RError(f"no dtype {name!r}: choose auto, {', '.join(DTYPES)}")
    return DTYPES.get(name, name)


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise T2RError(f"no device {name!r} here: `t2r info` lists those there are") from error


def check_source(source: str) -> None:
    """Say what is wrong with a path before anybody takes it for a name on the hub."""
    path = Path(source)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise T2RError(f"{source} has no config.json: give the folder of a saved model")
    elif path.is_file():
        raise T2RError(f"{source} is a file: give the folder that the model is in")
    elif not HUB_NAME.fullmatch(source):
        raise T2RError(f"there is no folder {source}")


def has_file(source: str, name: str, revision: str | None) -> bool:
    try:
        return cached_file(source, name, revision=revision) is not None
    except OSError:
        return False


@contextmanager
def explained(source: str, part: str = "") -> Iterator[None]:
    """Whatever is raised inside is about the files of `source`, and becomes one line."""
    try:
        yield
    except T2RError:
        raise
    except SafetensorError as error:
        raise T2RError(f"{source} cannot be loaded: its weights are damaged or cut off ({error})") from error
    except (OSError, ValueError, RuntimeError, ImportError, StrictDataclassError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if "trust_remote_code" in str(error):
            reason = "it comes with code of its own; if you trust that, say so (--trust-remote-code)"
        here = "" if Path(source).exists() else "is not a folder here, and from the hub "
        raise T2RError(f"{part}{source} {here}cannot be loaded: {reason}") from error
