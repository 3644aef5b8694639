"""Logits of a text, computed in slices of positions."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from t2r.errors import T2RError
from t2r.evaluation.variants import Variant, readout_of
from t2r.model.logits import evaluating, logits_at_once
from t2r.surgery.adapters import family_of

__all__ = ["check_positions", "evaluating", "logits_by_slice"]


def logits_by_slice(
    model: PreTrainedModel, input_ids: Tensor, first: int, last: int, variant: Variant | None = None
) -> Iterator[Tensor]:
    """Yield the float32 logits of positions `first` to `last` (exclusive), in slices of bounded size.

    The body of the model runs once, and its head once per slice. If the head cannot be applied separately, whole logits
    are computed for a few rows at a time and then sliced.
    """
    readout = readout_of(model, {"input_ids": input_ids}, variant)
    rows = readout.rows_at_once(input_ids)
    states = [readout.states({"input_ids": some})[:, first:last] for some in input_ids.split(rows)]
    size = max(1, logits_at_once(input_ids.device) // (len(input_ids) * readout.out_features))
    for pieces in zip(*(part.split(size, dim=1) for part in states), strict=True):
        yield torch.cat([readout(piece).float() for piece in pieces])


def check_positions(model: PreTrainedModel, length: int) -> None:
    """Raise T2RError if a text is longer than the position table of the model."""
    try:
        limit = family_of(model).max_positions(model)
    except T2RError:  # an unknown family, whose forward raises its own error
        return
    if limit is not None and length > limit:
        raise T2RError(f"this {model.config.model_type} model has {limit} positions, but {length} are required")
