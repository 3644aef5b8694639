"""The cache layer of a site: its memories, and the number of tokens that they have read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from t2r.attention.memories import KeyValueMemory, Memory, StateMemory, WindowMemory
from t2r.errors import T2RError
from t2r.ops import State


class SiteLayer(CacheLayerMixin):
    """The memories of a site as a layer of a transformers cache.

    For causal attention, memories advance with every token. For cross attention, they are filled once from the source.

    Args:
        memories: the memories, of different kinds.
        lengths: in a static cache, the number of tokens of each row, `[rows]`, which all layers share. None in other
            caches, and for cross attention.
        counts: whether this layer advances `lengths`. One layer of a cache does.
    """

    is_sliding = False
    only_real_tokens = False
    """If True, masks are ignored: none of the following tokens is padding."""

    def __init__(self, *memories: Memory, lengths: Tensor | None = None, counts: bool = False) -> None:
        self.memories = memories
        self.lengths, self.counts = lengths, counts
        self.length = 0
        self.filled = False
        """Whether any token was processed, known without device synchronization."""
        self.is_initialized = lengths is not None

    # --- Memories -------------------------------------------------------------------------------------------

    def find(self, kind: type[Any]) -> Any:
        """Return the memory of a kind, or None if the site has none."""
        return next((memory for memory in self.memories if isinstance(memory, kind)), None)

    @property
    def recurrence(self) -> StateMemory | None:
        found: StateMemory | None = self.find(StateMemory)
        return found

    @property
    def window(self) -> WindowMemory | None:
        found: WindowMemory | None = self.find(WindowMemory)
        return found

    @property
    def state(self) -> State | None:
        """The state of the recurrence, or None before the first token."""
        return None if self.recurrence is None else self.recurrence.state

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """All keys, if the site has softmax attention."""
        found = self.find(KeyValueMemory)
        return None if found is None else found.keys

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        found = self.find(KeyValueMemory)
        return None if found is None else found.values

    @property
    def grows(self) -> bool:
        """Whether its size depends on the number of tokens."""
        return any(memory.grows for memory in self.memories)

    @property
    def is_fixed(self) -> bool:
        """Whether its tensors keep their addresses."""
        return any(memory.fixed for memory in self.memories)

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        return self.is_fixed

    # --- Tokens ---------------------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values of softmax attention, and return those to attend to. In a static cache, these are for one
        token the whole buffers, of which the mask marks the valid part.

        Stock modules call this before the attention function. Other memories are advanced there, so keys and values
        are returned unchanged."""
        memory: KeyValueMemory | None = self.find(KeyValueMemory)
        if memory is None:
            return key_states, value_states
        time = key_states.shape[2]
        if not memory.fixed:
            held = memory.append(key_states, value_states)
        elif self.lengths is None:
            raise T2RError("the source of a static cache is put into its rows: a step does not read it")
        elif time == 1:
            held = memory.write(key_states, value_states, self.lengths)
        else:
            held = memory.extend(key_states, value_states, self.common_length())
        self.count(time)
        return held

    def count(self, tokens: int) -> None:
        """Count tokens that the memories have read."""
        self.filled = self.is_initialized = True
        if self.lengths is None:
            self.length += tokens
        elif self.counts:
            self.lengths.add_(tokens)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: memories are created with the first tokens."""

    @property
    def position(self) -> Tensor | None:
        """The position of the next token of each row in a mask of fixed size, `[rows]`. None means at its end."""
        return self.lengths

    def get_seq_length(self) -> Any:
        return self.length if self.lengths is None else self.lengths.max()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.lengths is None:
            memory: KeyValueMemory | None = self.find(KeyValueMemory)
            if memory is not None and memory.fixed:  # a source
                return memory.room, 0
            return self.length + query_length, 0
        if not self.grows:
            return query_length, 0
        if query_length == 1:
            return self.get_max_length(), 0
        return self.common_length() + query_length, 0

    def get_max_length(self) -> int:
        memory: KeyValueMemory | None = self.find(KeyValueMemory)
        return memory.room if memory is not None and memory.fixed else -1

    def common_length(self) -> int:
        """Return the length of all rows. Raises T2RError if they differ. Synchronizes with the device."""
        if not self.filled:
            return 0
        assert self.lengths is not None
        shortest, longest = torch.stack(torch.aminmax(self.lengths)).tolist()
        if shortest != longest:
            raise T2RError(
                f"several tokens at once require rows of equal length, and these rows have {shortest} to {longest} "
                "tokens: pass one token at a time, or put prefilled sequences into the rows"
            )
        return int(longest)

    # --- Removing tokens ------------------------------------------------------------------------------------

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return all(memory.recording or memory.recorded_tokens is None for memory in self.memories)

    def activate_past_recording(self) -> None:
        for memory in self.memories:
            memory.record()

    def check_crop(self, tokens_to_remove: int) -> None:
        if self.is_fixed:
            raise T2RError("a static cache cannot remove tokens: use the default cache for assisted decoding")
        known = [m.recorded_tokens for m in self.memories if m.recorded_tokens is not None]
        if not 0 <= -tokens_to_remove <= min([*known, self.length]):
            raise T2RError(
                f"cannot crop by {tokens_to_remove}: only recorded tokens can be removed from a recurrent state "
                f"({min([*known, self.length])} tokens since the last crop). Call cache.activate_past_recording() "
                "first, and pass the number of tokens to remove as a negative number"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (transformers passes a negative number) and clear the record."""
        self.check_crop(tokens_to_remove)
        for memory in self.memories:
            memory.crop(-tokens_to_remove)
        self.length += tokens_to_remove

    def reset(self, rows: Any = None) -> None:
        """Forget everything, or in a static cache the rows of an index."""
        for memory in self.memories:
            memory.reset(rows)
        if rows is None:
            self.length, self.filled, self.is_initialized = 0, False, self.lengths is not None

    # --- Rows -----------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        return next((x.shape[0] for x in self.tensors().values()), -1)

    def each_row(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to the batch dimension of all memories."""
        for memory in self.memories:
            memory.each_row(function)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.each_row(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.each_row(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.each_row(lambda x: x[indices])

    def offload(self) -> None:
        self.each_row(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Do nothing: memories move to the device of the queries when they are used."""

    def put_rows(self, rows: Tensor, other: SiteLayer, index: Tensor, real: Tensor | None = None) -> None:
        """Copy the rows `index` of another layer to these rows. `real [rows, tokens]` is false for their padding."""
        for memory, new in zip(self.memories, other.memories, strict=True):
            memory.put_rows(rows, new, index, real)
        self.length, self.filled, self.is_initialized = max(self.length, other.length), True, True

    # --- Saving and stacking --------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of all memories by name. Empty before the first token."""
        return {name: x for memory in self.memories for name, x in memory.tensors().items()}

    def held_tensors(self) -> list[Tensor]:
        """Return all tensors, including recorded ones."""
        return [*self.tensors().values(), *(x for memory in self.memories for x in memory.extra_tensors())]

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in {id(x): x for x in self.held_tensors()}.values())

    def row_bytes(self, tokens: int) -> int:
        """Return the size of one row that has read this number of tokens."""
        return sum(memory.row_bytes(tokens) for memory in self.memories)

    def kind(self) -> tuple[Any, ...]:
        """Return what must be equal in layers that are stacked."""
        return tuple(memory.kind() for memory in self.memories)

    def load(self, held: dict[str, Tensor], length: int) -> None:
        """Fill an empty layer with the tensors of `tensors`."""
        if not held:
            return
        for memory in self.memories:
            memory.load({name: x for name, x in held.items() if name in memory.names})
        self.length = 0
        self.count(length)

    def check(self, held: dict[str, Tensor], length: Any, rows: int) -> None:
        """Raise ValueError unless these tensors are valid for this layer after `length` tokens of `rows` sequences."""
        if type(length) is not int or length < 0 or (length > 0) != bool(held):
            raise ValueError("a length without tensors, or tensors without a length")
        if not held:
            return
        if any(x.shape[0] != rows for x in held.values() if x.dim()) or any(not x.dim() for x in held.values()):
            raise ValueError("tensors of another batch size")
        integers = {name for memory in self.memories for name in memory.integers}
        if any(not x.is_floating_point() for name, x in held.items() if name not in integers):
            raise ValueError("tensors of another dtype")
        for memory in self.memories:
            memory.check({name: x for name, x in held.items() if name in memory.names})
            if isinstance(memory, KeyValueMemory) and held["keys"].shape[2] != length:
                raise ValueError("not the keys and values of all tokens")
        if set(held) - {name for memory in self.memories for name in memory.names}:
            raise ValueError("tensors of other memories")

    def stack(self, others: list[SiteLayer], *, align: bool) -> None:
        """Take the rows of several layers. With `align`, they may have read different numbers of tokens."""
        for i, memory in enumerate(self.memories):
            memory.stack([other.memories[i] for other in others], align=align)
        self.length = max(other.length for other in others)

    def drop_padding(self, real: Tensor) -> None:
        """Remove padding from the only row. `real [tokens]` is false for padding."""
        for memory in self.memories:
            memory.drop_padding(real)
        self.length = int(real.sum())
