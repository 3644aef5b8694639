"""Every family by its model type: a file a family, a line each here."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from transformers import PreTrainedModel

from t2r.errors import T2RError
from t2r.surgery.adapters.base import Family

# model_type -> the module of that name here (a hyphen is an underscore there), which defines FAMILY.
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
    """The family of this model: one of ours or, for a type that has no file, one found by looking."""
    model_type = model.config.model_type
    if model_type in FAMILIES:
        found = family(model_type)
        found.check(model)
        return found
    from t2r.surgery.adapters.generic import discover

    return discover(model)


def refusal(model_type: str, reason: str) -> T2RError:
    """Why a model that has no file here is not swapped."""
    return T2RError(f"models of type {model_type!r} cannot be swapped: {reason}; supported are {', '.join(FAMILIES)}")
