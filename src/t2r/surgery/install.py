"""The swap of a model's attention: each site gets a feature map and a recurrent class."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from t2r import compat
from t2r.attention.interface import NAME, InterfaceAttention
from t2r.attention.joint import has_stock_forward
from t2r.attention.memories import Shape
from t2r.attention.merged import Mergeable
from t2r.attention.recurrence import Recurrence
from t2r.attention.softmax import sliding_window_of
from t2r.config import T2RConfig
from t2r.errors import T2RError
from t2r.feature_maps import FeatureMap, feature_map_class, make_feature_map
from t2r.options import CROSS
from t2r.plans import MemoryPlan
from t2r.surgery.adapters import Family, Site, change_class, family_of
from t2r.surgery.frozen import freeze

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def install(model: PreTrainedModel, config: T2RConfig) -> list[Site]:
    """Swap every site in place, except those kept as softmax layers. Returns the swapped sites.

    All checks run before the model is modified. Raises T2RError if it cannot be swapped."""
    family = family_of(model)
    sites = list(family.sites(model))
    if any(isinstance(site.module, Recurrence) for site in sites):
        raise T2RError("this model is already swapped: start from the base model")
    if getattr(model.config.get_text_config(decoder=True), "use_bidirectional_attention", None) is True:
        raise T2RError("this model has bidirectional attention (use_bidirectional_attention): an RNN is causal")
    kept = config.kept_layers(len(family.decoder_layers(model)))
    chosen = [site for site in sites if site.layer not in kept and not config.keeps(site.cross)]
    if not chosen and config.recurrent == CROSS and len(kept) < len(family.decoder_layers(model)):
        raise T2RError(f"recurrent={config.recurrent}: {family.model_type} has no such attention to swap")
    if not chosen:
        raise T2RError("all layers are kept as softmax layers, so nothing would be swapped: keep fewer")
    rotated_by_stock = family.positions == "rotary" and family.recurrent is None
    if not config.rotary and rotated_by_stock and not all(takes_rotation(s.module) for s in chosen):
        raise T2RError(
            f"rotary=False is not supported for {family.model_type}: its attention does not take "
            "position_embeddings, so the rotation cannot be removed"
        )
    windows = sliding_sites(family, model, [site for site in sites if site not in chosen])
    for site in (*chosen, *windows):
        refuse_replaced_forward(site)
    check_plan(family, config, chosen)
    maps = [make_map(family, site, config, index) for index, site in enumerate(chosen)]
    if config.plan is not None and any(made is not None and made.signed for made in maps):
        raise T2RError(f"feature map {config.feature_map!r} has negative features: it cannot be used beside a window")
    for site, feature_map in zip(chosen, maps, strict=True):
        operate(site.module, family.recurrent_class(site.module), feature_map)
        if (plan := config.memory_plan) is not None and not site.cross:
            follow(site.module, plan, site.layer)
        if hasattr(site.module, "rotary"):  # only classes of families with rotary positions
            site.module.rotary = config.rotary  # type: ignore[assignment]
        if isinstance(site.module, InterfaceAttention):
            plain = family.plain_projections and site.module.merge_obstacle is None
            site.module.direct = plain and site.module.window is None
        if config.merged:
            assert isinstance(site.module, Mergeable)
            site.module.become_merged()
    keep_windows(family, windows)
    swapped = {id(site.module) for site in (*chosen, *windows)}
    family.finish(model, chosen, [site for site in sites if id(site.module) not in swapped])
    freeze(model)
    compat.set_attention_implementation(model, NAME)
    return chosen


def sliding_sites(family: Family, model: PreTrainedModel, kept: Sequence[Site]) -> dict[Site, int]:
    """Return the softmax layers with a sliding window, and its size. Their memory is a window, not all tokens."""
    if family.recurrent is not None:
        return {}
    config = model.config.get_text_config(decoder=True)
    found = {site: sliding_window_of(config, site.layer) for site in kept if not site.cross}
    return {site: size for site, size in found.items() if size is not None}


def keep_windows(family: Family, sites: Mapping[Site, int]) -> None:
    """Make softmax layers with a sliding window sites whose memory is a window."""
    for site, size in sites.items():
        change_class(site.module, family.recurrent_class(site.module))
        site.module.keeps_softmax = True  # type: ignore[assignment]
        sizes = (size,) * family.shape(site.module).num_key_value_heads
        site.module.give_window(Shape(sizes, 0), device_of(site.module))  # type: ignore[operator]


def refuse_replaced_forward(site: Site) -> None:
    """Raise T2RError if a module has a forward of its own, which would hide that of the new class.

    That of accelerate is replaced by `change_class`, also one that it has left behind."""
    module = site.module
    if getattr(module, "_hf_hook", None) is not None or "forward" not in vars(module):
        return
    if not has_stock_forward(module):
        raise T2RError(f"the forward of {site.name} was replaced (compiled or patched): swap the model before that")
    del vars(module)["forward"]


def takes_rotation(module: nn.Module) -> bool:
    return "position_embeddings" in inspect.signature(type(module).forward).parameters


def check_plan(family: Family, config: T2RConfig, sites: Sequence[Site]) -> None:
    """Raise T2RError if the sites cannot follow the plan of a configuration."""
    plan = config.memory_plan
    if plan is None:
        return
    if family.positions == "relative":
        raise T2RError(f"{family.model_type} models cannot have windows: their positions are a bias on the scores")
    plan.check([family.shape(site.module).num_key_value_heads for site in sites if not site.cross])


def device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def follow(module: nn.Module, plan: MemoryPlan, layer: int) -> None:
    """Give a site the windows and states of a plan."""
    site: Any = module
    heads = plan.stateful(layer)
    if any(plan.windows[layer]):
        site.give_window(Shape(plan.windows[layer], plan.sinks, plan.nbits), device_of(module))
    if len(heads) < len(plan.windows[layer]):
        site.give_states(heads, len(plan.windows[layer]), device_of(module))


def make_map(family: Family, site: Site, config: T2RConfig, index: int) -> FeatureMap | None:
    """Create the feature map of a site, on its device and in its dtype. Each site has its own seed. None: no head of
    the site has a state."""
    shape, options = family.shape(site.module), config.map_options(site.cross)
    if (plan := config.memory_plan) is not None and not site.cross:
        options["query_weights"] = any(plan.windows[site.layer])
        heads, group = len(plan.stateful(site.layer)), shape.num_heads // shape.num_key_value_heads
        shape = shape._replace(num_heads=heads * group, num_key_value_heads=heads)
        if not heads:
            return None
    feature_map_class(config.feature_map).check(shape.head_dim, options["feature_size"])
    options["seed"] += index
    weight = next((weight for weight in site.module.parameters() if weight.dtype in FLOATS), None)
    if weight is None:
        raise T2RError(f"the weights of {site.name} are quantized: load the model without quantization")
    with torch.device(weight.device):
        feature_map = make_feature_map(config.feature_map, **shape._asdict(), **options)
    return feature_map.to(weight.dtype)


def operate(module: nn.Module, recurrent: type[nn.Module], feature_map: FeatureMap | None) -> None:
    """Change the class of a module and add its feature map. Its weights and their names stay the same."""
    change_class(module, recurrent)
    if feature_map is not None:
        module.feature_map = feature_map
        feature_map.train(module.training)
