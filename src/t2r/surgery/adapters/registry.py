"""The registry of model families, by model type."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from transformers import PreTrainedModel

from t2r.errors import T2RError
from t2r.surgery.adapters.base import Family

# Model types. The module of the same name in this package (with underscores for hyphens) defines FAMILY.
FAMILIES = (
    "adaptive_lm",
    "bart",
    "blenderbot",
    "blenderbot-small",
    "falcon",
    "fsmt",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "gptj",
    "granite",
    "llama",
    "m2m_100",
    "marian",
    "mbart",
    "mistral",
    "mt5",
    "olmo",
    "olmo2",
    "opt",
    "pegasus",
    "phi",
    "phi3",
    "plbart",
    "qwen2",
    "qwen3",
    "stablelm",
    "t5",
    "umt5",
)


def family(model_type: str) -> Family:
    return module_of(model_type).FAMILY


def module_of(model_type: str) -> Any:
    return import_module(f"t2r.surgery.adapters.{model_type.replace('-', '_')}")


def family_of(model: PreTrainedModel) -> Family:
    """Return the family of a model. For model types without an adapter, its attention is detected.

    Raises T2RError if the model cannot be swapped."""
    model_type = model.config.model_type
    if model_type in FAMILIES:
        found = family(model_type)
        found.check(model)
        return found
    from t2r.surgery.adapters.generic import discover

    return discover(model)


def refusal(model_type: str, reason: str) -> T2RError:
    """Return the error for a model that cannot be swapped."""
    return T2RError(
        f"models of type {model_type!r} cannot be swapped: {reason}; supported types are {', '.join(FAMILIES)}"
    )
