"""The registry of model families, by model type."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from transformers import PreTrainedModel

from t2r.surgery.adapters.base import Family
from t2r.surgery.adapters.generic import discover
from t2r.surgery.adapters.names import FAMILIES


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
    return discover(model)
