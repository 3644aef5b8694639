"""The memory of softmax attention: the keys and values of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from t2r.attention.memories.base import Memory
from t2r.errors import T2RError


class KeyValueMemory(Memory):
    """All keys and values `[rows, heads, tokens, dim]`, in the order of the tokens, with padding where it was read.

    The buffers of a fixed one have room for a number of tokens. A row has as many as its length says, and no padding.
    """

    names = ("keys", "values")
    grows = True

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None, *, fixed: bool = False) -> None:
        self.keys, self.values, self.fixed = keys, values, fixed

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens to a memory that grows, and return all keys and values."""
        if self.keys is None or self.values is None:
            self.keys, self.values = k, v
        else:
            past = (x.to(k.device) for x in (self.keys, self.values))
            self.keys, self.values = (torch.cat([own, new], dim=-2) for own, new in zip(past, (k, v), strict=True))
        return self.keys, self.values

    def write(self, k: Tensor, v: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Add one token to each row of a fixed memory, after its `lengths [rows]`, and return the buffers."""
        keys, values = self.buffers()
        for own, x in ((keys, k), (values, v)):
            own.scatter_(2, lengths.view(-1, 1, 1, 1).expand_as(x), x.to(own.dtype))
        return keys, values

    def extend(self, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Add tokens to rows of a fixed memory that all have `start`, and return all keys and values."""
        keys, values = self.buffers()
        end = start + k.shape[2]
        if end > self.room:
            raise T2RError(f"{end} tokens do not fit in a static cache of {self.room} tokens")
        for own, x in ((keys, k), (values, v)):
            own[:, :, start:end] = x
        return keys[:, :, :end], values[:, :, :end]

    def buffers(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    @property
    def room(self) -> int:
        """The number of tokens that the buffers of a fixed memory hold."""
        return int(self.buffers()[0].shape[2])

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.keys is None or self.values is None else {"keys": self.keys, "values": self.values}

    def load(self, held: dict[str, Tensor]) -> None:
        if held:
            self.keys, self.values = held["keys"], held["values"]

    def check(self, held: dict[str, Tensor]) -> None:
        if (
            set(held) != set(self.names)
            or held["keys"].dim() != 4
            or held["keys"].shape[:3] != held["values"].shape[:3]
        ):
            raise ValueError("not keys and values")

    def each_row(self, function: Callable[[Tensor], Tensor]) -> None:
        for name, x in self.tensors().items():
            if self.fixed:
                x.copy_(function(x))
            else:
                setattr(self, name, function(x))

    def kind(self) -> tuple[Any, ...]:
        return "keys and values", {name: (x.shape[1], x.shape[3]) for name, x in self.tensors().items()}

    def row_bytes(self, tokens: int) -> int:
        return sum(x[0, :, 0].numel() * x.element_size() * tokens for x in self.tensors().values())

    def put_rows(self, rows: Tensor, other: Any, index: Tensor, real: Tensor | None) -> None:
        length, room = other.keys.shape[2], self.room
        if length > room and real is not None:
            length = int(real.sum(1).max())
        if length > room:
            raise T2RError(f"{length} tokens do not fit in a static cache of {room} tokens")
        # Real tokens come first, in their order. What follows them is beyond the length of the row.
        order = None if real is None else real.int().argsort(stable=True, dim=1, descending=True)[:, :length]
        for own, new in zip(self.buffers(), (other.keys, other.values), strict=True):
            new = new.index_select(0, index.to(new.device))
            if order is not None:
                new = new.gather(2, order.to(new.device)[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3]))
            own[rows, :, :length] = new.to(own)

    def taken(self, row: int, tokens: int) -> dict[str, Tensor]:
        return {name: x[row : row + 1, :, :tokens].clone() for name, x in self.tensors().items()}

    def drop_padding(self, real: Tensor) -> None:
        for name, x in self.tensors().items():
            setattr(self, name, x[:, :, real.to(x.device)])

    def stack(self, others: Sequence[Self], *, align: bool) -> None:
        """Take the rows of several memories, aligned at their end."""
        held = [other.buffers() for other in others]
        width = max(keys.shape[2] for keys, _ in held)
        if not align and any(keys.shape[2] != width for keys, _ in held):
            raise T2RError("sources of different lengths cannot be stacked if cross attention is softmax attention")
        self.keys, self.values = (
            torch.cat([pad(x, (0, 0, width - x.shape[2], 0)) for x in each]) for each in zip(*held, strict=True)
        )

    @property
    def recorded_tokens(self) -> int | None:
        return None

    def crop(self, tokens: int) -> None:
        for name, x in self.tensors().items():
            setattr(self, name, x[:, :, : x.shape[2] - tokens])

    def reset(self, rows: Any = None) -> None:
        """Forget everything. The buffers of a fixed memory stay as they are: what is beyond a length is not read."""
        if not self.fixed:
            self.keys = self.values = None
