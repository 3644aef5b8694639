"""How much memory training takes: weights, gradients and optimizer by counting, activations by a formula."""

from __future__ import annotations

from torch import nn

from t2r.training.recipe import Stage

FLOAT = 4
"""Bytes of a weight that learns, of its gradient and of each number of the optimizer's."""


def states_of(stage: Stage) -> int:
    """Numbers that the stage's optimizer keeps for each weight."""
    return 1 if stage.optimizer == "nag" else 2


def weight_bytes(
    parameters: int, trained: int, *, teacher: int = 0, teacher_bytes: int = FLOAT, states: int = 2
) -> int:
    """Bytes of a student with `trained` of its parameters learning, of its optimizer, and of a teacher."""
    return FLOAT * (parameters + trained * (1 + states)) + teacher * teacher_bytes


def held_bytes(model: nn.Module, stage: Stage, teacher: nn.Module | None = None) -> int:
    """The same for a model whose parameters say which of them learn."""
    size = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    bytes_: int = weight_bytes(size, trained, states=states_of(stage))
    bytes_ += sum(p.numel() * (p.element_size() - FLOAT) for p in model.parameters())
    if teacher is not None:
        bytes_ += sum(p.numel() * p.element_size() for p in teacher.parameters())
    return bytes_
