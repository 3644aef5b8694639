"""Falcon with rotary positions: one fused projection, grouped-query or multi-query attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import FalconModel, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb
from transformers.utils.generic import can_return_tuple

from t2r.errors import T2RError
from t2r.surgery.adapters.base import Shape, Site, change_class
from t2r.surgery.adapters.rotated import RotatedAttention, RotatedFamily


class FalconRecurrence(RotatedAttention):
    query_key_value: Any
    dense: Any
    num_heads: int
    num_kv_heads: int

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # In all three layouts of Falcon, each key head has its queries, then its key and value. Unlike in the stock
        # module of Falcon 40B, keys and values are not repeated for each query head.
        groups = self.num_heads // self.num_kv_heads
        fused = self.query_key_value(hidden_states).unflatten(-1, (self.num_kv_heads, groups + 2, self.head_dim))
        q, k, v = fused[..., :-2, :].flatten(2, 3), fused[..., -2, :], fused[..., -1, :]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def output(self, attended: Tensor) -> Tensor:
        return self.dense(attended)

    def rotate(self, q: Tensor, k: Tensor, positions: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(q, k, *positions)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        alibi: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        return self.attend_rotated(hidden_states, attention_mask, layer_past, position_embeddings), None


class PackedModel(FalconModel):
    """Falcon with support for packed documents. The stock forward creates its mask without the position ids."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        x = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None and not (self.gradient_checkpointing and self.training):
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = (torch.arange(x.shape[1], device=x.device) + past)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        positions = self.rotary_emb(x, position_ids=position_ids)
        hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states = []
        for layer in self.h:
            states.append(x)
            x, _ = layer(
                x,
                layer_past=past_key_values,
                attention_mask=mask,
                position_ids=position_ids,
                use_cache=use_cache,
                alibi=None,
                position_embeddings=positions,
            )
        x = self.ln_f(x)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=x,
            past_key_values=past_key_values,
            hidden_states=(*states, x) if hidden else None,  # type: ignore[arg-type]
        )


class FalconFamily(RotatedFamily):
    dropouts = ()  # Falcon has no attention dropout with rotary positions

    def check(self, model: PreTrainedModel) -> None:
        if model.config.alibi:
            raise T2RError(
                "this falcon model cannot be swapped: its positions are a bias on the attention scores (ALiBi), which "
                "recurrent layers do not have; use a Falcon with rotary positions (alibi=False in its configuration)"
            )

    def shape(self, module: Any) -> Shape:
        return Shape(module.num_heads, module.num_kv_heads, module.head_dim)

    def finish(self, model: PreTrainedModel, swapped: Sequence[Site], kept: Sequence[Site]) -> None:
        super().finish(model, swapped, kept)
        change_class(model.base_model, PackedModel)


FAMILY = FalconFamily("falcon", layers="h", self_attention="self_attention", recurrent=FalconRecurrence)
