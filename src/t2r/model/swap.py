"""`swap`: replace the softmax attention of a transformer by recurrent attention."""

from __future__ import annotations

import copy
from os import PathLike
from typing import Any, cast

from transformers import PreTrainedConfig, PreTrainedModel

from t2r.config import SWAP, T2RConfig
from t2r.errors import T2RError
from t2r.model.modeling import T2RModel, t2r_class
from t2r.model.proof import check_saved, install_proved
from t2r.model.swapped import SwappedModel
from t2r.options import refuse_unknown
from t2r.options.entrance import entrance
from t2r.surgery.adapters import change_class
from t2r.surgery.undo import undoing


@entrance(unchecked=["model"])
def swap(model: PreTrainedModel, config: T2RConfig | None = None, **options: Any) -> SwappedModel:
    """Replace the attention of a transformer by recurrent attention, in place, and return the model.

        model = t2r.swap(AutoModelForCausalLM.from_pretrained("gpt2"), feature_map="hedgehog")

    The weights of the model are unchanged. The feature maps are untrained, so a swapped model must be trained before
    use; `t2r.convert` swaps and trains.

    Args:
        model: a transformers model.
        config: the swap options. None: the defaults.
        options: fields of `t2r.options.SwapOptions`, or `plan` (`t2r.plans.MemoryPlan`), which override `config`.

    Raises T2RError if the model or an option is not supported. The model is then as it was.
    """
    refuse_other_objects(model)
    refuse_unknown(options, SWAP)
    if isinstance(model, T2RModel):
        raise T2RError("this model is already swapped: start from the base model")
    if hasattr(model, "_hf_hook") and any(weight.is_meta for weight in model.parameters()):
        raise T2RError("some weights of this model are offloaded to disk or CPU: load the model without offloading")
    chosen = {name: getattr(config, name) for name in SWAP} if config is not None else {}
    config = T2RConfig(**{**chosen, **options})
    if model.config.is_encoder_decoder:
        config.refuse_idle()
    base: Any = type(model)
    recurrent: Any = t2r_class(base)
    with undoing(model):
        own_configuration(model)
        install_proved(model, config)
        change_class(model, recurrent)
        swapped = cast(SwappedModel, model)
        swapped.take_configuration(config)
        check_saved(swapped)
    # PEFT saves this name as the base model of an adapter. On that model, the adapter would run with softmax attention.
    if name := model.name_or_path:
        model.name_or_path = f"{name}, swapped by t2r in memory: save the swapped model, and load the adapter on that"
    return swapped


def own_configuration(model: PreTrainedModel) -> None:
    """Give the model a configuration of its own: another model, such as its teacher, may have the same object."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                setattr(module, name, copies[id(value)])


def refuse_other_objects(model: Any) -> None:
    """Raise T2RError if the object is not a transformers model."""
    if isinstance(model, PreTrainedModel):
        return
    if isinstance(model, str | PathLike):
        raise T2RError(f"swap requires a model, not a name: load {model!r} with AutoModelForCausalLM or t2r.load first")
    if hasattr(model, "_orig_mod"):
        raise T2RError("this model is compiled: swap it first, then call torch.compile")
    if hasattr(model, "peft_config"):
        raise T2RError("this model has PEFT adapters: merge them first (model = model.merge_and_unload())")
    raise T2RError(f"swap requires a transformers model, not a {type(model).__name__}")
