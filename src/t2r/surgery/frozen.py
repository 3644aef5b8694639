"""Which parameters are trained by nothing: one rule for stages, loading and merging."""

from __future__ import annotations

from torch import nn

from t2r.attention.recurrence import Recurrence
from t2r.surgery.adapters.base import Family


def frozen_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that are never trained: computed tables of positions, and what the sites say."""
    sites = [module for module in model.modules() if isinstance(module, Recurrence)]
    tables = [module for module in model.modules() if Family.tables in type(module).__name__]
    found = [*(p for site in sites for p in site.frozen_parameters()), *(p for x in tables for p in x.parameters())]
    return {id(parameter) for parameter in found}


def freeze(model: nn.Module) -> None:
    """Set `requires_grad` of these parameters to False, and leave the others as they are."""
    frozen = frozen_parameters(model)
    for parameter in model.parameters():
        if id(parameter) in frozen:
            parameter.requires_grad_(False)


def unfreeze(model: nn.Module) -> None:
    """Set `requires_grad` of all other parameters to True, as of a model that was just built."""
    model.requires_grad_(True)
    freeze(model)
