"""A cache with a fixed number of rows, allocated once at fixed addresses.

A decoding step on it can be compiled once and captured as a CUDA graph. All tensors are updated in place, lengths are a
tensor, and there is no device synchronization. Rows are independent: each can be reset and filled from a prefill or a
saved state, and all advance together.

    cache = model.make_static_cache(rows=16, max_length=2048)      # max_length: only with softmax layers
    cache.put(3, prefilled)                                        # copy the sequence of `prefilled` to row 3
    model(tokens, past_key_values=cache, **cache.step_inputs())    # one token for every row
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from t2r.attention.cache import T2RCache
from t2r.attention.layers import SiteLayer


class StaticT2RCache(T2RCache):
    """A `T2RCache` of fixed size with a fixed number of rows."""

    is_static = True
    layers: list[Any]

    def __init__(self, layers: list[SiteLayer], lengths: Tensor, model: Any = None) -> None:
        super().__init__(layers, model)
        self.lengths = lengths
        self.kept = next((layer for layer in layers if layer.grows), None)
        self.counts_by_row = False
        size = 1 if self.kept is None else self.kept.get_max_length()
        self.columns = torch.arange(size, device=lengths.device)
        self.real = torch.ones(lengths.shape[0], 1, dtype=torch.long, device=lengths.device)

    @property
    def rows(self) -> int:
        return self.lengths.shape[0]

    @property
    def max_length(self) -> int | None:
        """The maximum number of tokens in softmax layers. None: there are none."""
        return None if self.kept is None else self.kept.get_max_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if self.kept is not None:
            return self.kept.get_mask_sizes(query_length)
        return query_length, 0

    def only_steps(self, by_row: bool) -> None:
        """Declare that all further inputs are single tokens without padding.

        With `by_row`, `get_seq_length` returns the length of each row `[rows, 1]`, for models that derive positions
        from it. Otherwise it returns the largest length."""
        self.counts_by_row = by_row
        for layer in self.layers:
            layer.only_real_tokens = True
            if layer.window is not None:
                layer.window.skipped = None

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.lengths[:, None] if self.counts_by_row else super().get_seq_length(layer_idx)

    def step_inputs(self) -> dict[str, Tensor]:
        """Return position ids and mask for a forward of one token per row. Their shapes never change.

        Rows may have different lengths. Without a mask, some models inspect the tokens to warn about padding, which
        synchronizes with the device."""
        mask = self.real if self.kept is None else (self.columns <= self.lengths[:, None]).long()
        return {"position_ids": self.lengths[:, None].clone(), "attention_mask": mask}

    def put(self, row: int, other: T2RCache, other_row: int = 0) -> None:
        """Copy one sequence of another cache (a prefill or a saved state) to a row, without its padding."""
        own, given = (torch.tensor([i], device=self.lengths.device) for i in (row, other_row))
        self.put_rows(own, other, given)

    def put_rows(self, rows: Tensor, other: T2RCache, index: Tensor) -> None:
        """Copy the sequences `index` of another cache to these rows, without their padding."""
        real, padding = None, other.padding
        if padding is not None and self.kept is not None:
            real = other.attention_mask().to(index.device)[index].bool()
        for own, new in zip(self.layers, other.layers, strict=True):
            own.put_rows(rows, new, index, real)
        length = other.lengths[index] if isinstance(other, StaticT2RCache) else other.get_seq_length()
        self.lengths[rows] = length - (0 if padding is None else padding.tokens.to(index.device)[index])
        self.forget_padding(rows)

    def forget_padding(self, rows: Any) -> None:
        if self.padding is not None:  # of prompts that were read into the rows, not put there
            for x in self.padding:
                x[rows] = 0

    def take(self, row: int) -> Any:
        """Return one row as a separate default cache, without its padding."""
        model: Any = self.model()
        new, length = model.make_cache(), int(self.lengths[row])
        for own, layer in zip(self.layers, new.layers, strict=True):
            held = {name: x for memory in own.memories for name, x in memory.taken(row, length).items()}
            layer.load(held, length)
        if self.padding is None:
            return new
        new.padding = self.padding.map(lambda x: x[row : row + 1])
        return new.take(0)

    def tensors(self) -> list[Tensor]:
        """Return all tensors that a step updates, except the lengths."""
        return [x for layer in self.layers for x in layer.tensors().values()]

    def reset(self, rows: Any = None) -> None:
        """Reset all rows, or the indexed ones."""
        for layer in self.layers:
            layer.reset(rows)
        which = slice(None) if rows is None else rows
        self.lengths[which] = 0
        self.forget_padding(which)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for layer in self.layers:
            layer.reorder_cache(beam_idx)
        self.lengths.copy_(self.lengths.index_select(0, beam_idx))
        self.padding = None if self.padding is None else self.padding.map(lambda x: x.index_select(0, beam_idx))
