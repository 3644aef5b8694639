"""GPT-J: attention parallel to the feed-forward, rotary positions in part of each head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb

from t2r.surgery.adapters.bart import BartRecurrence
from t2r.surgery.adapters.rotated import RotatedAttention, RotatedFamily


class GPTJRecurrence(RotatedAttention, BartRecurrence):
    resid_dropout: Any
    rotary_dim: int | None
    pos_embd_dim: int

    def output(self, attended: Tensor) -> Tensor:
        return self.resid_dropout(self.out_proj(attended))

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        # Angles are computed here, because the stock table is limited to the configured positions.
        dimensions = torch.arange(0, self.pos_embd_dim, 2, dtype=torch.int64, device=q.device)
        angles = positions[..., None].float() / 10000 ** (dimensions / self.pos_embd_dim)
        sin, cos = angles.sin().to(k.dtype), angles.cos().to(k.dtype)
        return self.turn(q, sin, cos), self.turn(k, sin, cos)

    def turn(self, x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        size = x.shape[-1] if self.rotary_dim is None else self.rotary_dim
        turned = apply_rotary_pos_emb(x[..., :size].transpose(1, 2), sin, cos).transpose(1, 2)
        return torch.cat([turned, x[..., size:]], dim=-1)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        layer_past: Any = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        return self.attend_rotated(hidden_states, attention_mask, layer_past, position_ids), None


class GPTJFamily(RotatedFamily):
    def softmax_dropout(self, module: Any) -> float:
        return float(module.attn_dropout.p)


FAMILY = GPTJFamily("gptj", layers="h", self_attention="attn", recurrent=GPTJRecurrence)
