"""GPT-NeoX and Pythia: one fused projection, rotary positions in part of each head."""

from __future__ import annotations

from typing import Any

from t2r.surgery.adapters.base import Family, Shape


class GPTNeoXFamily(Family):
    def shape(self, module: Any) -> Shape:
        heads = module.config.num_attention_heads
        return Shape(heads, heads, module.head_size)


FAMILY = GPTNeoXFamily("gpt_neox", self_attention="attention")
