"""What the recurrent layers must know about a batch, computed once for all of them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.linear_attn import (
    LinearAttentionBackend,
    LinearAttentionMetadata,
    LinearAttentionMetadataBuilder,
)


@dataclass
class Batch(LinearAttentionMetadata):
    """The sequences of a step. Those with one new token are first (`num_decodes`); the others read a prompt."""

    bounds: list[int]
    """Where the tokens of each of the others begin, and where the last one ends."""


class RecurrentBackend(LinearAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "T2R"

    @staticmethod
    def get_builder_cls() -> type[LinearAttentionMetadataBuilder]:
        return BatchBuilder


class BatchBuilder(LinearAttentionMetadataBuilder):
    """Builds a `Batch`. The slots are at a fixed address, so that a step can be captured as a CUDA graph: with prefix
    caching, vLLM makes a new tensor of them in each step."""

    slots: Tensor | None = None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Batch:
        found = super().build(common_prefix_len, common_attn_metadata, fast_build)
        given = found.state_indices_tensor
        if self.slots is None or self.slots.shape[0] < given.shape[0]:
            most = self.vllm_config.scheduler_config.max_num_seqs
            self.slots = torch.zeros(max(most, given.shape[0]), dtype=given.dtype, device=given.device)
        slots = self.slots[: given.shape[0]]
        slots.copy_(given, non_blocking=True)
        held = {field.name: getattr(found, field.name) for field in fields(found)}
        bounds = common_attn_metadata.query_start_loc_cpu[found.num_decodes :].tolist()
        return Batch(**held | {"state_indices_tensor": slots}, bounds=bounds)
