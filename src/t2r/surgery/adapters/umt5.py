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
    def repair(self, model: PreTrainedModel) -> None:
        """Make the decoder causal. In older versions of transformers, its attention does not say that it is, and relies
        on a causal mask. `sdpa` creates none unless tokens are padded, and then attends to later tokens too. The masks
        of t2r are not causal either."""
        for name, module in model.named_modules():
            if name.endswith(".SelfAttention"):
                module.is_causal = module.is_decoder

    def finish(self, model: PreTrainedModel, swapped: Sequence[Site], kept: Sequence[Site]) -> None:
        self.repair(model)


FAMILY = t5_like("umt5", UMT5Recurrence, UMT5Family)
