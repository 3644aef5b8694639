"""Models on disk and on the hub: what goes wrong is said in one line.

transformers reports a mistake in a dozen kinds of exception, some of many lines. Here each becomes a `T2RError`
that says what to do, so that nobody above need know them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
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
from t2r.model.swapped import SwappedModel
from t2r.options import RunOptions, options_of
from t2r.storage import kind_of
from t2r.surgery.adapters import FAMILIES

INDEX = "model.safetensors.index.json"
HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")


def load(
    source: str | Path,
    *,
    dtype: str = RunOptions.dtype,
    device: str = RunOptions.device,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> SwappedModel:
    """Load a model from a folder or from the hub, ready to run: a swapped one, or an ordinary language model.

        model, tokenizer = t2r.load("gpt2-rnn"), t2r.load_tokenizer("gpt2-rnn")

    Every tensor of the model must be there and finite. The return type is that of a swapped model; an ordinary one has
    what `PreTrainedModel` has.

    Args:
        source: a folder, or a name on the hub.
        dtype: `auto` (as saved), `float32`, `bfloat16` or `float16`.
        device: `auto` (a GPU if there is one), `cpu`, `cuda`, ...
        revision: branch, tag or commit on the hub.
        trust_remote_code: run code that comes with the model.
    """
    model = load_model(str(source), dtype=dtype, device=device, revision=revision, trust_remote_code=trust_remote_code)
    return cast(SwappedModel, model)


def load_config(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a model: a folder, or a name on the hub."""
    check_source(source)
    with explained(source):
        fields, _ = PreTrainedConfig.get_config_dict(source, revision=revision)
        if not isinstance(fields, dict):
            raise T2RError(f"the config.json of {source} is damaged: it holds no object")
        model_type = fields.get("model_type")
        if not isinstance(model_type, str | None):
            raise T2RError(f"the config.json of {source} is damaged: model_type is {model_type!r}")
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
    dtype: str = RunOptions.dtype,
    device: str = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A model ready to run, with all its weights: transformers would fill in a missing one at random."""
    torch_dtype, place = choose_dtype(dtype), choose_device(device)
    config = load_config(source, revision=revision, trust_remote_code=trust_remote_code)
    check_index(source)
    hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    with explained(source):
        model, info = auto_class(config).from_pretrained(
            source, config=config, dtype=torch_dtype, output_loading_info=True, **hub
        )
        # A base model's folder may hold more than we build (another task's head, say); never less.
        refuse_incomplete(source, {name: keys for name, keys in info.items() if name != "unexpected_keys"})
        model = model.to(place).eval()
    refuse_not_finite(source, model)
    return model


def load_tokenizer(
    source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model; None if there is none."""
    source = str(source)
    check_source(source)
    if not any(has_file(source, name, revision) for name in TOKENIZER_FILES):
        return None
    with explained(source, "the tokenizer of "):
        return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)


def need_tokenizer(
    source: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model that cannot do without."""
    tokenizer = load_tokenizer(source, revision=revision, trust_remote_code=trust_remote_code)
    if tokenizer is None:
        raise T2RError(f"{source} has no tokenizer: save the one it was trained with into that folder")
    return tokenizer


def auto_class(config: PreTrainedConfig) -> Any:
    """The Auto class that loads a language model of this configuration. Checkpoints of other tasks are refused: their
    trunk would load, under a head that was never trained."""
    for name in config.architectures or ():
        known: Any = getattr(transformers, name, None)
        model = isinstance(known, type) and issubclass(known, PreTrainedModel)
        if model and "For" in name and not known.can_generate():
            raise T2RError(f"this is a {name}, which does not generate text: give a language model")
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def choose_dtype(name: str) -> torch.dtype | str:
    options_of(RunOptions)["dtype"].check(name)
    return name if name == "auto" else getattr(torch, name)


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one. A device that computes nothing, such as meta, is refused."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        made = torch.ones(1, device=name)
        made.sum().item()
        return made.device
    except (RuntimeError, AssertionError, TypeError) as error:  # torch built without CUDA asserts
        raise T2RError(f"no device {name!r} here: `t2r info` lists those there are") from error


def check_index(source: str) -> None:
    """Refuse the index of a sharded checkpoint that is damaged, or names files outside of its folder."""
    path = Path(source) / INDEX
    if not path.is_file():
        return
    try:
        shards = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = set(shards.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise T2RError(f"{path} is damaged: it holds no weight_map") from error
    for name in sorted(map(str, names)):
        # Not by the resolved path: in the hub's cache, files are links to elsewhere.
        if not name.endswith(".safetensors") or Path(name).name != name:
            raise T2RError(f"{path} names {name!r}, which is not a safetensors file of that folder")


def refuse_not_finite(source: str, model: PreTrainedModel) -> None:
    """NaN in one weight is NaN in every output, and a model that was saved so cannot be mended."""
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and weight.numel() and not weight.is_meta:
            low, high = weight.detach().aminmax()
            if not (torch.isfinite(low) and torch.isfinite(high)):
                raise T2RError(f"{source} has weights that are not finite numbers, in {name}: it was saved broken")


def check_source(source: str) -> None:
    """Say what is wrong with a path before anybody takes it for a name on the hub."""
    kind = kind_of(source)
    if kind == "folder":
        if kind_of(Path(source) / "config.json") != "file":
            raise T2RError(f"{source} has no config.json: give the folder of a saved model")
    elif kind is not None:
        raise T2RError(f"{source} is a file: give the folder that the model is in")
    elif not HUB_NAME.fullmatch(source):
        raise T2RError(f"there is no folder {source or repr(source)}")


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
    except Exception as error:  # damaged files make configurations and models fail in any way
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if not isinstance(error, OSError | ValueError | RuntimeError | ImportError | StrictDataclassError):
            reason = f"its files are damaged ({type(error).__name__}: {reason})"
        if "trust_remote_code" in str(error):
            reason = "it comes with code of its own; if you trust that, say so (--trust-remote-code)"
        here = "" if Path(source).exists() else "is not a folder here, and from the hub "
        raise T2RError(f"{part}{source} {here}cannot be loaded: {reason}") from error
