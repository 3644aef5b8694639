"""Recurrent attention with its own forward, for families without rotary positions.

Cross attention keeps a state of fixed size for the source, and the feature map can be merged into the projections.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache

from t2r import ops
from t2r.attention.cache import adopt
from t2r.attention.layers import SiteLayer
from t2r.attention.masks import padding_and_starts
from t2r.attention.merged import Mergeable
from t2r.attention.observation import observe_linear, observe_softmax
from t2r.attention.recurrence import Inputs, mode_of
from t2r.attention.softmax import softmax_attention
from t2r.feature_maps import join_heads


class ProjectionAttention(Mergeable):
    """A site that computes its projections itself. Adapters implement the projections."""

    softmax_dropout: float = 0.0
    """The attention dropout of a softmax layer."""

    def keep_softmax(self, dropout: float) -> None:
        """Make this site a softmax layer without a feature map.

        For families whose stock attention cannot be kept, for example because it is not causal with a cache (FSMT)."""
        self.keeps_softmax, self.softmax_dropout = True, dropout

    def queries(self, hidden_states: Tensor) -> Tensor:
        """Compute unscaled queries, `[batch, heads, time, head_dim]`."""
        raise NotImplementedError

    def keys_values(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values for self attention. Families with a fused projection override this."""
        return self.queries(hidden_states), *self.keys_values(hidden_states)

    def output(self, attended: Tensor) -> Tensor:
        """Project `[batch, time, heads * head_dim]` to the hidden size."""
        raise NotImplementedError

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        t2r_documents: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if encoder_hidden_states is not None:  # GPT-2's names for the source and its mask
            key_value_states, attention_mask = encoder_hidden_states, encoder_attention_mask
        cross = key_value_states is not None
        layer = adopt(past_key_values, self.layer_idx, None if self.exact else self.make_layer, cross)
        if key_value_states is not None:
            out = self.attend_source(hidden_states, key_value_states, attention_mask, layer)
            if isinstance(past_key_values, EncoderDecoderCache):
                past_key_values.is_updated[self.layer_idx] = True
        else:
            mask = t2r_documents if attention_mask is None else attention_mask
            out = self.attend_self(hidden_states, mask, layer, position_bias)
        return self.output(join_heads(out)), None

    def attend_self(self, x: Tensor, mask: Tensor | None, layer: Any, position_bias: Tensor | None = None) -> Tensor:
        if self.merged is not None:
            return self.attend_merged(x, mask, layer)
        q, k, v = self.project(x)
        if not self.exact:
            return self.attend(Inputs(q, k, v, mask, self.scaling, hidden_states=x), layer)
        if layer is not None:
            k, v = layer.update(k, v)
        return self.attend_exactly(q, k, v, mask, causal=True, position_bias=position_bias)

    def attend_source(self, x: Tensor, source: Tensor, mask: Tensor | None, layer: Any) -> Tensor:
        """Compute cross attention. The source is processed once, into a state that all later queries read."""
        filled = layer is not None and layer.get_seq_length() > 0
        if self.exact:
            q = self.queries(x)
            k, v = (layer.keys, layer.values) if filled else self.keys_values(source)
            if layer is not None and not filled:
                k, v = layer.update(k, v)
            return self.attend_exactly(q, k, v, mask, causal=False)
        if filled:
            return ops.look(self.query_features(x), layer.state, x.dtype)
        if self.merged is not None:
            phi_q, phi_k = self.query_features(x), self.merged.keys(source, self.feature_map)
            v = self.values(source)
        else:
            k, v = self.keys_values(source)
            phi_q, phi_k = self.feature_map(self.queries(x) * self.scaling, k)
        padding, _ = padding_and_starts(mask, v.shape[2])
        v, rule = self.spread(v), self.feature_map.rule()
        observe_linear(self, phi_q, phi_k, v, rule, mask=padding, causal=False)
        out, state = rule.parallel(phi_q, phi_k, v, mask=padding, causal=False)
        if isinstance(layer, SiteLayer):
            assert layer.recurrence is not None
            layer.recurrence.store(state)
            layer.count(v.shape[2])
        return out  # type: ignore[return-value]

    def attend_exactly(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        position_bias: Tensor | None = None,
        mapped: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Softmax attention. `mapped`: queries and keys to which the feature map applies, if other than q and k."""
        dropout = self.softmax_dropout if self.training else 0.0
        observe_softmax(self, q, k, v, mask=mask, scaling=self.scaling, causal=causal, position_bias=position_bias)
        out = softmax_attention(q, k, v, mask, self.scaling, causal, dropout, position_bias=position_bias)
        mode = mode_of(self)
        if mode is not None and mode.observer is not None:
            mode.observer(self, Inputs(*(mapped or (q, k)), v, mask, self.scaling, causal), out)
        return out

    def query_features(self, x: Tensor) -> Tensor:
        if self.merged is not None:
            return self.merged.queries(x, self.feature_map)
        return self.feature_map.queries(self.queries(x) * self.scaling)
