"""Every family by its model type: a file a family, a line each here."""

from __future__ import annotations

from importlib import import_module

from transformers import PreTrainedModel

from t2r.errors import T2RError
from t2r.surgery.adapters.base import Family

# model_type -> the module of that name here, which defines FAMILY. Imported when it is needed.
FAMILIES = (
    "adaptive_lm",
    "bart",
    "fsmt",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "granite",
    "llama",
    "m2m_100",
    "marian",
    "mbart",
    "mistral",
    "olmo",
    "olmo2",
    "opt",
    "pegasus",
    "phi",
    "qwen2",
    "qwen3",
    "t5",
)


def family(model_type: str) -> Family:
    return import_module(f"t2r.surgery.adapters.{model_type}").FAMILY


def family_of(model: PreTrainedModel) -> Family:
    """The family of this model: one of ours or, for a type that has no file, one found by looking."""
    model_type = model.config.model_type
    if model_type in FAMILIES:
        return family(model_type)
    from t2r.surgery.adapters.generic import discover

    return discover(model)


def refusal(model_type: str, reason: str) -> T2RError:
    """Why a model that has no file here is not swapped."""
    return T2RError(f"models of type {model_type!r} cannot be swapped: {reason}; supported are {', '.join(FAMILIES)}")
