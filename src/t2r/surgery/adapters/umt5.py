"""UMT5: mT5 with a relative position bias in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from t2r.attention.projection import ProjectionAttention
from t2r.surgery.adapters.base import Site
from t2r.surgery.adapters.t5 import RelativeBiasFamily, T5Projections, t5_like


class UMT5Recurrence(T5Projections):
    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        wanted = self.exact and self.has_relative_attention_bias
        bias = self.bias(hidden_states, past_key_values) if wanted else None
        return ProjectionAttention.forward(
            self, hidden_states, past_key_values, attention_mask, encoder_hidden_states, position_bias=bias
        )


class UMT5Family(RelativeBiasFamily):
    def finish(self, model: PreTrainedModel, swapped: Sequence[Site], kept: Sequence[Site]) -> None:
        for site in kept:
            # Older versions of transformers do not set it and rely on a causal mask. The mask of t2r is not causal.
            site.module.is_causal = not site.cross  # type: ignore[assignment]


FAMILY = t5_like("umt5", UMT5Recurrence, UMT5Family)
