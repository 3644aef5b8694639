"""OPT: a decoder-only model with BART's projections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from t2r.attention.masks import documents_from_positions
from t2r.surgery.adapters.bart import BartRecurrence
from t2r.surgery.adapters.base import Family, Site, change_class, swapped_class


class PackedDecoder(nn.Module):
    """A decoder that passes packed documents to its layers. OPT creates its mask without the position ids."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        positions, documents = kwargs.get("position_ids"), None
        if positions is not None and kwargs.get("attention_mask") is None and kwargs.get("past_key_values") is None:
            tokens = next(kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None)
            documents = documents_from_positions(positions, tokens.shape[0])
        return super().forward(*args, **kwargs, t2r_documents=documents)


class OPTFamily(Family):
    def finish(self, model: PreTrainedModel, swapped: Sequence[Site], kept: Sequence[Site]) -> None:
        base: Any = model.base_model
        change_class(base.decoder, swapped_class(PackedDecoder, type(base.decoder)))


FAMILY = OPTFamily("opt", layers="decoder.layers", recurrent=BartRecurrence, positions="learned")
