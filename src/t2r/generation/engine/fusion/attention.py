"""Softmax layers: rotation, storing of keys and values, and attention in one or two kernels."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from t2r.attention.joint import affine, is_linear
from t2r.attention.layers import SiteLayer
from t2r.attention.memories import KeyValueMemory
from t2r.attention.static import StaticT2RCache
from t2r.generation.engine.fusion.layers import near
from t2r.generation.engine.fusion.replacing import Replacing, parts, sample
from t2r.surgery.adapters import Family

logger = logging.getLogger(__name__)

ARGUMENTS = ("hidden_states", "attention_mask", "past_key_values", "position_embeddings")
LARGEST = 256
"""The largest head size of the kernel."""
LARGE = 1e6
"""A factor of inputs that exceeds every bound of queries, keys and values, such as `clip_qkv` of OLMo."""
Project = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


@torch.no_grad()
def fuse_attention(model: Any, cache: Any, replacing: Replacing) -> None:
    """Compute the softmax attention of known layers on a static cache in fewer kernels.

    A layer is replaced only if its output and its keys and values are reproduced, which is checked in float64."""
    rotary = next((m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")), None)
    if rotary is not None and "layer_type" in inspect.signature(rotary.forward).parameters:
        return  # rotations differ between layers
    different = set()
    for site in model.t2r_family.sites(model):
        module, layer = site.module, cache.layers[site.layer]
        if site.cross or not layer.grows or layer.keys.dtype == torch.float64:
            continue
        if not replacing.replaceable(module, *ARGUMENTS[: 3 if rotary is None else 4]) or parts_of(module) is None:
            continue
        if module.head_dim <= LARGEST and reproduced(copy.deepcopy(module).double(), rotary):
            replacing.replace(module, fused_forward(module), single=False)
        else:
            different.add(type(module).__name__)
    for name in sorted(different):
        logger.info("decoding steps use the attention of %s itself: the fused kernel does not reproduce it", name)


def parts_of(module: Any) -> tuple[Project, nn.Module] | None:
    """Return how a known attention module projects its input to queries, keys and values; and its output layer."""
    known = parts(module)
    if not isinstance(getattr(module, "scaling", None), float) or not isinstance(
        getattr(module, "head_dim", None), int
    ):
        return None
    if set(known) == set(Family.projections) and all(map(is_linear, known.values())):
        q, k, v, o = (known[name] for name in Family.projections)
        return lambda x: (q(x), k(x), v(x)), o
    if set(known) == set(Family.joint_projections) and all(map(is_linear, known.values())):
        joint, o = (known[name] for name in Family.joint_projections)
        return lambda x: joint(x).chunk(3, dim=-1), o
    return None


def fused_forward(module: Any) -> Callable[..., Any]:
    from t2r.ops.triton.softmax_step import softmax_step

    (project, output), stock, size = cast(Any, parts_of(module)), module.forward, module.head_dim

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache, rotation = kwargs.get("past_key_values"), kwargs.get("position_embeddings")
        layer: Any = cache.layers[module.layer_idx] if isinstance(cache, StaticT2RCache) else None
        fits = layer is not None and layer.grows and layer.only_real_tokens and hidden_states.shape[1] == 1
        if not fits or args or (rotation is not None and rotation[0].shape[-1] != size):
            return stock(hidden_states, *args, **kwargs)
        q, k, v = (x.unflatten(-1, (-1, size)).transpose(1, 2) for x in project(hidden_states))
        out = softmax_step(q, k, v, layer.keys, layer.values, layer.lengths, module.scaling, rotation)
        layer.count(1)
        return output(out.flatten(1)[:, None]), None

    return forward


def reproduced(module: Any, rotary: nn.Module | None) -> bool:
    """Compare the fused forward with the stock forward of a module, on a small cache with random keys and values."""
    _, output = cast(Any, parts_of(module))
    weight, lengths = affine(output)[0], torch.tensor([3, 6], device=output.weight.device)
    x = sample(weight.shape[0], weight)[:2]
    how: dict[str, Any] = {"attention_mask": torch.arange(8, device=x.device) <= lengths[:, None]}
    if rotary is not None:
        how["position_embeddings"] = rotary(x, lengths[:, None])
        if how["position_embeddings"][0].shape[-1] != module.head_dim:
            return False
    inputs = [x, LARGE * x]
    heads = weight.shape[1] // module.head_dim // getattr(module, "num_key_value_groups", 1)
    buffers = sample(2 * heads * 8 * module.head_dim, x)[:2].view(2, 2, heads, 8, module.head_dim)
    results: list[list[Tensor]] = []
    for forward in (module.forward, fused_forward(module)):
        values = []
        for x in inputs:
            memory = KeyValueMemory(buffers[0].clone(), buffers[1].clone(), fixed=True)
            layer = SiteLayer(memory, lengths=lengths)
            layer.only_real_tokens = True
            cache = StaticT2RCache([layer] * (module.layer_idx + 1), lengths)
            values += [forward(x, past_key_values=cache, **how)[0], layer.keys, layer.values]
        del values[3]  # of large inputs, the output depends on rounding
        results.append(values)
    return all(near(found, expected) for expected, found in zip(*results, strict=True))
