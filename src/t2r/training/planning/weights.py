"""The memory that training holds besides activations: weights, gradients and optimizer states."""

from __future__ import annotations

from torch import nn

from t2r.sharding import own
from t2r.training.recipes.recipe import Stage

FLOAT = 4
"""Bytes of a trained weight, of its gradient and of each of its optimizer states."""


def states_of(stage: Stage) -> int:
    """Return the number of optimizer states per weight, and of the sum of an average."""
    return (1 if stage.optimizer == "nag" else 2) + (stage.average > 1)


def weight_bytes(
    parameters: int, trained: int, *, teacher: int = 0, teacher_bytes: int = FLOAT, states: int = 2
) -> int:
    """Return the bytes of a student of which `trained` parameters are trained, of its optimizer, and of a teacher."""
    return FLOAT * (parameters + trained * (1 + states)) + teacher * teacher_bytes


def held_bytes(model: nn.Module, stage: Stage, teacher: nn.Module | None = None) -> int:
    """Return the bytes that this process holds of weights, gradients and optimizer of a model, by its parameters'
    `requires_grad`."""
    size = sum(own(p).numel() for p in model.parameters())
    trained = sum(own(p).numel() for p in model.parameters() if p.requires_grad)
    bytes_: int = weight_bytes(size, trained, states=states_of(stage))
    bytes_ += sum(own(p).numel() * (p.element_size() - FLOAT) for p in model.parameters())
    if teacher is not None:
        bytes_ += sum(own(p).numel() * p.element_size() for p in teacher.parameters())
    return bytes_
