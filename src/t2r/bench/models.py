"""The models of a benchmark: loaded by name, or built with random weights, and copies with more positions.

Time and memory do not depend on the values of weights, so models of the paper's sizes need no training:

    random:paper-mt                                         the paper's transformer-large
    T2R=random:paper-mt,recurrent=both,feature_size=4,merged  with a label, swapped and merged
    RNN=runs/smollm2-rnn                                    a folder with a label
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from t2r.attention.recurrence import recurrent_sites
from t2r.config import OPTIONS
from t2r.errors import T2RError
from t2r.hub import choose_dtype, load_model
from t2r.model.merge import merge
from t2r.model.modeling import T2RModel
from t2r.model.swap import swap
from t2r.model.windows import sharing_weights
from t2r.storage import kind_of, parse_yaml
from t2r.surgery.adapters import family_of
from t2r.training.recipes.preset import load_preset, shipped_presets

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LM = {"model_type": "gpt2", "n_positions": 1024, "activation_function": "relu", **TOKENS}
MT = {
    "model_type": "marian",
    "activation_function": "relu",
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "share_encoder_decoder_embeddings": True,
    **TOKENS,
}


def marian(width: int, layers: int, heads: int, words: int, positions: int = 2080) -> dict[str, Any]:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", layers), ("attention_heads", heads), ("ffn_dim", 4 * width))
    }
    return {**MT, **sides, "d_model": width, "vocab_size": words, "max_position_embeddings": positions}


SHAPES: dict[str, dict[str, Any]] = {
    "paper-lm": {**LM, "n_layer": 32, "n_embd": 1024, "n_head": 8, "vocab_size": 50_000},
    "small-lm": {**LM, "n_layer": 6, "n_embd": 512, "n_head": 4, "vocab_size": 8_000},
    "tiny-lm": {**LM, "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 200},
    "paper-mt": marian(1024, 6, 16, 32_768),
    "small-mt": marian(512, 3, 8, 8_000),
    "tiny-mt": marian(64, 2, 2, 200, 128),
}
"""Sizes of models with random weights. The paper's language model has a plain output layer here."""
RANDOM = re.compile(r"(?:(?P<label>[^=:]+)=)?random:(?P<shape>[\w-]+)(?P<options>(?:,[\w]+(?:=[^,]+)?)*)")


def load_models(names: Sequence[str], *, dtype: str, device: str) -> dict[str, PreTrainedModel]:
    """Load or build the models of a benchmark, by name or label. Raises T2RError if two have the same name.

    Models with random weights of the same shape share their weights, as far as they have the same ones."""
    models: dict[str, PreTrainedModel] = {}
    bases: dict[str, PreTrainedModel] = {}
    precision = choose_dtype(dtype)
    for name in names:
        model, source = None, name
        if "random:" in name:
            label, model = random_model(name, bases, device)
        else:
            label, source = labeled(name)
        if label in models:
            raise T2RError(f"two models have the name {label}: give one of them a label, LABEL={source}")
        models[label] = load_model(source, dtype=dtype, device=device) if model is None else model
    for name, label in zip(names, models, strict=True):
        if "random:" in name and not isinstance(precision, str):  # after merging, which is exact in float32
            cast(Any, models[label]).to(precision)
    return models


def labeled(name: str) -> tuple[str, str]:
    """Return the label and the source of a model: `LABEL=SOURCE`, or the source itself."""
    label, equals, source = name.partition("=")
    return (label, source) if label and source and equals and kind_of(name) is None else (name, name)


def random_model(text: str, bases: dict[str, PreTrainedModel], device: str) -> tuple[str, PreTrainedModel]:
    """Build a model from `LABEL=random:SHAPE,option=value,...,merged`, in float32, and return its label and the model.

    `bases` receives the softmax model of the shape."""
    found = RANDOM.fullmatch(text)
    if found is None:
        raise T2RError(f"{text!r}: write random:SHAPE, or LABEL=random:SHAPE,option=value,merged, with swap options")
    shape = found["shape"]
    options: dict[str, Any] = {}
    for part in filter(None, found["options"].split(",")):
        name, equals, value = part.partition("=")
        if (name not in OPTIONS or not equals) and part != "merged":
            raise T2RError(f"{text!r}: no swap option {part!r}; the options are {', '.join(OPTIONS)}, and merged")
        options[name] = parse_yaml(value, f"{text!r}: the value of {name}") if equals else True
    merged = options.pop("merged", False)
    place = torch.device(device)
    if shape not in bases:
        config = AutoConfig.for_model(**fields_of(shape))
        auto: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        with torch.random.fork_rng([place] if place.type == "cuda" else []), place:
            torch.manual_seed(0)
            bases[shape] = auto.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    model: Any = bases[shape]
    if options or merged:
        model = swap(sharing_weights(model), **options)
        model = merge(model, force=True) if merged else model
    return found["label"] or text, model


