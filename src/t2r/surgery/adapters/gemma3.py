"""Gemma 3 with images: the language model is swapped, the vision tower is unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from t2r.surgery.adapters.base import Family, Site, change_class, swapped_class


class LeftToRight(nn.Module):
    """A model that processes image tokens causally, like text.

    In the stock model, the tokens of an image attend to each other, with a mask created from the token type ids."""

    def forward(self, *args: Any, token_type_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Gemma3Family(Family):
    def finish(self, model: PreTrainedModel, swapped: Sequence[Site], kept: Sequence[Site]) -> None:
        change_class(model.base_model, swapped_class(LeftToRight, type(model.base_model)))

    def notices(self, model: PreTrainedModel, swapped: Sequence[Site]) -> Iterator[str]:
        yield from super().notices(model, swapped)
        yield (
            "in the base model, the tokens of an image attend to each other; in the swapped model, all layers process "
            "them causally, like text"
        )


FAMILY = Gemma3Family("gemma3", layers="language_model.layers")
