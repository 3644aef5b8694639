"""Weights with heads, which are divided among processes; merged projections; and attention without a rotation."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.models.transformers.base import VLLM_ATTN_ATTR
from vllm.model_executor.models.transformers.fusers import QKVFuser

from t2r.errors import T2RError
from t2r.feature_maps import AffineMap, FeatureMap
from t2r_vllm.layout import Share, Site


def divide(feature_map: FeatureMap, site: Site) -> None:
    """Let each weight of a map load the part of this process from the saved one."""
    for name, x in (*feature_map.named_parameters(), *feature_map.named_buffers()):
        x.weight_loader = partial(load_heads, site.share)  # type: ignore[attr-defined]
        if name == "bank":  # of random vectors, of which head number n uses the n-th (`RfaMap`)
            heads = site.heads
            total = heads.all_keys if feature_map.key_heads == heads.keys else heads.queries * heads.processes
            first = site.share.before * total // site.share.total
            x.weight_loader = partial(load_rolled, first)  # type: ignore[attr-defined]


def load_heads(share: Share, own: Tensor, saved: Tensor, rows: int = 1) -> None:
    """Load heads, which are the first dimension, with `rows` numbers each.

    If there are fewer heads than processes, several processes have the same one, as in vLLM's attention."""
    first = share.before * (saved.shape[0] // rows) // share.total * rows
    own.data.copy_(saved[first : first + own.shape[0]])


def load_rolled(first: int, own: Tensor, saved: Tensor) -> None:
    own.data.copy_(saved.roll(-first, 0))


class Projection(nn.Linear):
    """A projection to the heads of this process, with `rows` outputs each."""

    def __init__(self, hidden: int, heads: int, rows: int, bias: bool, share: Share) -> None:
        super().__init__(hidden, heads * rows, bias=bias)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            parameter.weight_loader = partial(load_heads, share, rows=rows)  # type: ignore[attr-defined]


def become_merged(model: Any, name: str, site: Site) -> None:
    """Give a stock attention module merged projections in place of those of queries and keys (`t2r.merge`)."""
    module = model.get_submodule(name)
    feature_map = getattr(module, VLLM_ATTN_ATTR).feature_map
    assert isinstance(feature_map, AffineMap)
    fuser = next((fuser for fuser in model.fusers[name] if isinstance(fuser, QKVFuser)), None)
    if fuser is None or fuser.o_name is None:
        raise T2RError(f"vLLM cannot serve this merged model: the projections of {name} were not found")
    joint, hidden, dtype = getattr(module, fuser.merged_name), model.text_config.hidden_size, model.model_config.dtype
    delattr(module, fuser.merged_name)
    own, heads = site.share, site.heads
    q = Projection(hidden, heads.queries, feature_map.rows, True, own)
    k = Projection(hidden, feature_map.key_heads, feature_map.key_rows, True, own)
    module.merged_projections = nn.ModuleDict({"q": q, "k": k}).to(dtype)
    v = Projection(hidden, heads.keys, heads.size, joint.bias is not None, own)
    setattr(module, fuser.v_name, v.to(dtype))
    module.forward = MethodType(partial_forward(fuser.v_name, fuser.o_name), module)
    stacked = model.hf_to_vllm_mapper.orig_to_new_stacked
    for key in [key for key in stacked if key.startswith(f"{name}.")]:
        del stacked[key]


def partial_forward(v_name: str, o_name: str) -> Any:
    def forward(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        x = hidden_states[0]
        q, k = (module.merged_projections[part](x) for part in ("q", "k"))
        out = getattr(module, VLLM_ATTN_ATTR)(q, k, getattr(module, v_name)(x))
        return getattr(module, o_name)(out[None]), None

    return forward


def unrotated(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Rotate queries and keys by zero, which works for every implementation of the rotation."""
    cos, sin = kwargs["position_embeddings"]
    return args, kwargs | {"position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}