def fields_of(shape: str) -> dict[str, Any]:
    """Return the fields of the configuration of a shape, or of a preset of `t2r pretrain`."""
    if shape in SHAPES:
        return SHAPES[shape]
    if shape not in shipped_presets():
        raise T2RError(f"no shape {shape!r}: choose one of {', '.join([*SHAPES, *shipped_presets()])}")
    preset = load_preset(shape)
    words = preset.tokenizer.get("vocab_size", preset.model.get("vocab_size"))
    if words is None:
        raise T2RError(f"the vocabulary of {shape} depends on its text, so that it has no size before training")
    start = {"decoder_start_token_id": 2, "forced_eos_token_id": None} if preset.translates else {}
    return {"vocab_size": words, **TOKENS, **start, **preset.model}


def check_shape(shape: str, *, translates: bool) -> None:
    """Raise T2RError unless a shape is an encoder-decoder, for a benchmark of translation, or else a language model."""

    def is_seq2seq(name: str) -> bool:
        return bool(CONFIG_MAPPING[fields_of(name)["model_type"]].is_encoder_decoder)

    if is_seq2seq(shape) != translates:
        kinds = ("a language model", "an encoder-decoder")
        fitting = [name for name in SHAPES if is_seq2seq(name) == translates]
        raise T2RError(
            f"the shape {shape} is {kinds[not translates]}; this benchmark requires {kinds[translates]}: choose "
            f"{', '.join(fitting[:-1])} or {fitting[-1]}"
        )


def add_feature_sizes(models: dict[str, PreTrainedModel], sizes: Sequence[int]) -> None:
    """Add the first model, swapped with each feature size and merged if possible, for the speed by feature size.

    The feature maps are not trained. The weights are those of the first model, not copies."""
    if not sizes:
        return
    first = next(iter(models.values()))
    if isinstance(first, T2RModel):
        raise T2RError("feature sizes are measured by swapping the first model, which is swapped already")
    rotary = family_of(first).positions != "rotary"  # rotated queries and keys cannot be merged
    for size in sizes:
        name = f"T2R {size}"
        if name in models:
            raise T2RError(f"two models have the name {name}: give each feature size once")
        model: Any = swap(sharing_weights(first), feature_map="t2r", feature_size=size, rotary=rotary)
        try:
            models[name] = merge(model, force=True)
        except T2RError:
            models[name] = model


def feature_sizes(model: PreTrainedModel) -> list[int] | None:
    """Return the feature sizes of a model, from the largest; None if it has softmax layers."""
    if not isinstance(model, T2RModel) or model.grows():
        return None
    return sorted({int(site.feature_map.feature_size) for site in recurrent_sites(cast(Any, model))}, reverse=True)


def half_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype in which states are stored, by name; None for float32."""
    known = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    if name is not None and name not in (*known, "float32"):
        raise T2RError(f"no state dtype {name!r}: choose float32, bfloat16 or float16")
    return known.get(name or "")


def check_alike(models: Mapping[str, PreTrainedModel]) -> None:
    """Raise T2RError unless all models have the same dtype and device."""
    first = next(iter(models.values()))
    for name, model in models.items():
        if (model.dtype, model.device) != (first.dtype, first.device):
            raise T2RError(
                f"{name} is {model.dtype} on {model.device}, but the first model is {first.dtype} on {first.device}: "
                "give one for all, for example --dtype float32"
            )


def with_positions(model: PreTrainedModel, length: int) -> PreTrainedModel:
    """Return the model if it has this many positions, otherwise a copy with its position embeddings repeated.

    The copy is only for timing: its output is not meaningful."""
    try:
        family = family_of(model)
    except T2RError:  # an unknown family: its forward raises if there are too few positions
        return model
    limit = family.max_positions(model)
    if limit is None or limit >= length:
        family.extend_positions(model, length)
        return model
    model = copy.deepcopy(model)
    words = model.get_input_embeddings()
    tables = [m for m in model.base_model.modules() if isinstance(m, nn.Embedding) and m is not words]
    # Some families keep rows for padding before those of the positions.
    tables = [table for table in tables if 0 <= table.num_embeddings - limit <= 2]
    if not tables:
        raise T2RError(f"this {family.model_type} model has {limit} positions, and their embeddings were not found")
    for table in tables:
        extra = table.num_embeddings - limit
        times = -(-length // limit)
        weight = torch.cat([table.weight.detach()[:extra], table.weight.detach()[extra:].repeat(times, 1)])
        table.weight = nn.Parameter(weight, requires_grad=False)
        table.num_embeddings = len(weight)
    model.config.max_position_embeddings = limit * times
    return model
