"""What the recurrent layers must know about the sequences of a step, computed once for all layers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.linear_attn import (
    LinearAttentionBackend,
    LinearAttentionMetadata,
    LinearAttentionMetadataBuilder,
)

from t2r.ops import Slots


@dataclass
class Batch(LinearAttentionMetadata):
    """The sequences of a step. Those with one new token are first (`num_decodes`); the others read a prompt."""

    slots: Slots
    """The page of each sequence, and whether it is new."""
    seen: Tensor
    """The number of tokens that each has read."""
    bounds: list[int]
    """Where the tokens of each of those that read a prompt begin, and where the last one ends."""
    mask: Tensor | None
    """`[num_prefills, longest]`, false for padding, if these were rows. None: there is none."""


class RecurrentBackend(LinearAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "T2R"

    @staticmethod
    def get_builder_cls() -> type[LinearAttentionMetadataBuilder]:
        return BatchBuilder


class BatchBuilder(LinearAttentionMetadataBuilder):
    """Builds a `Batch`. What a step of one token reads is at fixed addresses, so that it can be a CUDA graph."""

    at: Tensor | None = None
    seen: Tensor
    new: Tensor

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Batch:
        found = super().build(common_prefix_len, common_attn_metadata, fast_build)
        count = found.state_indices_tensor.shape[0]
        if self.at is None or self.at.shape[0] < count:
            most = max(count, self.vllm_config.scheduler_config.max_num_seqs)
            self.at, self.seen = torch.zeros(2, most, dtype=torch.long, device=found.seq_lens.device)
            self.new = self.seen == 0
        at, seen, new = self.at[:count], self.seen[:count], self.new[:count]
        # Sequences that fill up a captured step have no tokens, and the page of nobody, which is the first.
        at.copy_(found.state_indices_tensor.clamp_min(0))
        seen.copy_((found.seq_lens - found.query_start_loc.diff())[:count].clamp_min(0))
        new.copy_(seen == 0)
        bounds = common_attn_metadata.query_start_loc_cpu[found.num_decodes :].tolist() if found.num_prefills else []
        held = {field.name: getattr(found, field.name) for field in fields(found)}
        return Batch(**held, slots=Slots(at, new), seen=seen, bounds=bounds, mask=mask_of(bounds, at.device))


def mask_of(bounds: list[int], device: torch.device) -> Tensor | None:
    """Return the padding mask of rows that end at these places. None: all have one length, or there are none."""
    lengths = [end - start for start, end in pairwise(bounds)]
    if len(set(lengths)) <= 1:
        return None
    return torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]
