"""Softmax models in the engine: a swapped model that keeps all its layers and shares the weights."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import PreTrainedModel

from t2r import compat
from t2r.attention.interface import NAME
from t2r.attention.recurrence import Recurrence, computes_exactly, mode_of, swapped_sites
from t2r.config import T2RConfig
from t2r.errors import T2RError
from t2r.model.logits import evaluating
from t2r.model.modeling import T2RModel, t2r_class
from t2r.model.proof import TOLERANCES, small_batch
from t2r.model.windows import sharing_weights
from t2r.surgery.adapters import family_of
from t2r.surgery.adapters.base import change_class
from t2r.surgery.install import keep_windows, sliding_sites


def on_the_engine(model: PreTrainedModel) -> Any:
    """Return a model that the engine can decode, and that computes the same. It shares the weights of the model.

    A swapped model is returned itself. For another model, and for a swapped model that computes exact attention now,
    all layers are softmax layers of a swapped model. If the family of the model is not tested, its logits are compared.

    Raises T2RError if t2r does not support the model."""
    swapped = isinstance(model, T2RModel)
    if swapped and not computes_exactly(cast(Any, model)):
        return model
    if not all(map(mode_of, swapped_sites(model))):
        raise T2RError("some of its layers compute exact attention")
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise T2RError("the model is on several devices")
    family, shared = family_of(model), sharing_weights(model)
    for site in swapped_sites(shared):
        for name in ("feature_map", "window_sizes", "window", "stateful", "state_heads", "state_numbers"):
            if name in site._modules or name in site._buffers or name in vars(site):
                delattr(site, name)
        change_class(site, type(site).__bases__[1])  # the class before the swap
    # FSMT has classes of its own for softmax layers, which the softmax layers of a swapped model have already.
    stock = [site for site in family.sites(shared) if not isinstance(site.module, Recurrence)]
    keep_windows(family, sliding_sites(family, shared, stock))
    family.finish(shared, [], [site for site in stock if not isinstance(site.module, Recurrence)])
    compat.set_attention_implementation(shared, NAME)
    if not swapped:
        change_class(shared, cast(Any, t2r_class(cast(Any, type(model)))))
    layers = len(family.decoder_layers(shared))
    cast(T2RModel, shared).take_configuration(T2RConfig(softmax_layers=list(range(layers))))
    if not family.tested:
        compare(model, cast(T2RModel, shared))
    return shared


@torch.no_grad()
def compare(model: Any, shared: Any) -> None:
    """Raise T2RError unless both models give the same logits, at once and, with a cache, in two parts."""
    inputs, cache = small_batch(model), shared.make_cache()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    half, limit = ids.shape[1] // 2, TOLERANCES.get(model.dtype, 0.05)
    with evaluating(model, shared):
        expected = model(**inputs, use_cache=False).logits
        try:
            whole = shared(**inputs, use_cache=False).logits
            first = shared(ids[:, :half], attention_mask=mask[:, :half], past_key_values=cache).logits
            rest = shared(ids[:, half:], attention_mask=mask, past_key_values=cache).logits
        except Exception as error:  # an unknown forward may raise anything
            raise untested(model, f"{type(error).__name__}: {error}".replace("\n", " ")) from error
    for found in (whole, torch.cat([first, rest], dim=1)):
        difference, largest = (x[mask.bool()].abs().max().item() for x in (found - expected, expected))
        if not difference <= limit * max(1.0, largest):
            raise untested(model, f"logits differ by {difference:.2g}")


def untested(model: Any, reason: str) -> T2RError:
    return T2RError(f"the attention of {model.config.model_type}, an untested model type, is not understood: {reason}")
