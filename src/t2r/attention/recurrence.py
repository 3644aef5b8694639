"""Attention that is an RNN, and the two ways in which a model comes to have it.

`Recurrence` is what both share: a feature map, and the choice between the recurrence and exact softmax.
`InterfaceAttention` leaves the stock module's forward as it is (rotary positions, grouped heads, normalized
queries come for free) and takes part through transformers' attention interface. `ProjectionAttention` takes over
the projections as well, so that it can keep a fixed-size cross-attention state and be merged.

A swapped module stays the object it was; only its class changes, to one that inherits the stock class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, EncoderDecoderCache

from t2r import ops
from t2r.attention.cache import Added, RecurrentLayer, adopt
from t2r.attention.masks import documents_from_positions, make_mask, padding_and_starts
from t2r.attention.softmax import softmax_attention
from t2r.errors import T2RError
from t2r.feature_maps import AffineMap, FeatureMap, repeat_heads

NAME = "t2r"
"""The attention implementation's name: `model.config._attn_implementation` of every swapped model."""


class Inputs(NamedTuple):
    """What an attention is computed from: queries and keys as the map sees them."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scaling: float
    causal: bool


class Recurrence(nn.Module):
    """A site of attention: normalized linear attention over features, or the softmax attention it came from."""

    feature_map: FeatureMap
    layer_idx: int
    exact: bool = False
    """Run the exact softmax attention instead: proves the surgery, and is the target of the transfer stage."""
    observer: Callable[[Recurrence, Inputs, Tensor], None] | None = None
    """While exact: is shown what came in, which the recurrence can imitate, and what was given."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        layer: Any,
        scaling: float,
    ) -> Tensor:
        """Causal attention over the new tokens and the state of all before: `[batch, heads, time, head_dim]`."""
        phi_q, phi_k = self.feature_map(q * scaling, k)
        return self.advance(phi_q, phi_k, v, mask, layer)

    def advance(self, phi_q: Tensor, phi_k: Tensor, v: Tensor, mask: Tensor | None, layer: Any) -> Tensor:
        """One token or many: read them into the layer's state, if there is a layer, and give the outputs."""
        v, time = self.spread(v), phi_k.shape[2]
        padding, starts = padding_and_starts(mask, time)
        how: dict[str, Any] = {"mask": padding, "decay": self.feature_map.decay, "signed": self.feature_map.signed}
        if not isinstance(layer, RecurrentLayer):
            out, _ = ops.linear_attention(phi_q, phi_k, v, starts=starts, **how)
            return out
        state = layer.state
        if state is not None and state.s.device != phi_q.device:
            state = state.map(lambda x: x.to(phi_q.device))
        if time == 1 and state is not None and starts is None:
            # Without gradients the state keeps its address: nothing is allocated, and a compiled step stays valid.
            inplace = not torch.is_grad_enabled() and not layer.record_past
            out, state = ops.step(phi_q, phi_k, v, state, inplace=inplace, **how)
        else:
            out, state = ops.linear_attention(phi_q, phi_k, v, state=state, starts=starts, **how)
        layer.store(state, time, Added(phi_k, v, padding, how["decay"]))
        return out

    def imitate(self, inputs: Inputs) -> Tensor:
        """What the recurrence gives for these inputs, without a cache."""
        q, k, v, mask, scaling, causal = inputs
        phi_q, phi_k = self.feature_map(q * scaling, k)
        padding, starts = padding_and_starts(mask, k.shape[2])
        how: dict[str, Any] = {"mask": padding, "decay": self.feature_map.decay, "signed": self.feature_map.signed}
        out, _ = ops.linear_attention(phi_q, phi_k, self.spread(v), starts=starts, causal=causal, **how)
        return out

    def spread(self, v: Tensor) -> Tensor:
        """Values for every key head of the map: with un-grouped keys, one per query head."""
        return repeat_heads(v, self.feature_map.key_heads)


