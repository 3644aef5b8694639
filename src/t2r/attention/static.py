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
from transformers.cache_utils import CacheLayerMixin

from t2r.attention.cache import T2RCache
from t2r.attention.layers import RecurrentLayer, fill_layer, layer_tensors
from t2r.errors import T2RError
from t2r.ops import Features, State, linear_attention, step
from t2r.ops.common import accumulator_dtype


class StaticRecurrentLayer(RecurrentLayer):
    """A recurrent layer whose state is allocated at creation, in float32 or, to save memory, in half precision.

    `lengths [rows]` is shared by the layers of a cache, and the layer with `counts` advances it. It is None for cross
    attention, whose state is computed once from the source."""

    is_compileable = True

    def __init__(self, state: State, lengths: Tensor | None = None, counts: bool = False) -> None:
        super().__init__()
        self.state: State = state
        self.lengths, self.counts = lengths, counts
        self.is_initialized = lengths is not None

    def advance(
        self,
        phi_q: Tensor,
        phi_k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None,
        starts: Tensor | None,
        decay: Tensor | None,
        signed: bool,
        features: Features | None = None,
    ) -> Tensor:
        how: dict[str, Any] = {"mask": mask, "decay": decay, "signed": signed}
        if phi_k.shape[2] == 1 and starts is None:
            out, _ = step(phi_q, phi_k, v, self.state, inplace=True, features=features, **how)
            self.count(1)
        else:
            past = self.state.map(lambda x: x.to(accumulator_dtype(phi_q, phi_k, v)))
            out, state = linear_attention(phi_q, phi_k, v, state=past, starts=starts, **how)
            self.store(state, phi_k.shape[2])
        return out

    def store(self, state: State, tokens: int, added: Any = None) -> None:
        for own, new in zip(self.state, state, strict=True):
            if own is not None and new is not None:
                own.copy_(new)
        self.count(tokens)
        self.is_initialized = True

    def count(self, tokens: int) -> None:
        if self.lengths is None:
            self.length += tokens
        elif self.counts:
            self.lengths.add_(tokens)

    @property
    def position(self) -> Tensor | None:
        return self.lengths

    def get_seq_length(self) -> Any:
        return self.length if self.lengths is None else self.lengths.max()

    def put_rows(self, rows: Tensor, other: Any, index: Tensor, real: Tensor | None = None) -> None:
        """Copy the rows `index` of another layer to these rows. States do not contain padding."""
        for own, new in zip(self.state, other.state, strict=True):
            if own is not None:
                own[rows] = new.index_select(0, index.to(new.device)).to(own)
        self.length, self.is_initialized = max(self.length, other.length), True

    def reset(self, rows: Any = slice(None)) -> None:
        for own in self.state:
            if own is not None:
                own[rows] = 0
        self.length = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for own in self.state:
            if own is not None:
                own.copy_(own.index_select(0, beam_idx))

    def activate_past_recording(self) -> None:
        raise T2RError("a static cache cannot remove tokens: use the default cache for assisted decoding")


class StaticBuffers(CacheLayerMixin):
    """Keys and values in buffers of fixed length, allocated at creation."""

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys: Tensor = keys
        self.values: Tensor = values
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: there is nothing left to allocate."""

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


class StaticSoftmaxLayer(StaticBuffers):
    """Keys and values of a softmax layer."""

    only_real_tokens = False
    """Whether all further inputs are single tokens without padding (see `StaticT2RCache.only_steps`)."""

    def __init__(self, keys: Tensor, values: Tensor, lengths: Tensor, counts: bool) -> None:
        super().__init__(keys, values)
        self.lengths, self.counts = lengths, counts
        self.filled = False  # whether any token was processed, known without device synchronization

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values, and return those to attend to. For one token, these are the whole buffers, and the mask
        marks their valid part."""
        time, new = key_states.shape[2], (key_states, value_states)
        if time == 1:
            for own, x in zip((self.keys, self.values), new, strict=True):
                own.scatter_(2, self.lengths.view(-1, 1, 1, 1).expand_as(x), x.to(own.dtype))
            held = self.keys, self.values
        else:
            start = self.common_length()
            if start + time > self.keys.shape[2]:
                raise T2RError(f"{start + time} tokens do not fit in a static cache of {self.keys.shape[2]} tokens")
            for own, x in zip((self.keys, self.values), new, strict=True):
                own[:, :, start : start + time] = x
            held = self.keys[:, :, : start + time], self.values[:, :, : start + time]
        self.count(time)
        return held

    def count(self, tokens: int) -> None:
        self.filled = True
        if self.counts:
            self.lengths.add_(tokens)

    def get_seq_length(self) -> Any:
        return self.lengths.max()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if query_length == 1:
            return self.keys.shape[2], 0
        return self.common_length() + query_length, 0

    def common_length(self) -> int:
        """Return the length of all rows. Raises T2RError if they differ. Synchronizes with the device."""
        if not self.filled:
            return 0
        shortest, longest = torch.stack(torch.aminmax(self.lengths)).tolist()
        if shortest != longest:
            raise T2RError(
                f"several tokens at once require rows of equal length, and these rows have {shortest} to {longest} "
                "tokens: pass one token at a time, or put prefilled sequences into the rows"
            )
        return int(longest)

    def put_rows(self, rows: Tensor, other: Any, index: Tensor, real: Tensor | None = None) -> None:
        """Copy the rows `index` of another layer to these rows. `real [rows, tokens]` is false for their padding."""
        copy_rows(self, rows, other, index, real)
        self.filled = True

    def reset(self, rows: Any = slice(None)) -> None:
        if rows == slice(None):
            self.filled = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for own in (self.keys, self.values):
            own.copy_(own.index_select(0, beam_idx))


