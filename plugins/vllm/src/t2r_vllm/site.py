"""A recurrent layer in vLLM: t2r's recurrence on states and windows in the pages of vLLM's cache."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from t2r.attention.layers import SiteLayer
from t2r.attention.memories import BUFFERS, Memory
from t2r.attention.memories.window import table_of
from t2r.attention.recurrence import Inputs, Recurrence
from t2r.feature_maps import AffineMap, FeatureMap
from t2r.ops import Slots, State
from t2r_vllm.layout import STATE, Layout, Site
from t2r_vllm.memories import PagedState, PagedWindow
from t2r_vllm.metadata import Batch, RecurrentBackend

OPERATOR = "vllm::t2r_attention"
"""The name of the operator that runs a site."""


class PagedSite(Recurrence, MambaBase):
    """Takes the place of vLLM's attention in one layer.

    A page of vLLM's cache holds what one sequence has in this layer (`Layout`). The sequences of a step are rows of a
    batch, as in `generate`, whose memories are in these pages.

    Args:
        feature_map: the map of this layer, with the heads of this process. None: no head has a state.
        scaling: the factor of queries.
        layout: what a page holds.
        prefix: the name by which vLLM knows the layer.
        softcap: the bound of attention scores in windows.
        merged: whether queries and keys are the outputs of the affine part of the map.
    """

    mamba_type = MambaAttentionBackendEnum.LINEAR
    kv_cache: tuple[Tensor, ...]

    def __init__(
        self,
        site: Site,
        feature_map: FeatureMap | None,
        scaling: float,
        layout: Layout,
        prefix: str,
        softcap: float | None = None,
        merged: bool = False,
    ) -> None:
        super().__init__()
        self.site, self.layout, self.prefix = site, layout, prefix
        self.scaling, self.softcap, self.merged = scaling, softcap, merged
        self.pages: dict[str, Tensor] = {}
        self.table: Tensor | None = None
        size = site.heads.size
        self.sizes = (size, size, size)
        if feature_map is not None:
            self.feature_map = feature_map
        if merged:
            assert isinstance(feature_map, AffineMap)
            self.sizes = (feature_map.rows, feature_map.key_rows, size)

    def follow(self, device: torch.device) -> None:
        """Give the site the windows and states of its heads, as tensors on a device."""
        if self.site.window is not None:
            self.give_window(self.site.window, device)
            if device.type == "cuda":  # before vLLM captures steps
                self.table = table_of(self.site.window, device)
        if len(self.site.states) < self.site.heads.keys:
            self.give_states(self.site.states, self.site.heads.keys, device)

    # --- What vLLM asks -------------------------------------------------------------------------------------

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self.layout.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self.layout.dtypes

    def get_attn_backend(self) -> Any:
        return RecurrentBackend

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take the pages. Those of other layers may have more heads, or larger windows."""
        super().bind_kv_cache(kv_cache)
        pages = self.layout.split(self.kv_cache[0])
        counts = {name: self.feature_map.key_heads if self.has_map else 0 for name in STATE}
        own = {name: x[:, : counts.get(name, self.site.slots)] for name, x in pages.items()}
        self.pages = {name: x for name, x in own.items() if x.shape[1]}

    # --- A step of all sequences ----------------------------------------------------------------------------

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend with the new tokens of all sequences: `[tokens, heads * head_dim]`."""
        out = query.new_empty(query.shape[0], self.site.heads.queries * self.site.heads.size)
        torch.ops.vllm.t2r_attention(query, key, value, out, self.prefix)
        return out

    def run(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        batches = get_forward_context().attn_metadata
        if batches is None:  # vLLM measures the memory of a forward, and there is no cache yet
            out.zero_()
            return
        batch = batches[self.prefix]
        inputs = [x.view(x.shape[0], -1, size) for x, size in zip((query, key, value), self.sizes, strict=True)]
        if count := batch.num_decodes:
            rows = [x[:count, :, None] for x in inputs]
            out[:count] = self.advance_pages(rows, None, batch, slice(0, count))[:, :, 0].flatten(1)
        if batch.num_prefills:
            self.read_prompts(inputs, batch, out)

    def read_prompts(self, inputs: list[Tensor], batch: Batch, out: Tensor) -> None:
        """Process the sequences with several new tokens, as rows that are padded at the end."""
        bounds, mask = batch.bounds, batch.mask
        parts = [[x[start:end] for start, end in pairwise(bounds)] for x in inputs]
        rows = [pad_sequence(part, batch_first=True).transpose(1, 2) for part in parts]
        which = slice(batch.num_decodes, batch.num_decodes + batch.num_prefills)
        made = self.advance_pages(rows, mask, batch, which).transpose(1, 2)
        if mask is None:
            flat = made.flatten(0, 1)
        else:
            flat = torch.cat([row[: end - start] for row, (start, end) in zip(made, pairwise(bounds), strict=True)])
        out[bounds[0] : bounds[-1]] = flat.flatten(1)

    def advance_pages(self, rows: list[Tensor], mask: Tensor | None, batch: Batch, which: slice) -> Tensor:
        """Attend with new tokens `[rows, heads, time, size]` of some sequences, and advance what is in their pages.

        `mask [rows, time]` is false for padding after the new tokens."""
        slots, q = Slots(*(x[which] for x in batch.slots)), rows[0]
        k, v = self.site.rounded(*rows[1:])
        memories: list[Memory] = []
        if self.window is not None:
            pages = tuple(self.pages[name] for name in BUFFERS if name in self.pages)
            memories.append(PagedWindow(self.window, pages, self.table, slots, batch.seen[which]))
        if self.has_map:
            memories.append(PagedState(State(*(self.pages.get(name) for name in STATE)), slots))  # type: ignore[arg-type]
        layer = SiteLayer(*memories)
        inputs = Inputs(q, k, v, mask, self.scaling, True, self.softcap)
        out = self.attend_merged(inputs, layer) if self.merged else self.attend(inputs, layer)
        self.table = layer.window.table if layer.window is not None else None  # for later steps, also captured ones
        return out

    def attend_merged(self, inputs: Inputs, layer: SiteLayer) -> Tensor:
        """Attend with queries and keys that are the outputs of the affine part of the map."""
        assert isinstance(self.feature_map, AffineMap)
        q, k, v, mask = inputs[:4]
        if (features := self.fused(q, v, mask, layer)) is None:
            q, k = self.feature_map.activate(q), self.feature_map.activate_keys(k)
        return self.advance(q, k, v, mask, layer, features)


def attend(query: Tensor, key: Tensor, value: Tensor, out: Tensor, layer: str) -> None:
    get_forward_context().no_compile_layers[layer].run(query, key, value, out)


def attend_nothing(query: Tensor, key: Tensor, value: Tensor, out: Tensor, layer: str) -> None:
    """What the operator does to the shapes, for torch.compile: nothing."""


direct_register_custom_op(OPERATOR.partition("::")[2], attend, mutates_args=["out"], fake_impl=attend_nothing)
