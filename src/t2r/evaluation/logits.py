"""Logits of a text, a slice of positions at a time."""

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
    """The logits of positions `first` to `last` (exclusive), in float32 and in slices that are never large.

    The body of the model runs once, and its head once a slice. A model whose head cannot be applied separately gives
    whole logits, of a few rows at a time; these are cut afterwards.
    """
    readout = readout_of(model, {"input_ids": input_ids}, variant)
    rows = readout.rows_at_once(input_ids)
    states = [readout.states({"input_ids": some})[:, first:last] for some in input_ids.split(rows)]
    size = max(1, logits_at_once(input_ids.device) // (len(input_ids) * readout.out_features))
    for pieces in zip(*(part.split(size, dim=1) for part in states), strict=True):
        yield torch.cat([readout(piece).float() for piece in pieces])


def check_positions(model: PreTrainedModel, length: int) -> None:
    """A text longer than the positions that were learned is an index error on a CPU, and worse on a GPU."""
    try:
        limit = family_of(model).max_positions(model)
    except T2RError:  # a family that we do not know: its own forward will say
        return
    if limit is not None and length > limit:
        raise T2RError(f"this {model.config.model_type} model has learned {limit} positions, and {length} are needed")
