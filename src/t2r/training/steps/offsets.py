"""Blocks whose positions start at random places.

The features of rotated queries and keys depend on their positions, and not only on the difference, as the products of
softmax attention do. Trained on blocks that all start at 0, a state meets angles that it has never seen where a text is
longer than a block."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from t2r import compat
from t2r.errors import T2RError
from t2r.surgery.adapters import family_of
from t2r.training.recipes.recipe import Stage


class Room(NamedTuple):
    """How far the blocks of a stage can be moved, and why they cannot be if the stage asks for it."""

    largest: int = 0
    obstacle: str | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, stage: Stage) -> Room:
        if stage.reach is None:
            return cls()
        if (obstacle := obstacle_of(model)) is not None:
            return cls(0, obstacle)
        own = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        reach = stage.reach if own is None else min(own, stage.reach)
        return cls(reach - stage.block_size) if reach > stage.block_size else cls(0, f"a block reaches {reach:,}")


def obstacle_of(model: PreTrainedModel) -> str | None:
    """Return why softmax attention may change if all positions are moved together. None: it does not."""
    try:
        family = family_of(model)
    except T2RError as error:
        return str(error)
    if model.config.is_encoder_decoder or family.positions != "rotary":
        return f"the positions of {family.model_type} are {family.positions}, not rotary"
    if not family.tested:
        return f"{family.model_type} is not a tested model type"
    if compat.constant_rotation(model) is not None:
        return "its rotary positions depend on the length of the text"
    return None


def moved(inputs: dict[str, Tensor], offset: Tensor) -> dict[str, Tensor]:
    """Return the inputs of a model with positions that start at an offset, `[rows]`."""
    ids, positions = inputs["input_ids"], inputs.get("position_ids")
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device)
    return inputs | {"position_ids": positions + offset[:, None]}
