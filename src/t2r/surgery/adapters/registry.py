"""The registry of model families, by model type."""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib import import_module

from transformers import PreTrainedModel

from t2r.surgery.adapters import plain
from t2r.surgery.adapters.base import Family
from t2r.surgery.adapters.generic import discover
from t2r.surgery.adapters.names import FAMILIES


@functools.cache
def family(model_type: str) -> Family:
    """Return a family: a row of `plain`, or the FAMILY of the module with its name."""
    if model_type in plain.FAMILIES:
        return plain.FAMILIES[model_type]
    module = import_module(f"t2r.surgery.adapters.{model_type}")
    found: Family = module.FAMILY
    return found if found.about else replace(found, about=(module.__doc__ or "").split(". ")[0].strip().rstrip("."))


def family_of(model: PreTrainedModel) -> Family:
    """Return the family of a model. For model types without an adapter, its attention is detected.

    Raises T2RError if the model cannot be swapped."""
    model_type = model.config.model_type
    if model_type in FAMILIES:
        found = family(model_type)
        found.check(model)
        return found
    return discover(model)
