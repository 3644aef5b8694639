"""Models whose softmax attention reads a window of the last tokens and the sinks: the same weights, less memory."""

from __future__ import annotations

import copy
from typing import Any, cast

from transformers import PreTrainedModel

from t2r.attention.memories import Shape
from t2r.attention.recurrence import Recurrence
from t2r.config import T2RConfig
from t2r.errors import T2RError
from t2r.model.modeling import T2RModel, keeps_everything, t2r_class
from t2r.model.proof import install_checked
from t2r.plans import MemoryPlan
from t2r.surgery.adapters import change_class, family_of


def with_windows(model: PreTrainedModel, tokens: int, sinks: int = 0, nbits: int = 16) -> T2RModel:
    """Return a copy of a language model, with the same parameters, whose causal softmax attention has windows.

    Its memory is a ring buffer of the last `tokens` tokens and of the first `sinks`, so a decoding step takes the same
    time and memory at any length. With `nbits=8`, keys and values are rounded to 8 bits. Of a swapped model, the
    softmax layers get windows.

    Raises T2RError if the model has no such attention, or cannot have windows."""
    family, shared = family_of(model), sharing_weights(model).eval()
    sites = [site for site in family.sites(shared) if not site.cross and keeps_everything(site.module)]
    if not sites:
        raise T2RError("this model has no softmax attention to limit")
    heads = [family.shape(site.module).num_key_value_heads for site in sites]
    if not isinstance(model, T2RModel):
        states = tuple((False,) * own for own in heads)
        plan = MemoryPlan(tuple((tokens,) * own for own in heads), sinks, states, nbits)
        config = T2RConfig(plan=plan.to_dict())
        install_checked(shared, config)
        change_class(shared, cast(Any, t2r_class(cast(Any, type(shared)))))
        cast(T2RModel, shared).take_configuration(config)
        return cast(T2RModel, shared)
    if family.positions == "relative":
        raise T2RError(f"{family.model_type} models cannot have windows: their positions are a bias on the scores")
    for site, own in zip(sites, heads, strict=True):
        if not isinstance(site.module, Recurrence):
            change_class(site.module, family.recurrent_class(site.module))
        module: Any = site.module
        module.keeps_softmax = False
        module.give_window(Shape((tokens,) * own, sinks, nbits), next(module.parameters()).device)
    return cast(T2RModel, shared)


def sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the modules with the same parameters and buffers."""
    return copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})
