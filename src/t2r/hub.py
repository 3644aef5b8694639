"""Loading of models, configurations and tokenizers from a folder or the Hugging Face Hub.

transformers reports loading errors with many exception types, some with messages of many lines. This module converts
each to a one-line `T2RError`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, StrictDataclassError
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
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, cached_file

from t2r import compat
from t2r.capacity import shortage
from t2r.config import T2RConfig
from t2r.errors import T2RError
from t2r.model.saving import refuse_incomplete
from t2r.model.sharded import sharded_class
from t2r.model.swapped import SwappedModel
from t2r.options import RunOptions, options_of
from t2r.options.entrance import entrance
from t2r.sharding import allow_inside, own, tensors_of
from t2r.storage import kind_of, shortened
from t2r.storage.saved_sizes import check_sizes
from t2r.surgery.adapters import FAMILIES, repaired

INDEX = "model.safetensors.index.json"
LONGEST_REASON = 400
"""Characters of an error of transformers that are shown. Some list all models that it knows."""
HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")


@entrance(RunOptions)
def load(
    source: str | Path,
    *,
    dtype: str = RunOptions.dtype,
    device: str = RunOptions.device,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> SwappedModel:
    """Load a swapped model or any other language model from a folder or the Hub, in evaluation mode.

        model, tokenizer = t2r.load("gpt2-rnn"), t2r.load_tokenizer("gpt2-rnn")

    The annotated return type is that of a swapped model. Other models are plain `PreTrainedModel` objects.

    Args:
        source: a folder, or a name on the Hub.
        dtype: `auto` (as saved), `float32`, `bfloat16` or `float16`.
        device: `auto` (a GPU if available), `cpu`, `cuda`, ...
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether to run code that comes with the model.

    Raises T2RError if the model cannot be loaded, if weights are missing, or if weights are not finite.
    """
    model = load_model(str(source), dtype=dtype, device=device, revision=revision, trust_remote_code=trust_remote_code)
    return cast(SwappedModel, model)


def load_config(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Load the configuration of a model from a folder or the Hub."""
    check_source(source)
    with explained(source):
        fields, _ = PreTrainedConfig.get_config_dict(source, revision=revision)
        if not isinstance(fields, dict):
            raise T2RError(f"the config.json of {source} is damaged: it does not contain a JSON object")
        model_type = fields.get("model_type")
        if not isinstance(model_type, str | None):
            raise T2RError(f"the config.json of {source} is damaged: model_type is {shortened(repr(model_type))}")
        if model_type is not None and model_type not in CONFIG_MAPPING and "auto_map" not in fields:
            raise T2RError(
                f"{source} has model type {shortened(model_type)!r}, which this version of transformers does not "
                f"support: upgrade transformers, or give a model of another type; t2r has tested {len(FAMILIES)}, such "
                "as gpt2, llama and marian"
            )
        check_sizes(source, fields)
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
    assert isinstance(config, PreTrainedConfig)
    return config


def load_model(
    source: str,
    *,
    dtype: str = RunOptions.dtype,
    device: str = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
    fsdp_size: int | None = None,
) -> PreTrainedModel:
    """Load a model in evaluation mode. Missing weights, which transformers would initialize randomly, are an error.

    With `fsdp_size`, all processes must call this, and each gets a part of the weights."""
    torch_dtype, place = choose_dtype(dtype), choose_device(device)
    config = load_config(source, revision=revision, trust_remote_code=trust_remote_code)
    check_index(source)
    how: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    loader = auto_class(config)
    if fsdp_size is not None:
        how["distributed_config"] = compat.distributed_config(fsdp_size)
        loader = class_to_shard(source, config, loader)
        del how["trust_remote_code"]
    with explained(source):
        model, info = loader.from_pretrained(source, config=config, dtype=torch_dtype, output_loading_info=True, **how)
        # A checkpoint of a base model may have extra weights, such as the head of another task.
        refuse_incomplete(source, {name: keys for name, keys in info.items() if name != "unexpected_keys"})
        model = (model if fsdp_size is not None else model.to(place)).eval()
    refuse_not_finite(source, model)
    if fsdp_size is not None:
        allow_inside(model)
    return repaired(model)


