"""What the inputs of a forward say about documents and padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from t2r.attention.cache import T2RCache
from t2r.attention.masks import values_are_known


def is_packed(inputs: dict[str, Any]) -> bool:
    """Return whether rows contain several documents, as transformers does: if position ids are not consecutive. True
    where that cannot be known."""
    steps = position_steps(inputs)
    return steps is not None and (not values_are_known() or bool((steps != 1).any()))


def restarts(inputs: dict[str, Any]) -> bool:
    """Return whether position ids restart. With a cache they may have gaps, and transformers ignores documents."""
    steps = position_steps(inputs)
    return steps is not None and not torch.compiler.is_compiling() and bool((steps <= 0).any())


def position_steps(inputs: dict[str, Any]) -> Tensor | None:
    """Return the differences of position ids. None: they do not separate documents."""
    positions: Tensor | None = inputs.get("position_ids")
    if positions is None or inputs.get("attention_mask") is not None or positions.shape[-1] == 1:
        return None
    return positions.diff(dim=-1)


def note_padding(inputs: dict[str, Any]) -> None:
    """Store the padding of the new tokens in a T2RCache. Single tokens in a static cache, or in a compiled step, are
    never padding."""
    cache, mask = inputs.get("past_key_values"), inputs.get("attention_mask")
    if isinstance(mask, dict):  # one per layer type, as `generate` prepares them for a static cache
        mask = next((part for part in mask.values() if part is not None), None)
    if not isinstance(cache, T2RCache) or mask is None:
        return
    given = inputs.get("input_ids")
    given = inputs.get("inputs_embeds") if given is None else given
    if given is None or (given.shape[1] == 1 and (cache.is_static or torch.compiler.is_compiling())):
        return
    cache.note_padding(mask, given.shape[1])
