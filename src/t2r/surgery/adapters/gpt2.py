"""GPT-2: one fused projection for queries, keys and values, learned positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from t2r.attention.merged import Affine
from t2r.attention.projection import ProjectionAttention
from t2r.feature_maps import split_heads
from t2r.surgery.adapters.base import Family


class GPT2Recurrence(ProjectionAttention):
    c_attn: Any
    q_attn: Any
    c_proj: Any
    resid_dropout: Any
    split_size: int
    head_dim: int
    is_cross_attention: bool

    def heads(self, x: Tensor) -> Tensor:
        return split_heads(x, self.head_dim)

    # In cross attention, queries have a separate projection. In self attention, `project` computes all three.

    def queries(self, hidden_states: Tensor) -> Tensor:
        return self.heads(self.q_attn(hidden_states))

    def keys_values(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.c_attn(hidden_states).split(self.split_size, dim=-1)
        return self.heads(k), self.heads(v)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.c_attn(hidden_states).split(self.split_size, dim=-1)
        return self.heads(q), self.heads(k), self.heads(v)

    @property
    def value_projection(self) -> Any:
        return self.c_attn

    def query_key_projections(self) -> tuple[Affine, Affine]:
        # The weight of a Conv1D has shape [in, out].
        parts = list(
            zip(self.c_attn.weight.T.split(self.split_size), self.c_attn.bias.split(self.split_size), strict=True)
        )
        if self.is_cross_attention:
            return Affine(self.q_attn.weight.T, self.q_attn.bias), Affine(*parts[0])
        return Affine(*parts[0]), Affine(*parts[1])

    def drop_query_key_projections(self) -> None:
        stock = self.c_attn
        values = Conv1D(self.split_size, stock.weight.shape[0])
        values.weight = nn.Parameter(stock.weight[:, -self.split_size :].contiguous())
        values.bias = nn.Parameter(stock.bias[-self.split_size :].contiguous())
        self.c_attn = values
        if self.is_cross_attention:
            del self.q_attn

    def output(self, attended: Tensor) -> Tensor:
        return self.resid_dropout(self.c_proj(attended))


FAMILY = Family(
    "gpt2",
    layers="h",
    self_attention="attn",
    cross_attention="crossattention",
    recurrent=GPT2Recurrence,
    positions="learned",
)
