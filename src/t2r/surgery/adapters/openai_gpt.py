"""OpenAI GPT (GPT-1): GPT-2's projections in a model that knows no cache, so it is given one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, OpenAIGPTModel, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from t2r.attention.recurrence import keep_softmax
from t2r.surgery.adapters.base import Family, Shape, Site, change_class
from t2r.surgery.adapters.gpt2 import GPT2Recurrence


class OpenAIGPTRecurrence(GPT2Recurrence):
    n_head: int
    is_cross_attention = False

    @property
    def head_dim(self) -> int:  # type: ignore[override]
        return self.split_size // self.n_head

    @property
    def scaling(self) -> float:  # type: ignore[override]
        return self.head_dim**-0.5


class CachedModel(OpenAIGPTModel):
    """The stock model's forward, with the cache and the mask handed to each layer."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        x = self.tokens_embed(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        mask_inputs = (self.config, x, attention_mask)
        mask = create_causal_mask(*mask_inputs, past_key_values=past_key_values, position_ids=position_ids)
        if position_ids is None:
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(past, past + x.shape[1], device=x.device)[None]
        x = x + self.positions_embed(position_ids)
        if token_type_ids is not None:
            x = x + self.tokens_embed(token_type_ids)
        x = self.drop(x)
        layers = [x]
        blocks: Any = self.h
        for block in blocks:
            attended, _ = block.attn(x, past_key_values, mask)
            x = block.ln_1(x + attended)
            x = block.ln_2(x + block.mlp(x))
            layers.append(x)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return BaseModelOutputWithPast(
            last_hidden_state=x, past_key_values=past_key_values, hidden_states=tuple(layers) if wanted else None
        )


class CachedLanguageModel:
    """What the class of the language model lacks: it would neither pass a cache on nor return it."""

    transformer: Any
    lm_head: Any
    config: Any
    loss_function: Any

    prepare_inputs_for_generation = GenerationMixin.prepare_inputs_for_generation

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        out = self.transformer(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        last = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, last])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )


class OpenAIGPTFamily(Family):
    def shape(self, module: Any) -> Shape:
        return Shape(module.n_head, module.n_head, module.split_size // module.n_head)

    def finish(self, model: PreTrainedModel, swapped: Sequence[Site], kept: Sequence[Site]) -> None:
        change_class(model.base_model, CachedModel)
        for site in (*swapped, *kept):
            module: Any = site.module
            module.layer_idx = site.layer
            if site in kept:
                change_class(module, self.recurrent_class(module))
                keep_softmax(module, module.attn_dropout.p)


FAMILY = OpenAIGPTFamily(
    "openai-gpt",
    layers="h",
    self_attention="attn",
    recurrent=OpenAIGPTRecurrence,
    positions="learned",
    model_mixin=CachedLanguageModel,
    lacks=frozenset({"gradient checkpointing"}),
)
