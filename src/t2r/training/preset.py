"""Presets: a model to train from nothing, as a short YAML file: its tokenizer, its configuration, and its recipe."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase

from t2r import compat
from t2r.config import OPTIONS, T2RConfig
from t2r.data.vocabulary import check_tokenizer
from t2r.errors import T2RError
from t2r.hub import load_config
from t2r.storage import kind_of
from t2r.training.recipe import Recipe, check_swap, load_recipe, make_recipe, parse_yaml, read_yaml, shipped

RECIPE = "scratch-lm"
"""For a configuration that comes without one."""
MULTIPLE = 8
"""A model's vocabulary is rounded up to this, as fairseq rounds its dictionaries."""
EXPONENT = re.compile(r"[-+]?[\d.]+e[-+]?\d+", re.IGNORECASE)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
PASSING = ("architectures", "dtype", "transformers_version", "model_type", *TOKEN_IDS)
"""What a saved configuration says that is not of its shape."""


@dataclass(frozen=True)
class Preset:
    """What `pretrain` starts from.

    Args:
        tokenizer: `kind` and `vocab_size` of one to be trained. Empty: the model comes with its own, or it is a BPE of
            the size of the model's vocabulary.
        model: `model_type`, and fields of that configuration; the vocabulary's size is the tokenizer's unless given.
        recipe: the name of a recipe, or one written out.
        swap: options of the swap. Empty: softmax attention.
    """

    name: str
    model: dict[str, Any]
    description: str = ""
    tokenizer: dict[str, Any] = field(default_factory=dict)
    recipe: str | dict[str, Any] = RECIPE
    swap: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def plan(self, overrides: Iterable[str] = ()) -> Recipe:
        if isinstance(self.recipe, str):
            return load_recipe(self.recipe, overrides)
        return make_recipe(self.recipe, self.name, overrides)

    def make_config(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
        """The configuration of a model that reads what this tokenizer writes."""
        ids = {name: getattr(tokenizer, name) for name in TOKEN_IDS}
        chosen = {"vocab_size": -(-len(tokenizer) // MULTIPLE) * MULTIPLE, **ids, **self.model}
        if chosen["vocab_size"] < len(tokenizer):
            raise T2RError(
                f"preset {self.name}: vocab_size {chosen['vocab_size']} is less than the tokenizer's {len(tokenizer)}"
            )
        try:
            config: PreTrainedConfig = AutoConfig.for_model(chosen.pop("model_type"), **chosen)
            with torch.device("meta"):  # shapes alone: what cannot be built is said before any text is read
                AutoModelForCausalLM.from_config(config)
        except NotImplementedError:  # of the meta device
            return config
        except Exception as error:  # each configuration and model checks its fields in its own way
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise T2RError(f"preset {self.name}: this configuration makes no model ({reason})") from error
        return config


def shipped_presets() -> list[str]:
    return shipped("preset")


def load_preset(name: str | Path, overrides: Iterable[str] = ()) -> Preset:
    """A shipped preset by name, a YAML file by path, or the folder of a model, whose shape alone is taken.

    `overrides` are `field=value`, of the model."""
    changes = dict(read_override(override) for override in overrides)
    if kind_of(name) == "folder":
        preset = of_folder(str(name))
        check_model(preset, changes)
    elif Path(name).suffix not in (".yaml", ".yml") and kind_of(name) != "file" and str(name) not in shipped_presets():
        raise T2RError(
            f"no preset {str(name)!r}: choose one of {', '.join(shipped_presets())}, "
            "or give a YAML file or the folder of a model"
        )
    else:
        preset = make_preset(read_yaml("preset", name), name)
        check_model(preset, preset.model | changes)
    return dataclasses.replace(preset, model=preset.model | changes)


def read_override(override: str) -> tuple[str, Any]:
    key, equals, value = override.partition("=")
    if not equals or not key.strip() or key.strip() == "model_type":
        raise T2RError(f"override {override!r}: write field=value, of a field of the model's configuration")
    return key.strip(), read_number(parse_yaml(value, f"override {override!r}: the value"))


def of_folder(name: str) -> Preset:
    """The shape of a saved model. Of a t2r model also its swap."""
    config, swap = load_config(name), {}
    if isinstance(config, T2RConfig):
        own = config.to_diff_dict()
        config, swap = config.base_config, {option: own[option] for option in OPTIONS if option in own}
    model = {k: v for k, v in config.to_diff_dict().items() if k not in PASSING and not k.startswith("_")}
    model["vocab_size"] = config.vocab_size
    return Preset(Path(name).resolve().name, {"model_type": config.model_type, **model}, swap=swap)


def make_preset(plan: Any, name: str | Path) -> Preset:
    """A preset from what YAML says, every field of it known."""
    where = f"preset {name}"
    if not isinstance(plan, dict) or not isinstance(plan.get("model"), dict):
        raise T2RError(
            f"{where} describes no model: it needs `model` with a `model_type` and fields of its configuration"
        )
    if unknown := set(plan) - {f.name for f in fields(Preset)}:
        raise T2RError(f"{where}: no field {', '.join(sorted(map(str, unknown)))}")
    tokenizer = plan.get("tokenizer") or {}
    if not isinstance(tokenizer, dict) or (
        "kind" not in tokenizer and (tokenizer or "vocab_size" not in plan["model"])
    ):
        raise T2RError(f"{where}: `tokenizer` needs a kind, such as {{kind: bpe, vocab_size: 8000}}")
    if unknown := set(tokenizer) - {"kind", "vocab_size"}:
        raise T2RError(f"{where}: a tokenizer has no field {', '.join(sorted(map(str, unknown)))}")
    if tokenizer:
        size = tokenizer.get("vocab_size")
        if size is not None and type(size) is not int:
            raise T2RError(f"{where}: vocab_size {size!r} is not a whole number")
        check_tokenizer(tokenizer["kind"], size)
    recipe = plan.get("recipe", RECIPE)
    if not isinstance(recipe, str | dict):
        raise T2RError(f"{where}: `recipe` is the name of one, or its stages; got {recipe!r}")
    return Preset(
        str(plan.get("name", Path(name).stem)),
        {key: read_number(value) for key, value in plan["model"].items()},
        str(plan.get("description", "")).strip(),
        tokenizer,
        recipe,
        check_swap(plan.get("swap"), where),
    )


def check_model(preset: Preset, given: Iterable[str]) -> None:
    """A language model that transformers knows, with fields that it has: transformers itself would take any."""
    where, model_type = f"preset {preset.name}", str(preset.model.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise T2RError(f"{where}: transformers knows no model_type {model_type!r}")
    config: Any = CONFIG_MAPPING[model_type]
    if not compat.is_causal_language_model(config) or config.is_encoder_decoder:
        raise T2RError(f"{where}: {model_type} is not a plain language model")
    known = {f.name for f in fields(config)} | set(config.attribute_map) | {"model_type"}
    if unknown := sorted(str(name) for name in given if name not in known):
        raise T2RError(f"{where}: the configuration of {model_type} has no field {', '.join(unknown)}")


def read_number(value: Any) -> Any:
    """YAML reads 1e-5 as a string."""
    return float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value