class InterfaceAttention(Recurrence):
    """A stock module that reaches `attention_forward` through transformers' attention interface.

    The interface hands over queries, keys and values but not the cache, so the way in notes its layer."""

    cache_layer: Any = None
    cache_arguments = ("past_key_values", "layer_past")
    rotary: bool = True
    """Whether the map sees queries and keys after their rotation. Without it the stock forward is given a rotation by
    nothing, whatever its own way to rotate."""
    unrotated: list[tuple[Tensor, Tensor]] | None = None
    """While a list, the attention only notes queries and keys in it. For the observer, who is to see those without
    their rotation although the exact attention needs them with it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        caches = {name: kwargs[name] for name in self.cache_arguments if kwargs.get(name) is not None}
        self.cache_layer = adopt(next(iter(caches.values()), None), self.layer_idx, recurrent=not self.exact)
        if self.rotary or kwargs.get("position_embeddings") is None:
            return super().forward(*args, **kwargs)
        cos, sin = kwargs["position_embeddings"]
        still = {**kwargs, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}
        if not self.exact:
            return super().forward(*args, **still)
        if self.observer is not None:
            self.unrotated = []
            with torch.no_grad():
                super().forward(*args, **still | dict.fromkeys(caches))
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.unrotated = None


class Affine(NamedTuple):
    weight: Tensor
    bias: Tensor | None


class MergedProjections(nn.Module):
    """The queries' and keys' projections with the map's affine part and the query scale folded in, as in the paper:
    q and k are never formed."""

    def __init__(self, hidden: int, source: int, feature_map: AffineMap) -> None:
        super().__init__()
        self.q = nn.Linear(hidden, feature_map.num_heads * feature_map.rows)
        self.k = nn.Linear(source, feature_map.key_heads * feature_map.key_rows)

    def queries(self, x: Tensor, feature_map: FeatureMap) -> Tensor:
        assert isinstance(feature_map, AffineMap)
        return feature_map.activate(self.q(x).unflatten(-1, (-1, feature_map.rows)).transpose(1, 2))

    def keys(self, x: Tensor, feature_map: FeatureMap) -> Tensor:
        assert isinstance(feature_map, AffineMap)
        return feature_map.activate_keys(self.k(x).unflatten(-1, (-1, feature_map.key_rows)).transpose(1, 2))


class ProjectionAttention(Recurrence):
    """A module whose projections are ours. A family says where they are; the rest is here."""

    scaling: float
    softmax_dropout: float = 0.0
    """Of a layer that was kept as softmax attention (see `keep_softmax`)."""

    @property
    def merged(self) -> MergedProjections | None:
        """After a merge: features straight from the hidden states, beside the values' projection."""
        merged: Any = self._modules.get("merged_projections")
        return merged

    def queries(self, hidden_states: Tensor) -> Tensor:
        """`[batch, heads, time, head_dim]`, not scaled."""
        raise NotImplementedError

    def values(self, hidden_states: Tensor) -> Tensor:
        """The values alone, after a merge."""
        raise NotImplementedError

    def query_key_projections(self) -> tuple[Affine, Affine]:
        """Weight `[heads * head_dim, hidden]` and bias of the queries' and the keys' projection."""
        raise NotImplementedError

    def drop_query_key_projections(self) -> None:
        """Keep the values' projection only."""
        raise NotImplementedError

    def keys_values(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All three for self attention; a family with one fused projection does it at once."""
        return self.queries(hidden_states), *self.keys_values(hidden_states)

    def output(self, attended: Tensor) -> Tensor:
        """From `[batch, time, heads * head_dim]` to the residual stream."""
        raise NotImplementedError

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if encoder_hidden_states is not None:  # GPT-2's names for a source and its mask
            key_value_states, attention_mask = encoder_hidden_states, encoder_attention_mask
        cross = key_value_states is not None
        layer = adopt(past_key_values, self.layer_idx, recurrent=not self.exact, cross=cross)
        if key_value_states is not None:
            out = self.attend_source(hidden_states, key_value_states, attention_mask, layer)
            if isinstance(past_key_values, EncoderDecoderCache):
                past_key_values.is_updated[self.layer_idx] = True
        else:
            if attention_mask is None and layer is None:
                attention_mask = documents_from_positions(position_ids, hidden_states.shape[0])
            out = self.attend_self(hidden_states, attention_mask, layer, position_bias)
        return self.output(out.transpose(1, 2).flatten(2)), None

    def attend_self(self, x: Tensor, mask: Tensor | None, layer: Any, position_bias: Tensor | None = None) -> Tensor:
        if self.merged is not None:
            phi_q, phi_k = self.merged.queries(x, self.feature_map), self.merged.keys(x, self.feature_map)
            return self.advance(phi_q, phi_k, self.values(x), mask, layer)
        q, k, v = self.project(x)
        if not self.exact:
            return self.attend(q, k, v, mask, layer, self.scaling)
        if layer is not None:
            k, v = layer.update(k, v)
        return self.attend_exactly(q, k, v, mask, causal=True, position_bias=position_bias)

    def attend_source(self, x: Tensor, source: Tensor, mask: Tensor | None, layer: Any) -> Tensor:
        """Cross attention: the source is read once, into a state that every later query looks at."""
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
        out, state = ops.linear_attention(
            phi_q, phi_k, self.spread(v), mask=padding, causal=False, signed=self.feature_map.signed
        )
        if isinstance(layer, RecurrentLayer):
            layer.store(state, v.shape[2])
        return out

    def attend_exactly(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        position_bias: Tensor | None = None,
    ) -> Tensor:
        dropout = self.softmax_dropout if self.training else 0.0
        out = softmax_attention(q, k, v, mask, self.scaling, causal, dropout, position_bias=position_bias)
        if self.observer is not None:
            self.observer(self, Inputs(q, k, v, mask, self.scaling, causal), out)
        return out

    def become_merged(self) -> None:
        """Make room for merged projections, in place of those of queries and keys and of the map's own weights."""
        assert isinstance(self.feature_map, AffineMap)
        (q, _), (k, _) = self.query_key_projections()
        with torch.device(q.device):
            merged = MergedProjections(q.shape[1], k.shape[1], self.feature_map)
        self.merged_projections = merged.to(q.dtype).requires_grad_(False)
        self.drop_query_key_projections()
        self.feature_map.drop_affine()

    def query_features(self, x: Tensor) -> Tensor:
        if self.merged is not None:
            return self.merged.queries(x, self.feature_map)
        return self.feature_map.queries(self.queries(x) * self.scaling)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls, for every attention of a swapped model: recurrent sites, layers that kept their
    softmax attention, and encoders alike."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    noted = module.unrotated if isinstance(module, InterfaceAttention) else None
    if noted is not None and not noted:
        noted.append((query, key))
        return query.transpose(1, 2).contiguous(), None
    if isinstance(module, InterfaceAttention) and not module.exact:
        out = module.attend(query, key, value, attention_mask, module.cache_layer, scaling)
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal and attention_mask is None and query.shape[2] == key.shape[2]:
            attention_mask = documents_from_positions(kwargs.get("position_ids"), query.shape[0])
        options = (scaling, causal, dropout, sliding_window, softcap, position_bias)
        out = softmax_attention(query, key, value, attention_mask, *options)
        if isinstance(module, InterfaceAttention) and module.observer is not None:
            query, key = noted[0] if noted else (query, key)
            module.observer(module, Inputs(query, key, value, attention_mask, scaling, causal), out)
    return out.transpose(1, 2).contiguous(), None


# --- Modes --------------------------------------------------------------------------------------------------


def recurrent_sites(model: nn.Module) -> list[Recurrence]:
    """Every swapped module of a model, from the bottom up."""
    return [m for m in model.modules() if isinstance(m, Recurrence) and hasattr(m, "feature_map")]


def keep_softmax(module: ProjectionAttention, dropout: float) -> None:
    """Make a site softmax attention for good, without a feature map. For families whose own attention cannot be
    kept as it is: it knows no cache (GPT-1), or forgets causality with one (FSMT)."""
    module.exact, module.softmax_dropout = True, dropout


@contextmanager
def exact_attention(model: nn.Module) -> Iterator[None]:
    """Inside the `with` block every swapped site computes exact softmax attention with the model's weights."""
    sites = recurrent_sites(model)
    if any(getattr(site, "merged", None) is not None for site in sites):
        raise T2RError("a merged model has no queries and keys any more: there is no softmax attention to go back to")
    before = [site.exact for site in sites]
    try:
        for site in sites:
            site.exact = True
        yield
    finally:
        for site, exact in zip(sites, before, strict=True):
            site.exact = exact


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, make_mask)
