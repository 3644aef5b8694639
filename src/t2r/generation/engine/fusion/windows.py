"""Layers with windows: the rotation of queries and keys in the kernel that attends."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from t2r.attention.interface import InterfaceAttention
from t2r.attention.joint import is_linear
from t2r.attention.recurrence import Inputs, mode_of, rotated, swapped_sites
from t2r.attention.static import StaticT2RCache
from t2r.feature_maps import join_heads
from t2r.generation.engine.fusion.layers import near
from t2r.generation.engine.fusion.replacing import Replacing, parts, sample
from t2r.surgery.adapters import Family

ARGUMENTS = ("hidden_states", "attention_mask", "past_key_values", "position_embeddings")


@torch.no_grad()
def fuse_windows(model: Any, replacing: Replacing) -> None:
    """Leave the rotation of queries and keys to the kernel of windows, where it gives what the module computes."""
    rotary = next((m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")), None)
    for site in swapped_sites(model):
        if rotary is None or not isinstance(site, InterfaceAttention) or site.window is None or not is_known(site):
            continue
        if replacing.replaceable(site, *ARGUMENTS) and reproduced(copy.deepcopy(site).double(), rotary):
            replacing.replace(site, rotating_forward(site), single=False)


def is_known(site: InterfaceAttention) -> bool:
    """Return whether the site has nothing but plain projections, and rotates what they give."""
    known = {name: x for name, x in parts(site).items() if name != "feature_map"}
    plain = set(known) == set(Family.projections) and all(map(is_linear, known.values()))
    dtype = next(site.parameters()).dtype
    return plain and site.rotary and site.merged is None and dtype != torch.float64


def rotating_forward(site: InterfaceAttention) -> Callable[..., Any]:
    stock, size = site.forward, site.head_dim

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache, rotation = kwargs.get("past_key_values"), kwargs.get("position_embeddings")
        layer: Any = cache.layers[site.layer_idx] if isinstance(cache, StaticT2RCache) else None
        fits = layer is not None and layer.only_real_tokens and hidden_states.shape[1] == 1 and mode_of(site) is None
        if not fits or args or rotation is None or rotation[0].shape[-1] != size:
            return stock(hidden_states, *args, **kwargs)
        q, k, v = (site.heads(project(hidden_states)) for project in (site.q_proj, site.k_proj, site.v_proj))
        inputs = Inputs(q, k, v, None, site.scaling, hidden_states=hidden_states, rotation=rotation)
        out = site.attend(inputs, layer)
        return site.output_projection(join_heads(out)), None

    return forward


def reproduced(site: InterfaceAttention, rotary: Any) -> bool:
    """Compare what the memories of a site get, and its output, with those of the stock forward."""
    output = site.output_projection
    x = sample(site.q_proj.in_features, output.weight)[:2]
    lengths = torch.tensor([3, 6], device=x.device)
    rotation = rotary(x, lengths[:, None])
    if rotation[0].shape[-1] != site.head_dim:
        return False
    layer = site.make_layer()
    layer.only_real_tokens = True
    cache = StaticT2RCache([layer] * (site.layer_idx + 1), lengths)
    results: list[list[Any]] = []

    def attend(inputs: Inputs, layer: Any) -> Tensor:
        inputs = inputs if inputs.rotation is None else rotated(inputs)
        results.append([*inputs[:3], inputs[3:7]])
        return inputs.q.flip(-1)  # any output that depends on what was given

    site.attend = attend  # type: ignore[method-assign]  # a copy
    for forward in (site.forward, rotating_forward(site)):
        out, _ = forward(x, attention_mask=None, past_key_values=cache, position_embeddings=rotation)
        results[-1].append(out)
    (*expected, options, last), (*found, other, final) = results
    return options == other and all(near(x, y) for x, y in zip([*found, final], [*expected, last], strict=True))
