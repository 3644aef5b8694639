"""Softmax models in the engine: a swapped model that keeps all its layers and shares the weights."""

from __future__ import annotations

import copy
from typing import Any, cast

from transformers import PreTrainedModel

from t2r import compat
from t2r.attention.interface import NAME
from t2r.attention.recurrence import Recurrence, computes_exactly, mode_of, recurrent_sites
from t2r.config import T2RConfig
from t2r.errors import T2RError
from t2r.model.modeling import T2RModel, t2r_class
from t2r.surgery.adapters import family_of
from t2r.surgery.adapters.base import change_class
from t2r.surgery.install import keep_windows, sliding_sites


def on_the_engine(model: PreTrainedModel) -> Any:
    """Return a model that the engine can decode, and that computes the same. It shares the weights of the model.

    A swapped model is returned itself. For another model, and for a swapped model that computes exact attention now,
    all layers are softmax layers of a swapped model. Raises T2RError if t2r does not support the model."""
    swapped = isinstance(model, T2RModel)
    if swapped and not computes_exactly(cast(Any, model)):
        return model
    if not all(map(mode_of, recurrent_sites(model))):
        raise T2RError("some of its layers compute exact attention")
    family, shared = family_of(model), sharing_weights(model)
    for site in recurrent_sites(shared):
        del site.feature_map
        change_class(site, type(site).__bases__[1])  # the class before the swap
    # FSMT has classes of its own for softmax layers, which the softmax layers of a swapped model have already.
    stock = [site for site in family.sites(shared) if not isinstance(site.module, Recurrence)]
    keep_windows(family, sliding_sites(family, shared, stock))
    family.finish(shared, [], [site for site in stock if not isinstance(site.module, Recurrence)])
    compat.set_attention_implementation(shared, NAME)
    if not swapped:
        change_class(shared, cast(Any, t2r_class(cast(Any, type(model)))))
    layers = len(family.decoder_layers(shared))
    cast(T2RModel, shared).adopt(T2RConfig(softmax_layers=list(range(layers))))
    return shared


def sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the modules with the same parameters and buffers."""
    return copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})
