"""FSMT (fairseq's WMT models): tensors are time first, and the attention interface is not used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, embedding
from transformers import FSMTModel, PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import Seq2SeqModelOutput
from transformers.models.fsmt.modeling_fsmt import shift_tokens_right
from transformers.utils.generic import can_return_tuple

from t2r.surgery.adapters.bart import BartRecurrence
from t2r.surgery.adapters.base import Family, Site, change_class
from t2r.surgery.adapters.marian import keep_saved_length


class FSMTRecurrence(BartRecurrence):
    encoder_decoder_attention: bool

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None = None,
        layer_state: Any = None,
        attn_mask: Tensor | None = None,  # ignored: the attention is always causal
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        source = key.transpose(0, 1) if self.encoder_decoder_attention else None
        mask = None if key_padding_mask is None else ~key_padding_mask
        out, _ = super().forward(query.transpose(0, 1), layer_state, mask, source)
        return out.transpose(0, 1), None


class CachedModel(FSMTModel):
    """FSMT with a corrected forward.

    The stock forward has no causal mask with a cache, and one that overflows in float64 without a cache. In older
    versions of transformers, its positions restart at every step. The attention of t2r is causal without a mask."""

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
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        decoder: Any = self.decoder
        x = embed(decoder, decoder_input_ids, decoder_inputs_embeds, past).transpose(0, 1)
        source = encoder_outputs[0].transpose(0, 1)
        states: list[Any] = [x]
        for layer in decoder.layers:
            if self.training and torch.rand([]) < decoder.layerdrop:
                continue
            x, _, _ = layer(
                x,
                source,
                encoder_attn_mask=None if attention_mask is None else attention_mask == 0,
                decoder_padding_mask=None if decoder_attention_mask is None else decoder_attention_mask == 0,
                layer_state=past_key_values,
            )
            states.append(x)
        return Seq2SeqModelOutput(
            last_hidden_state=decoder.output_projection(x.transpose(0, 1)),
            past_key_values=past_key_values,
            decoder_hidden_states=tuple(state.transpose(0, 1) for state in states) if hidden else None,
            encoder_last_hidden_state=encoder_outputs[0],
            encoder_hidden_states=encoder_outputs[1] if len(encoder_outputs) > 1 else None,
        )


def embed(decoder: Any, input_ids: Tensor | None, inputs_embeds: Tensor | None, past: int) -> Tensor:
    """Embed tokens and their positions. The table of positions is extended as needed. Padding has no position."""
    x = (decoder.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds) * decoder.embed_scale
    table, needed = decoder.embed_positions, decoder.padding_idx + 1 + past + x.shape[1]
    if needed > table.weight.shape[0]:
        table.make_weight(needed, table.embedding_dim, table.padding_idx)
    tokens = x.new_full(x.shape[:2], -1) if input_ids is None else input_ids
    positions = table.make_positions(tokens, table.padding_idx) + past
    return dropout(x + embedding(positions, table.weight), p=decoder.dropout, training=decoder.training)


class FSMTFamily(Family):
    def finish(self, model: PreTrainedModel, swapped: Sequence[Site], kept: Sequence[Site]) -> None:
        base: Any = model.base_model
        for part in (base.encoder, base.decoder):  # each extends its own table as needed
            keep_saved_length(part.embed_positions)
        change_class(model.base_model, CachedModel)
        for site in kept:
            module: Any = site.module
            change_class(module, self.recurrent_class(module))
            module.keep_softmax(module.dropout)


FAMILY = FSMTFamily(
    "fsmt",
    layers="decoder.layers",
    cross_attention="encoder_attn",
    recurrent=FSMTRecurrence,
    positions="sinusoidal",
    lacks=frozenset({"gradient checkpointing", "resizing its embeddings"}),
)
