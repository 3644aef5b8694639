"""The adaptive language model: a pre-norm decoder with sinusoidal positions, adaptive embeddings and adaptive softmax.

It computes the same function as fairseq's transformer_lm with the settings of transformer_lm_wiki103. It supports the
features of transformers models: caches, the attention interface, generation, saving and loading.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple

from t2r.architectures.adaptive_lm.adaptive import AdaptiveEmbedding, AdaptiveSoftmax, TailProjection
from t2r.architectures.adaptive_lm.configuration import AdaptiveLMConfig
from t2r.errors import T2RError


def sinusoids(positions: Tensor, size: int) -> Tensor:
    """Compute sines, then cosines, of each position in float32, with frequencies from 1 to exactly 1 / 10,000.

    They are computed when needed, so that there is no maximum length and no table to save or round."""
    half = size // 2
    steps = torch.arange(half, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * torch.exp(steps * -(math.log(10000) / (half - 1)))
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute softmax attention and return its weights."""
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class InputProjection(nn.Linear):
    """A projection of queries, keys or values. Its initial weights are smaller than those of other projections."""


class AdaptiveLMAttention(nn.Module):
    def __init__(self, config: AdaptiveLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.num_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // self.num_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = config.attention_dropout
        self.is_causal = True
        size = config.hidden_size
        self.q_proj, self.k_proj = InputProjection(size, size), InputProjection(size, size)
        self.v_proj, self.out_proj = InputProjection(size, size), nn.Linear(size, size)

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (
            project(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention
        )
        rate = self.dropout if self.training else 0.0
        attended, weights = attend(self, q, k, v, attention_mask, dropout=rate, scaling=self.scaling, **kwargs)
        return self.out_proj(attended.flatten(2)), weights


class AdaptiveLMDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: AdaptiveLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.dropout, self.activation_dropout = config.dropout, config.activation_dropout
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden_size)
        self.self_attn = AdaptiveLMAttention(config, layer_idx)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size)
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation_fn = ACT2FN[config.activation_function]
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        attended, weights = self.self_attn(self.self_attn_layer_norm(hidden_states), **kwargs)
        hidden_states = hidden_states + dropout(attended, self.dropout, self.training)
        x = self.activation_fn(self.fc1(self.final_layer_norm(hidden_states)))
        x = self.fc2(dropout(x, self.activation_dropout, self.training))
        return hidden_states + dropout(x, self.dropout, self.training), weights


class AdaptiveLMPreTrainedModel(PreTrainedModel):
    config_class = AdaptiveLMConfig
    config: AdaptiveLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["AdaptiveLMDecoderLayer"]  # type: ignore[misc]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        """Initialize weights as in fairseq."""
        if isinstance(module, InputProjection):
            bound = module.in_features**-0.5
            init.xavier_uniform_(module.weight, gain=2**-0.5)
            init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=module.embedding_dim**-0.5)
            if module.padding_idx is not None:
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, nn.Linear | TailProjection):
            init.xavier_uniform_(module.weight)
            bias: Any = getattr(module, "bias", None)
            if bias is not None:
                init.zeros_(bias)


