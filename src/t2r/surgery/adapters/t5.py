"""T5: positions are a relative bias on the attention scores, which only softmax layers use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from t2r.attention.merged import Affine
from t2r.attention.projection import ProjectionAttention
from t2r.attention.recurrence import exact_somewhere
from t2r.feature_maps import split_heads
from t2r.surgery.adapters.base import Family, Shape, Site


class T5Projections(ProjectionAttention):
    q: Any
    k: Any
    v: Any
    o: Any
    key_value_proj_dim: int
    has_relative_attention_bias: bool
    compute_bias: Any
    relative_attention_bias: Any
    feeds_softmax: bool = False
    """Whether softmax layers above use the bias that this layer computes."""

    def heads(self, x: Tensor) -> Tensor:
        return split_heads(x, self.key_value_proj_dim)

    def queries(self, hidden_states: Tensor) -> Tensor:
        return self.heads(self.q(hidden_states))

    def keys_values(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return self.heads(self.k(hidden_states)), self.heads(self.v(hidden_states))

    @property
    def value_projection(self) -> Any:
        return self.v

    def query_key_projections(self) -> tuple[Affine, Affine]:
        return Affine(self.q.weight, None), Affine(self.k.weight, None)

    def drop_query_key_projections(self) -> None:
        del self.q, self.k

    def output(self, attended: Tensor) -> Tensor:
        return self.o(attended)

    def bias(self, hidden_states: Tensor, past_key_values: Any) -> Tensor:
        """Compute the bias on the scores of the new tokens with all tokens so far."""
        past = 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
        new = hidden_states.shape[1]
        bias: Tensor = self.compute_bias(new, past + new, hidden_states.device, past_seen_tokens=past)
        return bias

    def frozen_parameters(self) -> list[nn.Parameter]:
        used = self.feeds_softmax or not self.has_relative_attention_bias
        unused = [] if used else list(self.relative_attention_bias.parameters())
        return [*super().frozen_parameters(), *unused]


class T5Recurrence(T5Projections):
    """T5 attention. The first layer computes the bias, and all layers above reuse it."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        wanted = self.has_relative_attention_bias and (self.feeds_softmax or exact_somewhere())
        if wanted and position_bias is None:
            position_bias = self.bias(hidden_states, past_key_values)
        out, _ = super().forward(hidden_states, past_key_values, mask, key_value_states, position_bias=position_bias)
        return out, position_bias, None


class RelativeBiasFamily(Family):
    """T5 and related models, whose positions are a bias on the attention scores."""

    dropouts = ("dropout_rate",)

    def shape(self, module: Any) -> Shape:
        return Shape(module.n_heads, module.n_heads, module.key_value_proj_dim)

    def finish(self, model: PreTrainedModel, swapped: Sequence[Site], kept: Sequence[Site]) -> None:
        feeds = not all(site.cross for site in kept)  # cross attention has no bias
        for site in swapped:
            site.module.feeds_softmax = feeds  # type: ignore[assignment]

    def notices(self, model: PreTrainedModel, swapped: Sequence[Site]) -> Iterator[str]:
        yield from super().notices(model, swapped)
        count = sum(not site.cross for site in swapped)
        yield (
            f"the positions of {self.model_type} are a bias on its attention scores, which the {count} recurrent "
            "decoder layers do not have: their only position information is the order of tokens; the encoder, cross "
            "attention and softmax layers are not affected"
        )


def t5_like(
    model_type: str, recurrent: type[T5Projections], family: type[Family] = RelativeBiasFamily, about: str = ""
) -> Family:
    return family(
        model_type,
        about,
        layers="decoder.block",
        self_attention="layer.0.SelfAttention",
        cross_attention="layer.1.EncDecAttention",
        recurrent=recurrent,
        positions="relative",
        positions_by_row=True,
    )


FAMILY = t5_like("t5", T5Recurrence)
