"""Recurrent attention through the attention interface of transformers, for families with rotary positions.

The forward of the stock module is unchanged and computes projections, rotation and normalization. It passes its keyword
arguments on to the attention function. The cache layer and the mode of the call are among them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from t2r.attention.cache import adopt
from t2r.attention.masks import given_mask, make_mask
from t2r.attention.merged import Affine, Mergeable
from t2r.attention.observation import observe_softmax
from t2r.attention.recurrence import Inputs, Mode, Recurrence, mode_of
from t2r.attention.softmax import sliding_window_of, softmax_attention
from t2r.errors import T2RError
from t2r.feature_maps import join_heads, split_heads

NAME = "t2r"
"""The name of the attention implementation of swapped models."""
UNMASKED = "t2r_unmasked"
"""The attention implementation for inputs without padding or packed documents. transformers creates no mask for it, so
that a call captured as a CUDA graph does not inspect the mask. Models that are not swapped can use it too."""
PADDED = "t2r_padded"
"""The same for inputs with padding, but without packed documents. Layers get the given mask even if nothing is padded:
a captured call cannot know, and it must pass the same arguments as the calls before, in which layers were compiled."""
NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
"""Names of the normalization of queries and keys in stock modules."""


class Call(NamedTuple):
    """What a site passes to the attention function in one call, besides queries, keys and values."""

    layer: Any
    """The cache layer to read and advance, or None without a cache."""
    hidden_states: Tensor | None
    """The inputs of the module."""
    mode: Mode | None
    rotation: tuple[Tensor, Tensor] | None
    """Cosines and sines of a rotation that exact attention has yet to apply to queries and keys."""


class InterfaceAttention(Mergeable):
    """A stock module that calls `attention_forward` through the attention interface of transformers."""

    cache_arguments = ("past_key_values", "layer_past")
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    head_dim: int
    config: Any
    rotary: bool = True
    """Whether the feature map is applied to rotated queries and keys. If False, the stock forward receives a rotation
    by angles of zero, which works for every implementation of the rotation."""
    direct: bool = False
    """Whether the feature map follows the projections directly, so that the recurrence can skip the stock forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cache = next((kwargs[name] for name in self.cache_arguments if kwargs.get(name) is not None), None)
        mode = mode_of(self)
        layer = adopt(cache, self.layer_idx, self.make_layer if mode is None else None)
        if self.merged is not None or (self.direct and mode is None):
            return self.forward_directly(*args, layer=layer, **kwargs)
        rotation = kwargs.get("position_embeddings")
        # An observer receives the inputs of the feature map, rotated or not. Exact attention always uses rotation.
        if self.rotary or (mode is not None and mode.observer is None):
            rotation = None
        if rotation is not None:
            kwargs["position_embeddings"] = (torch.ones_like(rotation[0]), torch.zeros_like(rotation[1]))
        hidden_states = args[0] if args else kwargs.get("hidden_states")
        return super().forward(*args, **kwargs, t2r_call=Call(layer, hidden_states, mode, rotation))

    # --- Without the stock forward --------------------------------------------------------------------------

    @property
    def merge_obstacle(self) -> str | None:  # type: ignore[override]
        if self.rotary:
            return (
                "its queries and keys are rotated by position or normalized between the projections and the feature "
                "map; swap with rotary=False to remove the rotation"
            )
        parts = vars(self)["_modules"]
        if any(parts.get(name) is not None for name in NORMS):
            return "its queries and keys are normalized between the projections and the feature map"
        if getattr(self.config, "clip_qkv", None) is not None:
            return "its queries and keys are clipped between the projections and the feature map"
        named = [parts.get(name) for name in ("q_proj", "k_proj", "v_proj")] + [self.output_projection]
        if not all(isinstance(part, nn.Linear) for part in named):
            return "it does not have separate linear projections of queries, keys and values with known names"
        return None

    @property
    def output_projection(self) -> Any:
        parts = vars(self)["_modules"]
        return parts.get("o_proj") or parts.get("dense")

    def query_key_projections(self) -> tuple[Affine, Affine]:
        q, k = self.q_proj, self.k_proj
        return Affine(q.weight, q.bias), Affine(k.weight, k.bias)

    def drop_query_key_projections(self) -> None:
        del self.q_proj, self.k_proj

    @property
    def value_projection(self) -> nn.Module:
        return self.v_proj

    def heads(self, x: Tensor) -> Tensor:
        return split_heads(x, self.head_dim)

    def forward_directly(
        self,
        hidden_states: Tensor,
        *args: Any,
        layer: Any,
        attention_mask: Tensor | None = None,
        t2r_documents: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Compute the stock forward without its rotation, or the forward of merged projections."""
        mask = t2r_documents if attention_mask is None else attention_mask
        if self.merged is not None:
            out = self.attend_merged(hidden_states, mask, layer)
        else:
            q, k, v = map(self.heads, self.outputs(hidden_states, self.q_proj, self.k_proj, self.v_proj))
            out = self.attend(Inputs(q, k, v, mask, self.scaling, hidden_states=hidden_states), layer)
        return self.output_projection(join_heads(out)), None


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    t2r_call: Call | None = None,
    t2r_documents: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of a swapped model, for recurrent sites, softmax layers and encoders.

    All attention modules of the model use this function, because transformers creates one mask per model, and the mask
    of t2r is two-dimensional (see `make_mask`)."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(module, InterfaceAttention):
        if t2r_call is None:
            raise T2RError(
                f"{type(module).__name__} does not pass its keyword arguments to the attention function, so its "
                "recurrent state is not available: this model cannot be swapped, or its forward was replaced"
            )
        # Without a cache, the sliding window of the base model is a mask, with its dropout.
        stock = module.keeps_softmax and t2r_call.layer is None
        if t2r_call.mode is None and not stock:
            mask = t2r_documents if attention_mask is None else attention_mask
            inputs = Inputs(query, key, value, mask, scaling, True, softcap, t2r_call.hidden_states)
            out = module.attend(inputs, t2r_call.layer)
            return out.transpose(1, 2).contiguous(), None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if sliding_window is None and causal and (layer := getattr(module, "layer_idx", None)) is not None:
        # Some modules do not pass it on, because the masks of transformers contain it.
        sliding_window = sliding_window_of(getattr(module, "config", None), layer)
    if attention_mask is None and causal:
        attention_mask = t2r_documents
    q, k = query, key
    if t2r_call is not None and t2r_call.rotation is not None:
        q, k = rotate(module, query, key, *t2r_call.rotation)
    observe_softmax(
        module,
        q,
        k,
        value,
        mask=attention_mask,
        scaling=scaling,
        causal=causal,
        sliding_window=sliding_window,
        softcap=softcap,
        position_bias=position_bias,
    )
    out = softmax_attention(
        q, k, value, attention_mask, scaling, causal, dropout, sliding_window, softcap, position_bias
    )
    if t2r_call is not None and t2r_call.mode is not None and t2r_call.mode.observer is not None:
        assert isinstance(module, Recurrence)
        inputs = Inputs(query, key, value, attention_mask, scaling, causal, softcap, t2r_call.hidden_states)
        t2r_call.mode.observer(module, inputs, out)
    return out.transpose(1, 2).contiguous(), None


def rotate(module: nn.Module, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys with the function of the stock module, in the dimensions that it rotates."""
    apply = rotation_function(module)
    size = cos.shape[-1]
    if size == q.shape[-1]:
        return apply(q, k, cos, sin)
    rotated = apply(q[..., :size], k[..., :size], cos, sin)
    return tuple(torch.cat([x, whole[..., size:]], dim=-1) for x, whole in zip(rotated, (q, k), strict=True))  # type: ignore[return-value]


def rotation_function(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `apply_rotary_pos_emb` of the stock module, from the Python module that defines its class."""
    for kind in type(module).__mro__:
        found = getattr(sys.modules.get(kind.__module__), "apply_rotary_pos_emb", None)
        if found is not None:
            return found
    raise T2RError(f"no apply_rotary_pos_emb was found for {type(module).__name__}: use rotary=True")


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, make_mask)
AttentionInterface.register(UNMASKED, attention_forward)
AttentionInterface.register(PADDED, attention_forward)
AttentionMaskInterface.register(PADDED, given_mask)
