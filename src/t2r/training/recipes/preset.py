"""Presets for pretraining: a YAML file with the tokenizer, the model configuration and the recipe."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase

from t2r import compat
from t2r.config import OPTIONS, T2RConfig
from t2r.data.parallel.vocabulary import has_two_vocabularies, target_size
from t2r.data.vocabulary import check_tokenizer
from t2r.errors import T2RError
from t2r.hub import auto_class, load_config
from t2r.storage import kind_of, parse_yaml
from t2r.training.recipes.recipe import Recipe, check_swap, load_recipe, make_recipe, read_yaml, shipped

RECIPE, TRANSLATION_RECIPE = "scratch-lm", "scratch-mt"
"""The recipes of configurations that have none, of language models and of encoder-decoders."""
INITS = ("", "xavier")
MULTIPLE = 8
"""The vocabulary size is rounded up to a multiple of this, as in fairseq."""
EXPONENT = re.compile(r"[-+]?[\d.]+e[-+]?\d+", re.IGNORECASE)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
DECODER_IDS = {"decoder_start_token_id": "pad_token_id", "forced_eos_token_id": "eos_token_id"}
"""Tokens of an encoder-decoder, which are tokens of its tokenizer."""
PASSING = ("architectures", "dtype", "transformers_version", "model_type", *TOKEN_IDS, *DECODER_IDS)
"""Fields of a saved configuration that do not describe the architecture."""


@dataclass(frozen=True)
class Preset:
    """The starting point of `pretrain`.

    Args:
        tokenizer: `kind` and `vocab_size` of the tokenizer to train. Empty: the model folder's tokenizer, or a BPE
            tokenizer with the vocabulary size of the model.
        model: `model_type` and fields of its configuration. `vocab_size` defaults to the tokenizer's. An
            encoder-decoder with `share_encoder_decoder_embeddings: false` has two vocabularies.
        recipe: the name of a recipe, or its contents. None: `scratch-lm`, or `scratch-mt` for an encoder-decoder.
        swap: options of the swap. Empty: softmax attention.
        init: `xavier`: linear layers get the random weights of fairseq, which depend on the shape of a matrix. Empty:
            the model's own, such as one standard deviation for all weights.
    """

    name: str
    model: dict[str, Any]
    description: str = ""
    tokenizer: dict[str, Any] = field(default_factory=dict)
    recipe: str | dict[str, Any] | None = None
    swap: dict[str, Any] = field(default_factory=dict)
    init: str = ""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def plan(self, overrides: Iterable[str] = ()) -> Recipe:
        if not isinstance(self.recipe, dict):
            default = TRANSLATION_RECIPE if self.translates else RECIPE
            return load_recipe(default if self.recipe is None else self.recipe, overrides)
        return make_recipe(self.recipe, self.name, overrides)

    def make_config(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
        """Return the configuration of a model for this tokenizer. Raises T2RError if it is not valid."""
        chosen = self.vocabulary(tokenizer) | {name: getattr(tokenizer, name) for name in TOKEN_IDS}
        if self.translates:
            chosen |= {name: chosen[token] for name, token in DECODER_IDS.items()}
        chosen |= self.model
        if chosen["vocab_size"] < len(tokenizer):
            raise T2RError(
                f"preset {self.name}: vocab_size {chosen['vocab_size']} is less than the tokenizer's {len(tokenizer)}"
            )
        try:
            config: PreTrainedConfig = AutoConfig.for_model(chosen.pop("model_type"), **chosen)
            with torch.device("meta"):  # finds errors before any text is read, without allocating weights
                auto_class(config).from_config(config)
        except NotImplementedError:  # an operation that the meta device does not support
            return config
        except Exception as error:  # each configuration and model checks its fields in its own way
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise T2RError(f"preset {self.name}: the model configuration is not valid ({reason})") from error
        return config

    @property
    def translates(self) -> bool:
        """Whether the model is an encoder-decoder, trained on parallel text."""
        return bool(CONFIG_MAPPING[self.model["model_type"]].is_encoder_decoder)

    @property
    def separate(self) -> bool:
        """Whether sources and targets have their own vocabularies: the embeddings of the encoder are not the
        decoder's."""
        return not self.model.get("share_encoder_decoder_embeddings", True)

    def vocabulary(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
        """Return the vocabulary sizes of a model for this tokenizer. Raises T2RError if it has one where the model has
        two, or two where the model has one."""
        if has_two_vocabularies(tokenizer) != self.separate:
            theirs, ours = ("two vocabularies", "one") if not self.separate else ("one vocabulary", "two")
            raise T2RError(
                f"preset {self.name}: the tokenizer has {theirs} and the model {ours}: give another tokenizer, or "
                "set share_encoder_decoder_embeddings"
            )
        sizes = {"vocab_size": len(tokenizer)}
        if self.separate:
            sizes["decoder_vocab_size"] = target_size(tokenizer)
        return {name: -(-size // MULTIPLE) * MULTIPLE for name, size in sizes.items()}


def shipped_presets() -> list[str]:
    return shipped("preset")


def load_preset(name: str | Path, overrides: Iterable[str] = ()) -> Preset:
    """Load a shipped preset by name, a YAML file by path, or the configuration of a model folder.

    `overrides` are `field=value` for the model configuration."""
    changes = dict(read_override(override) for override in overrides)
    if kind_of(name) == "folder":
        preset = of_folder(str(name))
        check_model(preset, changes)
    elif Path(name).suffix not in (".yaml", ".yml") and kind_of(name) != "file" and str(name) not in shipped_presets():
        raise T2RError(
            f"no preset {str(name)!r}: choose one of {', '.join(shipped_presets())}, "
            "or give a YAML file or a model folder"
        )
    else:
        preset = make_preset(read_yaml("preset", name), name)
        check_model(preset, preset.model | changes)
    preset = dataclasses.replace(preset, model=preset.model | changes)
    size = preset.model.get("vocab_size", 1)
    if type(size) is not int or size < 1:
        raise T2RError(
            f"preset {preset.name}: vocab_size must be a whole number, at least 1, or left out for the tokenizer's; "
            f"got {size!r}"
        )
    return preset


def read_override(override: str) -> tuple[str, Any]:
    key, equals, value = override.partition("=")
    if not equals or not key.strip() or key.strip() == "model_type":
        raise T2RError(f"override {override!r}: write field=value, with a field of the model configuration")
    return key.strip(), read_number(parse_yaml(value, f"override {override!r}: the value"))


def of_folder(name: str) -> Preset:
    """Return a preset with the configuration of a saved model and, for a t2r model, its swap options."""
    config, swap = load_config(name), {}
    if isinstance(config, T2RConfig):
        own = config.to_diff_dict()
        config, swap = config.base_config, {option: own[option] for option in OPTIONS if option in own}
    model = {k: v for k, v in config.to_diff_dict().items() if k not in PASSING and not k.startswith("_")}
    model["vocab_size"] = config.vocab_size
    return Preset(Path(name).resolve().name, {"model_type": config.model_type, **model}, swap=swap)


def make_preset(plan: Any, name: str | Path) -> Preset:
    """Make a preset from parsed YAML. Raises T2RError for unknown or wrong fields."""
    where = f"preset {name}"
    if not isinstance(plan, dict) or not isinstance(plan.get("model"), dict):
        raise T2RError(f"{where} has no model: it requires `model` with a `model_type` and fields of its configuration")
    if unknown := set(plan) - {f.name for f in fields(Preset)}:
        raise T2RError(f"{where}: no field {', '.join(sorted(map(str, unknown)))}")
    tokenizer = plan.get("tokenizer") or {}
    if not isinstance(tokenizer, dict) or (
        "kind" not in tokenizer and (tokenizer or "vocab_size" not in plan["model"])
    ):
        raise T2RError(f"{where}: `tokenizer` requires a kind, such as {{kind: bpe, vocab_size: 8000}}")
    if unknown := set(tokenizer) - {"kind", "vocab_size"}:
        raise T2RError(f"{where}: a tokenizer has no field {', '.join(sorted(map(str, unknown)))}")
    if tokenizer:
        size = tokenizer.get("vocab_size")
        if size is not None and type(size) is not int:
            raise T2RError(f"{where}: vocab_size must be an integer; got {size!r}")
        check_tokenizer(tokenizer["kind"], size)
    if (init := plan.get("init") or "") not in INITS:
        raise T2RError(f"{where}: `init` must be xavier, or left out; got {init!r}")
    recipe = plan.get("recipe")
    if not isinstance(recipe, str | dict | None):
        raise T2RError(f"{where}: `recipe` must be the name of a recipe or its contents; got {recipe!r}")
    return Preset(
        str(plan.get("name", Path(name).stem)),
        {key: read_number(value) for key, value in plan["model"].items()},
        str(plan.get("description", "")).strip(),
        tokenizer,
        recipe,
        check_swap(plan.get("swap"), where),
        init,
    )


def check_model(preset: Preset, given: Iterable[str]) -> None:
    """Raise T2RError unless transformers has this model, for text, and its configuration has all given fields.

    transformers itself accepts unknown fields."""
    where, model_type = f"preset {preset.name}", str(preset.model.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise T2RError(f"{where}: transformers has no model_type {model_type!r}")
    config: Any = CONFIG_MAPPING[model_type]
    if not compat.has_language_model(config):
        raise T2RError(f"{where}: {model_type} is not a causal language model or an encoder-decoder for text")
    if config.is_encoder_decoder and preset.tokenizer.get("kind", "bpe") != "bpe":
        raise T2RError(f"{where}: the tokenizer of an encoder-decoder must be of kind bpe")
    known = {f.name for f in fields(config)} | set(config.attribute_map) | {"model_type"}
    if unknown := sorted(str(name) for name in given if name not in known):
        raise T2RError(f"{where}: the configuration of {model_type} has no field {', '.join(unknown)}")


def read_number(value: Any) -> Any:
    """Convert a number such as 1e-5, which YAML reads as a string."""
    return float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value
