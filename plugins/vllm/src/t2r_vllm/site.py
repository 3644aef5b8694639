"""A recurrent layer in vLLM: t2r's recurrence on states in the pages of vLLM's cache."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from t2r.attention.layers import SiteLayer
from t2r.attention.memories import StateMemory
from t2r.attention.recurrence import Inputs, Recurrence
from t2r.feature_maps import FeatureMap
from t2r.ops import State
from t2r_vllm.layout import Layout
from t2r_vllm.metadata import Batch, RecurrentBackend

OPERATOR = "vllm::t2r_attention"
"""The name of the operator that runs a site."""


class PagedSite(Recurrence, MambaBase):
    """Takes the place of vLLM's attention in one layer.

    A page of vLLM's cache holds what one sequence has in this layer (`Layout`). The sequences of a step are rows of a
    batch, as in `generate`: their pages are copied, advanced by t2r, and written back.

    Args:
        feature_map: the map of this layer, with the heads of this process.
        scaling: the factor of queries.
        layout: what a page holds.
        prefix: the name by which vLLM knows the layer.
    """

    mamba_type = MambaAttentionBackendEnum.LINEAR
    kv_cache: tuple[Tensor, ...]

    def __init__(self, feature_map: FeatureMap, scaling: float, layout: Layout, prefix: str) -> None:
        super().__init__()
        self.feature_map = feature_map
        self.scaling, self.layout, self.prefix = scaling, layout, prefix
        self.pages: dict[str, Tensor] = {}

    # --- What vLLM asks -------------------------------------------------------------------------------------

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self.layout.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self.layout.dtypes

    def get_attn_backend(self) -> Any:
        return RecurrentBackend

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        self.pages = self.layout.split(self.kv_cache[0])

    # --- A step of all sequences ----------------------------------------------------------------------------

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend with the new tokens of all sequences: `[tokens, heads * head_dim]`."""
        out = torch.empty_like(query)
        torch.ops.vllm.t2r_attention(query, key, value, out, self.prefix)
        return out

    def run(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        batches = get_forward_context().attn_metadata
        if batches is None:  # vLLM measures the memory of a forward, and there is no cache yet
            out.zero_()
            return
        batch = batches[self.prefix]
        count, size = batch.num_decodes, self.feature_map.head_dim
        inputs = [x.view(x.shape[0], -1, size) for x in (query, key, value)]
        if count:
            rows = [x[:count, :, None] for x in inputs]
            made = self.advance_pages(rows, None, batch.state_indices_tensor[:count], batch.seq_lens[:count] - 1)
            out[:count] = made[:, :, 0].flatten(1)
        if batch.num_prefills:
            self.read_prompts(inputs, batch, out)

    def read_prompts(self, inputs: list[Tensor], batch: Batch, out: Tensor) -> None:
        """Process the sequences with several new tokens, as rows that are padded at the end."""
        first, bounds = batch.num_decodes, batch.bounds
        lengths = [end - start for start, end in pairwise(bounds)]
        longest, device = max(lengths), out.device
        parts = [[x[a:b] for a, b in pairwise(bounds)] for x in inputs]
        rows = [torch.nn.utils.rnn.pad_sequence(part, batch_first=True).transpose(1, 2) for part in parts]
        length = torch.tensor(lengths, device=device)
        mask = None if min(lengths) == longest else torch.arange(longest, device=device) < length[:, None]
        last = first + batch.num_prefills
        seen = batch.seq_lens[first:last] - length
        made = self.advance_pages(rows, mask, batch.state_indices_tensor[first:last], seen).transpose(1, 2)
        flat = made.flatten(0, 1) if mask is None else made[mask]
        out[bounds[0] : bounds[-1]] = flat.flatten(1)

    def advance_pages(self, rows: list[Tensor], mask: Tensor | None, slots: Tensor, seen: Tensor) -> Tensor:
        """Attend with new tokens `[rows, heads, time, size]` of sequences, and advance their pages.

        Args:
            mask: `[rows, time]`, false for padding after the new tokens. None: there is none.
            slots: the page of each sequence.
            seen: the number of tokens that it has read.
        """
        slots, new = slots.long(), seen <= 0
        # A page is what another sequence left there, until the first token of a sequence.
        held = {name: x[slots].masked_fill(new.view(-1, *[1] * (x.dim() - 1)), 0) for name, x in self.pages.items()}
        layer = SiteLayer(StateMemory(State(**held), fixed=True))
        q, k, v = rows
        out = self.attend(Inputs(q, k, v, mask, self.scaling), layer)
        for name, x in held.items():
            self.pages[name][slots] = x
        return out


def attend(query: Tensor, key: Tensor, value: Tensor, out: Tensor, layer: str) -> None:
    get_forward_context().no_compile_layers[layer].run(query, key, value, out)


def attend_nothing(query: Tensor, key: Tensor, value: Tensor, out: Tensor, layer: str) -> None:
    """What the operator does to the shapes, for torch.compile: nothing."""


direct_register_custom_op(OPERATOR.partition("::")[2], attend, mutates_args=["out"], fake_impl=attend_nothing)
