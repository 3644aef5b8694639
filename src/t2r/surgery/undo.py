"""Undoing a swap that fails, or that is refused before the model is trained."""

from __future__ import annotations

import copy
from typing import Any, Self

from torch import nn
from transformers import PreTrainedConfig


class undoing:
    """Restore a model if the `with` block raises: classes, submodules, hooks and attributes of its modules, their
    configurations, and which parameters are trained. Values of tensors are not restored, so call `keep` before the
    first training step."""

    def __init__(self, model: nn.Module) -> None:
        configs = [x for module in model.modules() for x in vars(module).values() if isinstance(x, PreTrainedConfig)]
        self.parts: list[tuple[Any, type, dict[str, Any]]] = [
            (part, type(part), contents(part)) for part in (*model.modules(), *configs)
        ]
        self.learn = [(p, p.requires_grad) for p in model.parameters()]

    def __enter__(self) -> Self:
        return self

    def keep(self) -> None:
        """Keep the changes so far, and those that follow, whatever happens."""
        self.parts, self.learn = [], []

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            return
        for part, stock, before in self.parts:
            part.__class__ = stock
            vars(part).clear()
            vars(part).update(before)
        for parameter, learns in self.learn:
            parameter.requires_grad_(learns)


def contents(part: Any) -> dict[str, Any]:
    """Return the attributes of an object. Dictionaries, such as those of submodules and hooks, are copied."""
    return {name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(part).items()}
