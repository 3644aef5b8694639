"""Proof of a surgery, for families that are not tested.

The tested families are known to be what their files say. Any other has been found by looking, so it must show on the
very model that is swapped that it was understood: or else the model is given back as it came.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from t2r import compat
from t2r.attention.recurrence import exact_attention
from t2r.config import T2RConfig
from t2r.surgery.adapters import change_class, family_of, refusal
from t2r.surgery.install import install

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""How far two ways to the same logits may be apart, of the largest; 0.05 in half precision."""


def install_proved(model: PreTrainedModel, config: T2RConfig) -> None:
    """`install`, with proof where the family is not a tested one."""
    family = family_of(model)
    if family.tested or model.device.type == "meta":
        install(model, config)
        return
    stock = [(site.module, type(site.module)) for site in family.sites(model)]
    implementation, training = compat.attention_implementation(model), model.training
    try:
        model.eval()
        inputs = small_batch(model)
        with torch.no_grad():
            expected = model(**inputs, use_cache=False).logits
            install(model, config)
            doubt = misunderstanding(model, inputs, expected)
    finally:
        model.train(training)
    if doubt is None:
        return
    for module, stock_class in stock:
        change_class(module, stock_class)
        if "feature_map" in module._modules:
            del module.feature_map
        for name in ("rotary", "direct"):
            vars(module).pop(name, None)
    compat.set_attention_implementation(model, implementation)
    raise refusal(family.model_type, doubt)


def misunderstanding(model: PreTrainedModel, inputs: dict[str, Tensor], expected: Tensor) -> str | None:
    """What is wrong with a swapped model, if anything: exact attention in its sites must be the model that was, and
    the recurrence read in two pieces must be the recurrence read at once."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    half, cache = ids.shape[1] // 2, DynamicCache()
    try:
        with exact_attention(model):
            exact = model(**inputs, use_cache=False).logits
        whole = model(**inputs, use_cache=False).logits
        first = model(ids[:, :half], attention_mask=mask[:, :half], past_key_values=cache, use_cache=True).logits
        rest = model(ids[:, half:], attention_mask=mask, past_key_values=cache, use_cache=True).logits
    except Exception as error:  # whatever another's forward may raise
        return f"an attempt failed ({type(error).__name__}: {error})".replace("\n", " ")
    for actual, wanted, doubt in (
        (exact, expected, "softmax attention in its swapped layers is not the model as it was"),
        (torch.cat([first, rest], dim=1), whole, "its recurrent layers do not continue from their state"),
    ):
        difference = (actual - wanted)[mask.bool()].abs().max().item()
        largest = wanted[mask.bool()].abs().max().item()
        if not difference <= TOLERANCES.get(actual.dtype, 0.05) * max(1.0, largest):
            return f"{doubt} (logits differ by {difference:.2g})"
    return None


def small_batch(model: PreTrainedModel) -> dict[str, Tensor]:
    """Two texts of random tokens, one of them padded on the left."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (2, 8), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