def load_shell(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return a model without the values of its weights, on torch's meta device."""
    config = load_config(source, revision=revision, trust_remote_code=trust_remote_code)
    with explained(source), torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    model.config.name_or_path = source
    return repaired(model.eval())


def class_to_shard(source: str, config: Any, loader: Any) -> Any:
    """Return the class that loads a model in parts. Raises T2RError if it is not one of transformers or t2r."""
    if config.model_type == T2RConfig.model_type:
        return loader
    base = compat.stock_class(config, loader)
    if base is None:
        raise T2RError(f"{source} has code of its own: fsdp_size is for models of transformers")
    return sharded_class(base)


@entrance()
def load_tokenizer(
    source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a model from a folder or the Hub. Returns None if the model has no tokenizer."""
    source = str(source)
    check_source(source)
    if not has_tokenizer(source, revision):
        return None
    with explained(source, "the tokenizer of "):
        return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)


def copy_processor(source: str | Path, folder: Path, *, revision: str | None = None) -> None:
    """Copy the files with which a model reads images, if it has any, to the folder of another model."""
    for name in (PROCESSOR_NAME, IMAGE_PROCESSOR_NAME):
        found = None
        with suppress(OSError):
            found = cached_file(str(source), name, revision=revision)
        if found is not None:
            shutil.copyfile(found, folder / name)


def need_tokenizer(
    source: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model. Raises T2RError if the model has no tokenizer."""
    tokenizer = load_tokenizer(source, revision=revision, trust_remote_code=trust_remote_code)
    if tokenizer is None:
        raise T2RError(f"{source} has no tokenizer: save the tokenizer it was trained with to that folder")
    return tokenizer


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the Auto class that loads a language model with this configuration.

    Raises T2RError for checkpoints of other tasks, which would load with an untrained language modeling head."""
    for name in config.architectures or ():
        known: Any = getattr(transformers, name, None)
        model = isinstance(known, type) and issubclass(known, PreTrainedModel)
        if model and "For" in name and not known.can_generate():
            raise T2RError(f"the model is a {name}, which does not generate text: give a language model")
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def choose_dtype(name: str) -> torch.dtype | str:
    options_of(RunOptions)["dtype"].check(name)
    return name if name == "auto" else getattr(torch, name)


def choose_device(name: str) -> torch.device:
    """Return the torch device. `auto` selects a GPU if available. Devices that cannot compute (meta) are rejected."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        made = torch.ones(1, device=name)
        made.sum().item()
        return made.device
    except (RuntimeError, AssertionError, TypeError) as error:  # torch built without CUDA asserts
        raise T2RError(f"device {name!r} is not available: `t2r info` lists the available devices") from error


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all its work, before a time is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_index(source: str) -> None:
    """Raise T2RError if the index of a sharded checkpoint is damaged, or refers to files outside its folder."""
    path = Path(source) / INDEX
    if not path.is_file():
        return
    try:
        shards = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = set(shards.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise T2RError(f"{path} is damaged: it has no valid weight_map") from error
    for name in sorted(map(str, names)):
        # The path is not resolved because files in the Hub cache are links to other folders.
        if not name.endswith(".safetensors") or Path(name).name != name:
            raise T2RError(f"{path} refers to {name!r}, which is not a safetensors file in that folder")


def refuse_not_finite(source: str, model: PreTrainedModel) -> None:
    """Raise T2RError if a weight is NaN or infinite."""
    for name, weight in model.named_parameters():
        for x in tensors_of(own(weight.detach())):
            if x.is_floating_point() and x.numel() and not x.is_meta:
                low, high = x.aminmax()
                if not (torch.isfinite(low) and torch.isfinite(high)):
                    raise T2RError(
                        f"{source} has NaN or infinite weights in {name}: the model was saved in a broken state"
                    )


def check_source(source: str) -> None:
    """Raise T2RError for an invalid path, which would otherwise be looked up on the Hub."""
    kind = kind_of(source)
    if kind == "folder":
        if kind_of(Path(source) / "config.json") != "file":
            raise T2RError(f"{source} has no config.json: give the folder of a saved model")
    elif kind is not None:
        raise T2RError(f"{source} is a file: give the folder of a saved model")
    elif not HUB_NAME.fullmatch(source):
        raise T2RError(f"there is no folder {source or repr(source)}")


def has_tokenizer(source: str, revision: str | None) -> bool:
    """Return whether a model has a tokenizer. Raises T2RError if the Hub cannot be asked."""
    unreachable = None
    for name in TOKENIZER_FILES:
        try:
            if cached_file(source, name, revision=revision) is not None:
                return True
        except OSError as error:
            why = error.__cause__
            absent = isinstance(why, EntryNotFoundError) and not isinstance(why, LocalEntryNotFoundError)
            unreachable = unreachable if absent else error
    if unreachable is not None and not Path(source).is_dir():
        with explained(source, "the tokenizer of "):
            raise unreachable
    return False


@contextmanager
def explained(source: str, part: str = "") -> Iterator[None]:
    """Convert any exception raised in the block to a one-line T2RError about `source`."""
    try:
        yield
    except T2RError:
        raise
    except SafetensorError as error:
        raise T2RError(f"{source} cannot be loaded: its weights are damaged or truncated ({error})") from error
    except Exception as error:  # damaged files can raise any exception
        if (short := shortage(error)) is not None:
            raise T2RError(f"{part}{source} cannot be loaded: {short}") from error
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        reason = reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}..."
        if not isinstance(error, OSError | ValueError | RuntimeError | ImportError | StrictDataclassError):
            reason = f"its files are damaged ({type(error).__name__}: {reason})"
        if "trust_remote_code" in str(error):
            reason = (
                "it requires custom code, which runs only if you trust it: t2r.load(..., trust_remote_code=True), or "
                "--trust-remote-code of convert, swap, generate and inspect"
            )
        here = "" if Path(source).exists() else "is not a local folder, and from the Hub it "
        raise T2RError(f"{part}{source} {here}cannot be loaded: {reason}") from error
