"""FSMT (fairseq's WMT models): time comes before the batch, and the attention interface is not used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import FSMTModel, PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import Seq2SeqModelOutput
from transformers.models.fsmt.modeling_fsmt import shift_tokens_right
from transformers.utils.generic import can_return_tuple

from t2r.adapters.bart import BartRecurrence
from t2r.adapters.base import Family, Site, change_class
from t2r.adapters.marian import keep_saved_length
from t2r.attention import keep_softmax


class FSMTRecurrence(BartRecurrence):
    encoder_decoder_attention: bool

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None = None,
        layer_state: Any = None,
        attn_mask: Tensor | None = None,  # causal, and absent where there is a cache: ours always is
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        source = key.transpose(0, 1) if self.encoder_decoder_attention else None
        mask = None if key_padding_mask is None else ~key_padding_mask
        out, _ = super().forward(query.transpose(0, 1), layer_state, mask, source)
        return out.transpose(0, 1), None


class UnmaskedModel(FSMTModel):
    """The stock forward without the causal mask that it makes where there is no cache: a mask that our attention
    does not need, that overflows in float64, and for which it looks at the values of the tokens."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        if decoder_input_ids is None and decoder_inputs_embeds is None and input_ids is not None:
            decoder_input_ids = shift_tokens_right(input_ids.clone(), self.config.pad_token_id)
        hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds, output_hidden_states=hidden)
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(), DynamicCache())
        out = self.decoder(
            decoder_input_ids,
            encoder_outputs[0],
            attention_mask,
            None if decoder_attention_mask is None else decoder_attention_mask == 0,
            decoder_causal_mask=None,
            inputs_embeds=decoder_inputs_embeds,
            past_key_values=past_key_values,
            output_hidden_states=hidden,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=out.last_hidden_state,
            past_key_values=out.past_key_values,
            decoder_hidden_states=out.hidden_states,
            encoder_last_hidden_state=encoder_outputs[0],
            encoder_hidden_states=encoder_outputs[1] if len(encoder_outputs) > 1 else None,
        )


class FSMTFamily(Family):
    def finish(self, model: PreTrainedModel, swapped: Sequence[Site], kept: Sequence[Site]) -> None:
        base: Any = model.base_model
        for part in (base.encoder, base.decoder):  # each makes its table longer when it must
            keep_saved_length(part.embed_positions)
        change_class(model.base_model, UnmaskedModel)
        for site in kept:
            module: Any = site.module
            change_class(module, self.recurrent_class(module))
            keep_softmax(module, module.dropout)


FAMILY = FSMTFamily(
    "fsmt",
    layers="decoder.layers",
    cross_attention="encoder_attn",
    recurrent=FSMTRecurrence,
    positions="sinusoidal",
    lacks=frozenset({"gradient checkpointing", "resizing its embeddings"}),
)
