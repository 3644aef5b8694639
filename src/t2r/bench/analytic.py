"""Operations and bytes of one decoding step, from the sizes of a model: the complexity analysis of the paper.

For a head of size d, a step of softmax attention after n tokens takes 4nd operations and reads 2nd numbers. A step of
recurrent attention with k features takes 2kd operations for the update and 2kd + 2k for the readout, and reads and
writes k(d + 1) numbers, for any n. An operation is an addition or a multiplication. Norms, activations and softmax
itself are not counted, as in `torch.utils.flop_counter`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from t2r.attention.recurrence import Recurrence
from t2r.attention.softmax import sliding_window_of
from t2r.feature_maps import AffineMap, FeatureMap
from t2r.ops.stored import token_bytes
from t2r.surgery.adapters import Site, family_of

SOURCE_PROJECTIONS = ("k_proj", "v_proj", "k", "v", "merged_projections.k")
"""Projections of the source in cross attention, which are computed once and not in a step."""


@dataclass(frozen=True)
class StepCost:
    """The cost of one token of one sequence. Weights are read once for the whole batch."""

    projections: int
    """Operations in products with weights: projections, feature maps, feed-forward layers and output layer."""
    attention: int
    """Operations in products of attention: scores and weighted sums, or the readout of states."""
    updates: int
    """Operations that update states, which are not matrix products."""
    weight_bytes: int
    cache_read: int
    cache_written: int
    cache_bytes: int
    """Size of the cache."""

    @property
    def operations(self) -> int:
        return self.projections + self.attention + self.updates

    def moved(self, batch: int) -> int:
        """Return the bytes that a step of a batch must read and write."""
        return self.weight_bytes + batch * (self.cache_read + self.cache_written)


def step_cost(
    model: PreTrainedModel, length: int, source: int = 0, state_dtype: torch.dtype | None = None
) -> StepCost | None:
    """Return the cost of a step after `length` tokens, or None if the output layer is not a matrix.

    Args:
        model: a swapped or other model of a supported family.
        source: tokens of the source, for an encoder-decoder.
        state_dtype: the dtype in which states are stored, if not that of their feature maps.
    """
    family, head = family_of(model), getattr(model.get_output_embeddings(), "weight", None)
    if head is None:
        return None
    sites = list(family.sites(model))
    once = {f"{site.name}.{name}" for site in sites if site.cross for name in SOURCE_PROJECTIONS}
    weights, each = head.numel(), head.element_size()
    prefixes = {id(layer) for layer in family.decoder_layers(model)}
    for name, layer in model.named_modules():
        if id(layer) in prefixes:
            weights += sum(
                part.weight.numel()
                for path, part in layer.named_modules()
                if isinstance(part, nn.Linear | Conv1D) and f"{name}.{path}" not in once
            )
    mapped = attention = updates = read = written = held = map_weights = 0
    for site in sites:
        heads, kv_heads, size = family.shape(site.module)
        module: Any = site.module
        if not isinstance(site.module, Recurrence) or module.keeps_softmax:
            before = source if site.cross else within_window(model, site, length)
            tokens = before if site.cross else before + 1
            token = 2 * kv_heads * size * each
            attention += 4 * heads * tokens * size
            read, held = read + tokens * token, held + before * token
            written += 0 if site.cross else token
            continue
        if module.window is not None:
            tokens = sum(min(length + 1, size + module.window.sinks) for size in module.window.sizes if size)
            attention += 4 * (heads // kv_heads) * tokens * size
            token = token_bytes(size, size, module.window.nbits, each)
            read, held, written = read + tokens * token, held + tokens * token, written + kv_heads * token
        if not module.has_map:
            continue
        feature_map: FeatureMap = module.feature_map
        k, key_heads = feature_map.feature_size, feature_map.key_heads
        rows, key_rows = (0, 0) if getattr(module, "merged", None) is not None else affine_rows(feature_map)
        mapped += 2 * size * (heads * rows + (0 if site.cross else key_heads * key_rows))
        map_weights += sum(x.numel() for x in feature_map.parameters())
        empty = [x for x in feature_map.empty_state(1, size, model.dtype, "meta") if x is not None]
        state = sum(x.numel() * (state_dtype or x.dtype).itemsize for x in empty)
        attention += heads * (2 * k * size + 2 * k)
        read, held = read + state, held + state
        if not site.cross:
            decays = k * (size + 1) if feature_map.decay_logits is not None else 0
            updates += key_heads * (2 * k * size + k + decays)
            written += state
    return StepCost(2 * weights + mapped, attention, updates, (weights + map_weights) * each, read, written, held)


def within_window(model: PreTrainedModel, site: Site, length: int) -> int:
    """Return how many of the `length` tokens so far softmax attention of a layer reads, besides the next one."""
    window = sliding_window_of(model.config.get_text_config(decoder=True), site.layer)
    return length if window is None else min(length, window - 1)


def affine_rows(feature_map: FeatureMap) -> tuple[int, int]:
    """Return the rows of the matrices by which a map multiplies a query and a key."""
    if isinstance(feature_map, AffineMap):
        return feature_map.rows, feature_map.key_rows
    rows = {"elu": 0, "rfa": feature_map.feature_size // 2}.get(feature_map.name, feature_map.feature_size)
    return rows, rows
