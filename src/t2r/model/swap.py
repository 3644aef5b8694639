"""`swap`: a transformer's attention becomes recurrent, in place."""

from __future__ import annotations

from os import PathLike
from typing import Any, cast

from transformers import PreTrainedModel

from t2r.config import OPTIONS, T2RConfig
from t2r.errors import T2RError
from t2r.model.modeling import T2RModel, t2r_class
from t2r.model.swapped import SwappedModel
from t2r.options import refuse_unknown
from t2r.surgery.adapters import change_class
from t2r.surgery.proof import install_proved


def swap(model: PreTrainedModel, config: T2RConfig | None = None, **options: Any) -> SwappedModel:
    """Make a transformer's attention recurrent, in place, and return it.

        model = t2r.swap(AutoModelForCausalLM.from_pretrained("gpt2"), feature_map="hedgehog")

    Options are those of `T2RConfig`; with a `config` they override it. The weights stay as they are: the maps are
    new and untrained, so a swapped model has yet to be trained (`t2r convert` does all of it).
    """
    refuse_other_objects(model)
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
    change_class(model, recurrent)
    swapped = cast(SwappedModel, model)
    swapped.adopt(config)
    # An adapter that PEFT saves names its base model by this: loaded on that, it would get softmax attention.
    if name := model.name_or_path:
        model.name_or_path = f"{name}, swapped by t2r in memory: save the swapped model, and load the adapter on that"
    return swapped


def refuse_other_objects(model: Any) -> None:
    """What is not a model of transformers, in words for what it probably is."""
    if isinstance(model, PreTrainedModel):
        return
    if isinstance(model, str | PathLike):
        raise T2RError(f"swap takes a model, not a name: load {model!r} first, with AutoModelForCausalLM or t2r.load")
    if hasattr(model, "_orig_mod"):
        raise T2RError("this model is compiled: swap it first, then torch.compile it")
    if hasattr(model, "peft_config"):
        raise T2RError("this model has PEFT adapters around it: merge them first (model = model.merge_and_unload())")
    raise T2RError(f"swap takes a model of transformers, not a {type(model).__name__}")
