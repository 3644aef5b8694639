"""The registry of model families, by model type."""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib import import_module
from typing import TypeVar

from transformers import PreTrainedModel

from t2r.surgery.adapters import plain
from t2r.surgery.adapters.base import Family
from t2r.surgery.adapters.generic import discover
from t2r.surgery.adapters.names import FAMILIES

Model = TypeVar("Model", bound=PreTrainedModel)


@functools.cache
def family(model_type: str) -> Family:
    """Return a family: a row of `plain`, or the FAMILY of the module with its name."""
    if model_type in plain.FAMILIES:
        return plain.FAMILIES[model_type]
    module = import_module(f"t2r.surgery.adapters.{model_type}")
    found: Family = module.FAMILY
    return found if found.about else replace(found, about=(module.__doc__ or "").split(". ")[0].strip().rstrip("."))


def repaired(model: Model) -> Model:
    """Repair what a base model computes wrongly with some versions of transformers, in place, and return it.

    For each model that t2r loads, makes or is given, before it computes anything."""
    if model.config.model_type in FAMILIES:
        family(model.config.model_type).repair(model)
    return model


def family_of(model: PreTrainedModel) -> Family:
    """Return the family of a model. For model types without an adapter, its attention is detected.

    Raises T2RError if the model cannot be swapped."""
    model_type = model.config.model_type
    if model_type in FAMILIES:
        found = family(model_type)
        found.check(model)
        return found
    return discover(model)
