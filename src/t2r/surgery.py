"""The surgery: walk a model's attention sites and give each a feature map and a recurrent class."""

from __future__ import annotations

import inspect
import logging

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from t2r.adapters import Family, Site, change_class, family_of, refusal
from t2r.attention import NAME, InterfaceAttention, ProjectionAttention, Recurrence, exact_attention
from t2r.config import T2RConfig
from t2r.errors import T2RError
from t2r.feature_maps import FeatureMap, feature_map_class, make_feature_map

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""How far two ways to the same logits may be apart, of the largest; 0.05 in half precision."""

logger = logging.getLogger(__name__)


def install(model: PreTrainedModel, config: T2RConfig) -> list[Site]:
    """Swap every site that the configuration does not keep, in place. Everything is checked before anything is
    touched. Returns the sites that were swapped."""
    family = family_of(model)
    sites = list(family.sites(model))
    if any(isinstance(site.module, Recurrence) for site in sites):
        raise T2RError("this model is swapped already: start again from the base model")
    kept = config.kept_layers(len(family.decoder_layers(model)))
    chosen = [site for site in sites if site.layer not in kept]
    if not chosen:
        raise T2RError("every layer is kept as softmax attention: nothing would be swapped")
    if not config.rotary and family.positions == "rotary" and not all(takes_rotation(s.module) for s in chosen):
        raise T2RError(
            f"the attention of {family.model_type} does not say how it rotates queries and keys: "
            "rotary=False cannot be done here"
        )
    maps = [make_map(family, site, config, index) for index, site in enumerate(chosen)]
    for site, feature_map in zip(chosen, maps, strict=True):
        operate(site.module, family.recurrent_class(site.module), feature_map)
        if isinstance(site.module, InterfaceAttention):
            site.module.rotary = config.rotary
        if config.merged:
            assert isinstance(site.module, ProjectionAttention)
            site.module.become_merged()
    family.finish(model, chosen, [site for site in sites if site.layer in kept])
    for part in model.modules():
        if isinstance(part, PreTrainedModel):  # T5's encoder and decoder have a configuration each
            part.config._attn_implementation = NAME
    for notice in family.notices(model, chosen):
        logger.warning(notice)
    return chosen


def takes_rotation(module: nn.Module) -> bool:
    return "position_embeddings" in inspect.signature(type(module).forward).parameters


def make_map(family: Family, site: Site, config: T2RConfig, index: int) -> FeatureMap:
    """The map of one site, on its device and in its dtype; no two sites start alike."""
    shape, options = family.shape(site.module), config.map_options(site.cross)
    feature_map_class(config.feature_map).check(shape.head_dim, options["feature_size"])
    options["seed"] += index
    weight = next(site.module.parameters())
    with torch.device(weight.device):
        feature_map = make_feature_map(config.feature_map, **shape._asdict(), **options)
    return feature_map.to(weight.dtype)


def operate(module: nn.Module, recurrent: type[nn.Module], feature_map: FeatureMap) -> None:
    """The module stays where and what it is, with all its weights and names; its class changes."""
    change_class(module, recurrent)
    module.feature_map = feature_map
    feature_map.train(module.training)


# --- Proof --------------------------------------------------------------------------------------------------
#
# The tested families are known to be what their files say. Any other has been found by looking, so it must show on
# the very model that is swapped that it was understood: or else the model is given back as it came.


def install_proved(model: PreTrainedModel, config: T2RConfig) -> None:
    """`install`, with proof where the family is not a tested one."""
    family = family_of(model)
    if family.tested or model.device.type == "meta":
        install(model, config)
        return
    stock = [(site.module, type(site.module)) for site in family.sites(model)]
    implementation, training = model.config._attn_implementation, model.training
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
        for name in {"feature_map", "cache_layer"} & {*vars(module), *module._modules}:
            delattr(module, name)
    model.config._attn_implementation = implementation
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
