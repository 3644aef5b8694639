"""Marian (OPUS-MT): sinusoidal positions in a table that can be extended."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from t2r.surgery.adapters.bart import BartRecurrence
from t2r.surgery.adapters.base import Family, Site


class SinusoidalTableFamily(Family):
    def finish(self, model: PreTrainedModel, swapped: Sequence[Site], kept: Sequence[Site]) -> None:
        base: Any = model.base_model
        keep_saved_length(base.decoder.embed_positions)

    def extend_positions(self, model: PreTrainedModel, length: int) -> None:
        base: Any = model.base_model
        table = base.decoder.embed_positions
        if length > table.num_embeddings:
            weight = table.weight
            table.weight = nn.Parameter(weight.new_empty(length, weight.shape[1]), requires_grad=False)
            table.weight.data = table.create_weight().to(weight)
            table.num_embeddings = length


def keep_saved_length(table: nn.Module) -> None:
    """Save a table of positions with its configured length, even after it was extended."""
    assert isinstance(table.weight, nn.Parameter)
    table.register_state_dict_post_hook(functools.partial(cut, table.weight.shape[0]))


def cut(rows: int, table: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    if f"{prefix}weight" in state_dict:
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"][:rows]


FAMILY = SinusoidalTableFamily(
    "marian",
    layers="decoder.layers",
    cross_attention="encoder_attn",
    recurrent=BartRecurrence,
    positions="sinusoidal",
    positions_by_row=True,
)
