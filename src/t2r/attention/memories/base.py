"""The protocol of memories: what a site keeps of the tokens that it has read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from t2r.errors import T2RError


class Memory(ABC):
    """What a site keeps of the tokens that it has read: tensors whose first dimension are the rows of the batch.

    A memory is empty at first, and its tensors are created by its first tokens; or it is `fixed`: its tensors are
    allocated at creation and keep their addresses, which compiled and captured steps require.

    After `record`, it records what was added since the last `crop`, so that tokens can be removed."""

    names: ClassVar[tuple[str, ...]]
    """The names of its tensors. Those of the memories of one layer differ."""
    integers: ClassVar[tuple[str, ...]] = ()
    """The names of those that may have whole numbers."""
    fixed: bool = False
    grows: bool = False
    """Whether its size depends on the number of tokens."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, as they are saved. Empty before the first token."""

    @abstractmethod
    def load(self, held: dict[str, Tensor]) -> None:
        """Take the tensors of `tensors`. An empty memory stays empty without any."""

    @abstractmethod
    def check(self, held: dict[str, Tensor]) -> None:
        """Raise ValueError unless these tensors are valid for this memory."""

    @abstractmethod
    def each_row(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to the first dimension of all tensors, also of recorded ones."""

    @abstractmethod
    def kind(self) -> tuple[Any, ...]:
        """Return what must be equal in memories that are stacked: the shapes of tensors, without rows and tokens."""

    @abstractmethod
    def row_bytes(self, tokens: int) -> int:
        """Return the size of one row that has read this number of tokens."""

    @abstractmethod
    def put_rows(self, rows: Tensor, other: Any, index: Tensor, real: Tensor | None) -> None:
        """Copy the rows `index` of another memory to these rows of a fixed one. `real [rows, tokens]` is false for the
        padding of the other."""

    @abstractmethod
    def taken(self, row: int, tokens: int) -> dict[str, Tensor]:
        """Return the tensors of one row of a fixed memory that has read this number of tokens."""

    def extra_tensors(self) -> list[Tensor]:
        """Return tensors that are held beside those of `tensors`: recorded ones."""
        return []

    def drop_padding(self, real: Tensor) -> None:  # noqa: B027 (a memory without padding has nothing to do)
        """Remove padding from the only row. `real [tokens]` is false for padding."""

    def stack(self, others: Sequence[Self], *, align: bool) -> None:
        """Take the rows of several memories. With `align`, they may have read different numbers of tokens."""
        held = [other.tensors() for other in others]
        self.load({name: torch.cat([tensors[name] for tensors in held]) for name in held[0]})

    # --- Removing tokens ------------------------------------------------------------------------------------

    recording: bool = False

    def record(self) -> None:
        """Record what is added from now on."""
        if self.fixed:
            raise T2RError("a static cache cannot remove tokens: use the default cache for assisted decoding")
        self.recording = True

    @property
    def recorded_tokens(self) -> int | None:
        """The number of tokens that `crop` can remove. None: any."""
        return 0

    @abstractmethod
    def crop(self, tokens: int) -> None:
        """Remove the last tokens, and clear the record."""

    def reset(self, rows: Any = None) -> None:
        """Forget everything, or in a fixed memory the rows of an index."""
        if self.fixed:
            for x in self.tensors().values():
                x[slice(None) if rows is None else rows] = 0
        else:
            vars(self).clear()
            self.__init__()  # type: ignore[misc]


def may_overwrite(x: Tensor) -> bool:
    """Return whether a tensor may be changed in place, which avoids allocations and recompilation.

    Gradients need the previous values. A tensor created in inference mode can only be changed there."""
    if torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling():  # inference mode cannot be queried while compiling
        return True
    return torch.is_inference_mode_enabled() or not x.is_inference()
