"""`swap`: a transformer's attention becomes recurrent, in place."""

from __future__ import annotations

from typing import Any, cast

from transformers import PreTrainedModel

from t2r.config import OPTIONS, T2RConfig
from t2r.errors import T2RError
from t2r.model.modeling import T2RModel, t2r_class
from t2r.model.swapped import SwappedModel
from t2r.options import refuse_unknown
from t2r.surgery.proof import install_proved


def swap(model: PreTrainedModel, config: T2RConfig | None = None, **options: Any) -> SwappedModel:
    """Make a transformer's attention recurrent, in place, and return it.

        model = t2r.swap(AutoModelForCausalLM.from_pretrained("gpt2"), feature_map="hedgehog")

    Options are those of `T2RConfig`; with a `config` they override it. The weights stay as they are: the maps are
    new and untrained, so a swapped model has yet to be trained (`t2r convert` does all of it).
    """
    refuse_unknown(options, OPTIONS)
    if isinstance(model, T2RModel):
        raise T2RError("this model is swapped already: start again from the base model")
    if hasattr(model, "_hf_hook") and any(weight.is_meta for weight in model.parameters()):
        raise T2RError("some weights of this model are offloaded (to disk, or to the CPU beside a GPU): load all of it")
    chosen = {name: getattr(config, name) for name in OPTIONS} if config is not None else {}
    config = T2RConfig(**{**chosen, **options})
    base: Any = type(model)
    recurrent: Any = t2r_class(base)
    install_proved(model, config)
    model.__class__ = recurrent
    swapped = cast(SwappedModel, model)
    swapped.t2r_config = config
    return swapped
