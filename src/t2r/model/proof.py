"""Equivalence check of a swap, for untested families.

The adapters of tested families are known to be correct. For other models the attention is detected automatically, so
the swap is checked on the model itself.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from t2r.attention.recurrence import exact_attention
from t2r.config import T2RConfig
from t2r.model.logits import evaluating
from t2r.surgery.adapters import Family, Site, family_of, refusal
from t2r.surgery.install import install

logger = logging.getLogger(__name__)

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest difference of logits, relative to the largest logit. 0.05 in half precision."""


def announce(family: Family, model: PreTrainedModel, swapped: list[Site]) -> None:
    for notice in family.notices(model, swapped):
        logger.warning(notice)


def install_proved(model: PreTrainedModel, config: T2RConfig) -> None:
    """Run `install_checked`. Notices tell what the swap changes; a model that is loaded later does not repeat them."""
    family = family_of(model)
    announce(family, model, install_checked(model, config))


def install_checked(model: PreTrainedModel, config: T2RConfig) -> list[Site]:
    """Run `install`, with an equivalence check if the family is not tested. Raises T2RError if the check fails."""
    family = family_of(model)
    if family.tested or model.device.type == "meta":
        return install(model, config)
    inputs = small_batch(model)
    with evaluating(model):
        expected = model(**inputs, use_cache=False).logits
    swapped = install(model, config)
    with evaluating(model):
        doubt = misunderstanding(model, inputs, expected)
    if doubt is not None:
        raise refusal(family.model_type, doubt)
    return swapped


def misunderstanding(model: PreTrainedModel, inputs: dict[str, Tensor], expected: Tensor) -> str | None:
    """Return why a swapped model fails the equivalence check, or None if it passes.

    With exact attention in its sites, the model must give the logits of the base model. The recurrence must give the
    same logits for a sequence processed in two parts as for the whole sequence."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    half, cache = ids.shape[1] // 2, DynamicCache()
    try:
        with exact_attention(model):
            exact = model(**inputs, use_cache=False).logits
        with exact_attention(model, observer=lambda *observed: None):  # as in a transfer
            seen = model(**inputs, use_cache=False).logits
        whole = model(**inputs, use_cache=False).logits
        first = model(ids[:, :half], attention_mask=mask[:, :half], past_key_values=cache, use_cache=True).logits
        rest = model(ids[:, half:], attention_mask=mask, past_key_values=cache, use_cache=True).logits
    except Exception as error:  # an unknown forward may raise anything
        return f"its forward failed after the swap ({type(error).__name__}: {error})".replace("\n", " ")
    for actual, wanted, doubt in (
        (exact, expected, "with softmax attention in its swapped layers it does not match the base model"),
        (seen, expected, "its queries and keys are not all rotated, or normalized after that: swap with rotary=True"),
        (torch.cat([first, rest], dim=1), whole, "its recurrent layers do not continue from their state"),
    ):
        difference = (actual - wanted)[mask.bool()].abs().max().item()
        largest = wanted[mask.bool()].abs().max().item()
        if not difference <= TOLERANCES.get(actual.dtype, 0.05) * max(1.0, largest):
            return f"{doubt} (logits differ by {difference:.2g})"
    return None


def small_batch(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return two sequences of random tokens, one of them padded on the left."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (2, 8), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