class StaticSourceLayer(StaticBuffers):
    """Keys and values of the source, for softmax cross attention.

    They are put into rows after a prefill. A mask over the source marks their valid part."""

    length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise T2RError("the source of a static cache is put into its rows: a step does not read it")

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return int(self.keys.shape[2]), 0

    def put_rows(self, rows: Tensor, other: Any, index: Tensor) -> None:
        copy_rows(self, rows, other, index)

    def reset(self) -> None:
        self.length = 0


def copy_rows(layer: Any, rows: Tensor, other: Any, index: Tensor, real: Tensor | None = None) -> None:
    """Copy keys and values of the rows `index` of another layer to these rows. If `real` is given, its padding is
    removed."""
    length, size = other.keys.shape[2], layer.keys.shape[2]
    if length > size and real is not None:
        length = int(real.sum(1).max())
    if length > size:
        raise T2RError(f"{length} tokens do not fit in a static cache of {size} tokens")
    # Real tokens come first, in their order. What follows them is beyond the length of the row.
    order = None if real is None else real.int().argsort(stable=True, dim=1, descending=True)[:, None, :length, None]
    for own, new in ((layer.keys, other.keys), (layer.values, other.values)):
        new = new.index_select(0, index.to(new.device))
        if order is not None:
            new = new.gather(2, order.to(new.device).expand(-1, new.shape[1], -1, new.shape[3]))
        own[rows, :, :length] = new.to(own)


class StaticT2RCache(T2RCache):
    """A `T2RCache` of fixed size with a fixed number of rows."""

    is_static = True
    layers: list[Any]

    def __init__(self, layers: list[Any], lengths: Tensor, model: Any = None) -> None:
        super().__init__(layers, model)
        self.lengths = lengths
        self.kept = next((layer for layer in layers if isinstance(layer, StaticSoftmaxLayer)), None)
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
        self.lengths[rows] = other.get_seq_length() - (0 if padding is None else padding.tokens.to(index.device)[index])
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
            held = {name: x[row : row + 1] for name, x in layer_tensors(own).items()}
            if isinstance(own, StaticSoftmaxLayer):
                held = {name: x[:, :, :length] for name, x in held.items()}
            else:  # a separate state is always computed, and stored, in full precision
                held = {name: x.to(torch.promote_types(x.dtype, torch.float32)) for name, x in held.items()}
            fill_layer(layer, {name: x.clone() for name, x in held.items()}, length)
        if self.padding is None:
            return new
        new.padding = self.padding.map(lambda x: x[row : row + 1])
        return new.take(0)

    def tensors(self) -> list[Tensor]:
        """Return all tensors that a step updates, except the lengths."""
        return [x for layer in self.layers for x in layer_tensors(layer).values()]

    def reset(self, rows: Any = slice(None)) -> None:
        """Reset all rows, or the indexed ones."""
        for layer in self.layers:
            layer.reset(rows)
        self.lengths[rows] = 0
        self.forget_padding(rows)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for layer in self.layers:
            layer.reorder_cache(beam_idx)
        self.lengths.copy_(self.lengths.index_select(0, beam_idx))
        self.padding = None if self.padding is None else self.padding.map(lambda x: x.index_select(0, beam_idx))
