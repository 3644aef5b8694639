"""Equivalence check of a swap, for untested families.

The adapters of tested families are known to be correct. For other models the attention is detected automatically, so
the swap is checked on the model itself.
"""

from __future__ import annotations

import logging
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from t2r.attention.recurrence import exact_attention
from t2r.config import T2RConfig
from t2r.errors import T2RError
from t2r.model.logits import evaluating
from t2r.surgery.adapters import Family, Site, family_of, refusal
from t2r.surgery.install import install

logger = logging.getLogger(__name__)

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest difference of logits, relative to the largest logit. 0.05 in half precision."""


LEAK = 0.01
"""Largest effect of later tokens on a causal model, relative to that of earlier ones. There is only rounding."""


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
    try:
        with evaluating(model):
            expected = model(**inputs, use_cache=False).logits
    except Exception as error:  # a configuration may be accepted, and describe a model that cannot run
        reason = f"its own forward fails ({type(error).__name__}: {error})".replace("\n", " ")
        raise refusal(family.model_type, reason) from error
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


def check_saved(model: Any) -> None:
    """Raise T2RError unless a model of the saved configuration has the same tensors: before hours of training."""
    if model.t2r_family.tested:
        return
    try:
        with TemporaryDirectory() as folder, torch.device("meta"):
            model.saved_config().save_pretrained(folder)
            options: dict[str, Any] = {}
            recurrent, base = type(model).building(T2RConfig.from_pretrained(folder), options)
            again = recurrent(base, **options)
        built, own = ({name: x.shape for name, x in m.state_dict().items()} for m in (again, model))
        different = sorted(name for name in built.keys() | own.keys() if built.get(name) != own.get(name))
        doubt = f"{different[0]} has another shape when it is loaded" if different else None
    except Exception as error:  # each configuration and model checks its fields in its own way
        doubt = f"it cannot be saved and loaded ({type(error).__name__}: {error})".replace("\n", " ")
    if doubt is not None:
        raise refusal(model.t2r_family.model_type, doubt)


def check_causal(model: PreTrainedModel) -> None:
    """Raise T2RError for a language model that reads the tokens after a position, or none before it."""
    ids = small_batch(model)["input_ids"][:1]
    half = ids.shape[1] // 2
    later, earlier = ids.clone(), ids.clone()
    later[:, half:], earlier[:, :half] = ids[:, half:].flip(1).roll(1, 1), ids[:, :half].roll(1, 1)
    kind = model.config.model_type
    try:
        with evaluating(model):
            whole, first, rest = (model(input_ids=x, use_cache=False).logits for x in (ids, later, earlier))
    except Exception as error:  # an unknown forward may raise anything
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise T2RError(f"this {kind} model cannot read tokens ({reason})") from error
    leak, reach = (x.abs().max().item() for x in ((whole - first)[:, :half], (whole - rest)[:, half:]))
    if not reach:
        raise T2RError(f"this {kind} model reads no token before a position: give it layers with attention")
    if not leak <= LEAK * reach:
        raise T2RError(
            f"{kind} reads the tokens after each position: only causal language models and encoder-decoders can be "
            "trained (some models are causal with --model-set is_decoder=true)"
        )


def small_batch(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return two sequences of random tokens, one of them padded on the left."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (2, 8), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