class AdaptiveLMModel(AdaptiveLMPreTrainedModel):
    """The decoder without the softmax."""

    def __init__(self, config: AdaptiveLMConfig) -> None:
        super().__init__(config)
        self.embed_tokens = AdaptiveEmbedding(config.bands(), config.hidden_size, config.pad_token_id)
        self.embed_scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0
        self.layers = nn.ModuleList(AdaptiveLMDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.final_layer_norm = nn.LayerNorm(config.hidden_size) if config.final_layer_norm else None
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """`position_ids` start at 0. `inputs_embeds` are outputs of `embed_tokens`, before scaling."""
        if (input_ids is None) == (inputs_embeds is None):
            raise T2RError("pass either input_ids or inputs_embeds")
        output_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        if output_attentions and self.config._attn_implementation != "eager":
            raise T2RError('output_attentions requires attn_implementation="eager": load the model with it')
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        assert inputs_embeds is not None
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            position_ids = count_positions(inputs_embeds, attention_mask, past_key_values)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        first = cast(int, self.config.first_position)
        positions = sinusoids(position_ids + first, self.config.hidden_size)
        hidden_states = inputs_embeds * self.embed_scale + positions.to(inputs_embeds)
        hidden_states = dropout(hidden_states, self.config.dropout, self.training)
        entered: list[Any] = []
        weights: list[Any] = []
        for layer in self.layers:
            if output_hidden_states:
                entered.append(hidden_states)
            if self.training and torch.rand(()).item() < self.config.layerdrop:
                hidden_states = pass_by(layer, hidden_states)
                continue
            hidden_states, attention = layer(
                hidden_states,
                attention_mask=mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                **kwargs,
            )
            weights.append(attention)
        if self.final_layer_norm is not None:
            hidden_states = self.final_layer_norm(hidden_states)
        return BaseModelOutputWithPast(
            last_hidden_state=cast(Any, hidden_states),
            past_key_values=past_key_values,
            hidden_states=(*entered, cast(Any, hidden_states)) if output_hidden_states else None,
            attentions=tuple(weights) if output_attentions else None,
        )


def count_positions(inputs_embeds: Tensor, attention_mask: Tensor | None, cache: Cache | None) -> Tensor:
    """Compute positions from 0, without counting padding, so that padding does not change the positions of tokens."""
    time, device = inputs_embeds.shape[1], inputs_embeds.device
    if attention_mask is not None and attention_mask.dim() == 2:
        return (attention_mask.long().cumsum(1) - 1).clamp_min(0)[:, -time:]
    past = 0 if cache is None else cache.get_seq_length()
    return (torch.arange(time, device=device) + past)[None]


def pass_by(layer: nn.Module, hidden_states: Tensor) -> Tensor:
    """Skip a layer, but give its parameters a gradient of zero.

    Distributed training averages the gradients of all parameters, and each process skips other layers."""
    return hidden_states + 0 * sum(p.flatten()[:1].sum().to(hidden_states) for p in layer.parameters())


class AdaptiveLMForCausalLM(AdaptiveLMPreTrainedModel, GenerationMixin):
    """The language model. Its logits are log-probabilities. With labels, it returns the loss and no logits."""

    loss_without_logits = True
    """With `labels` and `num_items_in_batch`, the loss is computed without logits, which saves memory."""

    def __init__(self, config: AdaptiveLMConfig) -> None:
        super().__init__(config)
        self.model = AdaptiveLMModel(config)
        self.lm_head = AdaptiveSoftmax(config.bands(), config.hidden_size, config.softmax_dropout)
        self._tied_weights_keys = dict(tied_weights(config))
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """The loss is the mean over labels that are not -100, or their sum divided by `num_items_in_batch` if given."""
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = out.last_hidden_state
        loss = logits = None
        if labels is not None:
            targets = labels[:, 1:].to(hidden_states.device)
            count = (targets >= 0).sum().clamp_min(1) if num_items_in_batch is None else num_items_in_batch
            loss = self.lm_head(hidden_states[:, :-1], targets)
            loss = loss / (count.to(loss.device) if isinstance(count, Tensor) else count)
        else:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden_states[:, kept])
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        if new_num_tokens in (None, self.config.vocab_size) and not any((*args, *kwargs.values())):
            return self.get_input_embeddings()
        raise T2RError(
            "the embeddings of an adaptive language model cannot be resized, because its words are ordered by frequency"
        )


def tied_weights(config: AdaptiveLMConfig) -> list[tuple[str, str]]:
    """Return pairs of tied parameters of softmax and embeddings: the words of every band, and projections of the tails.

    The head shares the words of the first band but not its projection."""
    if not config.tie_word_embeddings:
        return []
    count = len(config.bands())
    ties = [(f"lm_head.words.{i}.weight", f"model.embed_tokens.embeddings.{i}.weight") for i in range(count)]
    if config.tie_adaptive_projections:
        ties += [
            (f"lm_head.projections.{i - 1}.weight", f"model.embed_tokens.projections.{i}.weight")
            for i in range(1, count)
        ]
    return ties


AutoModel.register(AdaptiveLMConfig, AdaptiveLMModel, exist_ok=True)
AutoModelForCausalLM.register(AdaptiveLMConfig, AdaptiveLMForCausalLM, exist_ok=True)
