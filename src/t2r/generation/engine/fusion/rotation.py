"""Rotary positions that no layer reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from t2r.attention.interface import InterfaceAttention
from t2r.attention.recurrence import recurrent_sites
from t2r.generation.engine.fusion.replacing import Replacing
from t2r.ops.constants import derived

ARGUMENTS = ("x", "position_ids", "layer_type")


def skip_rotation(model: Any, replacing: Replacing) -> None:
    """Compute cosines and sines in the first step only, if no layer of a swapped model reads them."""
    sites = recurrent_sites(model)
    if model.kept_layers() or not all(isinstance(site, InterfaceAttention) and unrotated(site) for site in sites):
        return
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding") and replacing.replaceable(module, *ARGUMENTS):
            replacing.replace(module, first_value(module), single=False)


def unrotated(site: InterfaceAttention) -> bool:
    return site.direct or site.merged is not None


def first_value(module: nn.Module) -> Callable[..., Any]:
    stock = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        named = tuple(x for x in (*args, *kwargs.values()) if isinstance(x, str))  # the type of a layer (Gemma 3)
        return derived(module, named, lambda: stock(*args, **kwargs))

    return forward
