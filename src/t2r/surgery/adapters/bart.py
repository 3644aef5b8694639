"""BART: separate q_proj, k_proj, v_proj and out_proj, which many other families share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from t2r.attention.merged import Affine
from t2r.attention.projection import ProjectionAttention
from t2r.feature_maps import split_heads
from t2r.surgery.adapters.base import Family


class BartRecurrence(ProjectionAttention):
    q_proj: Any
    k_proj: Any
    v_proj: Any
    out_proj: Any
    head_dim: int

    def heads(self, x: Tensor) -> Tensor:
        return split_heads(x, self.head_dim)

    def queries(self, hidden_states: Tensor) -> Tensor:
        return self.heads(self.q_proj(hidden_states))

    def keys_values(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return self.heads(self.k_proj(hidden_states)), self.heads(self.v_proj(hidden_states))

    @property
    def value_projection(self) -> Any:
        return self.v_proj

    def query_key_projections(self) -> tuple[Affine, Affine]:
        return Affine(self.q_proj.weight, self.q_proj.bias), Affine(self.k_proj.weight, self.k_proj.bias)

    def drop_query_key_projections(self) -> None:
        del self.q_proj, self.k_proj

    def output(self, attended: Tensor) -> Tensor:
        return self.out_proj(attended)


FAMILY = Family(
    "bart",
    layers="decoder.layers",
    cross_attention="encoder_attn",
    recurrent=BartRecurrence,
    positions="learned",
)
