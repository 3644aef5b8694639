"""Gemma 3 with images: its language model is swapped, its vision tower stays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from t2r.surgery.adapters.base import Family, Site, change_class, swapped_class


class LeftToRight(nn.Module):
    """A model that reads the tokens of an image from left to right, as it reads text. The stock model lets them see
    each other, by a mask that it makes from the token type ids."""

    def forward(self, *args: Any, token_type_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Gemma3Family(Family):
    def finish(self, model: PreTrainedModel, swapped: Sequence[Site], kept: Sequence[Site]) -> None:
        change_class(model.base_model, swapped_class(LeftToRight, type(model.base_model)))

    def notices(self, model: PreTrainedModel, swapped: Sequence[Site]) -> Iterator[str]:
        yield from super().notices(model, swapped)
        yield (
            "the tokens of an image see each other in the base model; all layers of the swapped language model read "
            "them from left to right, as text"
        )


FAMILY = Gemma3Family("gemma3", layers="language_model.layers")
