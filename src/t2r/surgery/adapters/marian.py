"""Marian (OPUS-MT): sinusoidal positions in a table that can be extended."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from t2r.surgery.adapters.bart import BartRecurrence
from t2r.surgery.adapters.base import Family, Site


class SinusoidalTableFamily(Family):
    def finish(self, model: PreTrainedModel, swapped: Sequence[Site], kept: Sequence[Site]) -> None:
        base: Any = model.base_model
        keep_saved_length(base.decoder.embed_positions)

    def position_table(self, model: PreTrainedModel) -> Tensor:
        base: Any = model.base_model
        weight: Tensor = base.decoder.embed_positions.weight
        return weight

    def extend_positions(self, model: PreTrainedModel, length: int) -> None:
        base: Any = model.base_model
        table = base.decoder.embed_positions
        if length > table.num_embeddings:
            # A captured step is built again for each new table, so the table at least doubles.
            length = max(length, 2 * table.num_embeddings)
            with torch.device("meta"):  # draws no random numbers
                longer: Any = type(table)(length, table.embedding_dim)
            weight = longer.create_weight().to(table.weight)
            # Other threads may use the model: they read the old table or the complete new one.
            table.weight = nn.Parameter(weight, requires_grad=False)
            table.num_embeddings = length


def keep_saved_length(table: nn.Module) -> None:
    """Save a table of positions with its configured length, even after it was extended."""
    assert isinstance(table.weight, nn.Parameter)
    table.register_state_dict_post_hook(functools.partial(cut, table.weight.shape[0]))
    table.register_load_state_dict_pre_hook(lengthen)


def cut(rows: int, table: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    if f"{prefix}weight" in state_dict:
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"][:rows]


def lengthen(table: Any, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    """Let a table that was extended load the weights of the shorter one."""
    given = state_dict.get(f"{prefix}weight")
    if given is not None and given.shape[0] < table.weight.shape[0]:
        state_dict[f"{prefix}weight"] = torch.cat([given, table.weight[given.shape[0] :].detach().to(given)])


FAMILY = SinusoidalTableFamily(
    "marian",
    layers="decoder.layers",
    cross_attention="encoder_attn",
    recurrent=BartRecurrence,
    positions="sinusoidal",
    positions_by_row=True,
)
