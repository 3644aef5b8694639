"""Exact softmax attention, for softmax layers, encoders, and the equivalence check."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention

from t2r.attention.masks import refuse_full_mask
from t2r.feature_maps import repeat_heads


def sliding_window_of(config: Any, layer: int) -> int | None:
    """Return the sliding window of a layer of the base model, by its configuration. None: it has none."""
    types = getattr(config, "layer_types", None)  # None means that all layers have the same type
    if types is not None and types[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float,
    causal: bool,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
) -> Tensor:
    """Compute exact softmax attention. The queries are the last positions of the keys.

    The mask is that of `make_mask`, so causality and windows are applied here."""
    refuse_full_mask(mask)
    queries, keys = q.shape[2], k.shape[2]
    gqa = q.shape[1] != k.shape[1]
    if mask is None and sliding_window is None and softcap is None and position_bias is None and queries == keys:
        # Fused kernels support plain causal attention without a mask. While layers are compiled for several lengths, a
        # comparison of lengths is not a bool, so `causal` must be the second operand: it is the result.
        return scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=queries > 1 and causal, scale=scaling, enable_gqa=gqa
        )
    allowed = allowed_keys(queries, keys, mask, causal, sliding_window, q.device)
    if softcap is not None:
        return capped_attention(q, k, v, allowed, scaling, dropout, softcap)
    if position_bias is not None:
        bias = position_bias.to(q.dtype)
        allowed = bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)
    return scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=dropout, scale=scaling, enable_gqa=gqa)


def softmax_weights(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    scaling: float,
    causal: bool,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
) -> Tensor:
    """Return the weights `[batch, heads, queries, keys]` of `softmax_attention`, in float32 or more."""
    k = repeat_heads(k, q.shape[1])
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    allowed = allowed_keys(q.shape[2], k.shape[2], mask, causal, sliding_window, q.device)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1)


def allowed_keys(
    queries: int,
    keys: int,
    mask: Tensor | None,
    causal: bool,
    sliding_window: int | None,
    device: torch.device,
) -> Tensor | None:
    """Return which keys a query attends to, `[batch or 1, 1, queries, keys]`, or None if it attends to all."""
    allowed = None
    if causal and (queries > 1 or (sliding_window is not None and keys > sliding_window)):
        key = torch.arange(keys, device=device)
        distance = torch.arange(keys - queries, keys, device=device)[:, None] - key
        allowed = (distance >= 0)[None]
        if sliding_window is not None:
            allowed = allowed & (distance < sliding_window)
    if mask is not None:
        mask = mask[:, -keys:]
        if mask.dtype == torch.bool:
            seen = mask[:, None, :]
        else:
            seen = mask[:, -queries:, None] == mask[:, None, :]
        allowed = seen if allowed is None else allowed & seen
        if causal and (queries > 1 or queries == keys):
            # A padded position attends to itself, because its row must not be empty. Its output is not used.
            own = torch.arange(keys - queries, keys, device=device)[:, None] == torch.arange(keys, device=device)
            allowed = allowed | own
    return None if allowed is None else allowed[:, None]


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scaling: float, dropout: float, softcap: float
) -> Tensor:
    """Compute exact attention with capped scores (Gemma 2), which the fused kernels of PyTorch do not support."""
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    scores = softcap * torch.tanh(q @ k.transpose(-1, -2) * scaling / softcap)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32)  # float32 for every model dtype, as in Gemma
    return drop(weights.to(q.dtype), dropout) @ v
