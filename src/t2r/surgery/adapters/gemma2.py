"""Gemma 2: sliding windows in every other layer, and capped attention scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from transformers import PreTrainedModel

from t2r import compat
from t2r.surgery.adapters.base import Family, Site


class Gemma2Family(Family):
    def repair(self, model: PreTrainedModel) -> None:
        """Use `eager` attention. `sdpa` does not cap scores: older versions of transformers use it nevertheless."""
        if model.config.attn_logit_softcapping is not None and compat.attention_implementation(model) == "sdpa":
            compat.set_attention_implementation(model, "eager")

    def notices(self, model: PreTrainedModel, swapped: Sequence[Site]) -> Iterator[str]:
        yield from super().notices(model, swapped)
        cap = model.config.attn_logit_softcapping
        if cap is not None:
            yield (
                f"the base model caps its attention scores at {cap}; "
                f"the {len(swapped)} recurrent layers have no scores and therefore no cap"
            )


FAMILY = Gemma2Family("gemma2", plain_projections=True)
