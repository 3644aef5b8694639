"""The rows of a decoding step, each of which holds one sequence.

The step is built when it is first needed. It is built again, and its rows are moved, if there are more sequences than
rows, or a sequence does not fit into its buffers or its table of positions: nothing that runs has to end first.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Any

import torch

from t2r.capacity import free_memory, refuse_beyond_memory
from t2r.errors import T2RError
from t2r.generation.engine.room import BLOCK, Room, enlarged
from t2r.generation.engine.sequences import Sequence
from t2r.generation.engine.step import DecodeStep
from t2r.words import counted

MOST = 256
"""Rows of an engine whose number of rows is not given, if memory allows."""
SHARE = 0.5
"""Share of the free memory that these rows may take. A recorded step also keeps its intermediate results."""
BIASES = 16
"""A step has room for a multiple of this number of biases in each row."""
CALM = 64
"""On a CPU, the number of steps with few sequences after which the step is built again with fewer rows."""


class Rows:
    """A decoding step, and which sequence has which of its rows. The arguments are those of `Engine`."""

    def __init__(
        self,
        model: Any,
        *,
        limit: int | None,
        max_length: int | None,
        source_length: int | None,
        compiled: bool,
        state_dtype: torch.dtype | None,
    ) -> None:
        self.model, self.limit, self.max_length, self.source_length = model, limit, max_length, source_length
        self.compiled, self.state_dtype = compiled, state_dtype
        self.step: DecodeStep | None = None
        self.block = BLOCK
        self.held: dict[int, Sequence] = {}
        self.shrinks = limit is None and model.device.type == "cpu"
        self.calm = 0
        """Number of steps since more than a quarter of the rows was used."""

    @property
    def free(self) -> list[int]:
        return [] if self.step is None else [row for row in range(self.step.rows) if row not in self.held]

    def check(self, room: Room) -> None:
        """Raise T2RError if a call can never have the room that it requires."""
        if self.limit is not None and room.rows > self.limit:
            raise T2RError(
                f"{room.rows} sequences do not fit into the engine's {self.limit} rows: give fewer at a time"
            )
        if self.max_length is not None and room.length > self.max_length:
            raise T2RError(f"{room.length} tokens exceed the engine's max_length of {self.max_length}")
        if self.source_length is not None and room.source > self.source_length:
            raise T2RError(f"a source of {room.source} tokens exceeds the engine's source_length {self.source_length}")

    def take(self, sequences: List[Sequence], room: Room, waiting: int = 0) -> bool:
        """Give each of these sequences a row. Returns False if they must wait until others have ended.

        `waiting` is the number of sequences that wait behind them."""
        used, step = len(self.held), self.step
        if used and step is not None and not step.by_row:
            return False  # this decoder has the same positions for the whole batch
        if step is None or room.rows > step.rows - used or not room.fits(step):
            rows = self.enough(room, waiting)
            if used + room.rows > rows:
                return False
            self.rebuild(rows, room)
        for row, sequence in zip(self.free, sequences, strict=False):
            sequence.row, self.held[row] = row, sequence
        return True

    def release(self, sequences: List[Sequence]) -> None:
        """Free the rows of these sequences."""
        freed = [sequence.row for sequence in sequences if sequence.row is not None]
        for sequence in sequences:
            if sequence.row is not None:
                del self.held[sequence.row]
                sequence.row = None
        if freed and self.step is not None:
            self.step.free(freed)

    def shrink(self) -> None:
        """Build a smaller step if most rows have not been used for many steps. On a CPU, each row takes its time."""
        if self.step is None or not self.shrinks:
            return
        used = len(self.held)
        self.calm = self.calm + 1 if 0 < 4 * used <= self.step.rows else 0
        if self.calm > CALM:
            self.rebuild(used, Room(used, 0, 0))

    # --- Decoding steps -------------------------------------------------------------------------------------

    def enough(self, room: Room, waiting: int) -> int:
        """Return how many rows a step should have that these sequences, or some of those behind them, can join."""
        if self.limit is not None:
            return self.limit
        used, now = len(self.held), 0 if self.step is None else self.step.rows
        most = max(self.by_memory(room), now, 0 if used else room.rows)
        if used + room.rows <= now:
            return now  # its buffers are too small
        return min(most, max(used + room.rows + waiting, 2 * now if used else now))

    def by_memory(self, room: Room) -> int:
        """Return how many rows fit into the free memory, at most `MOST`."""
        size = Room.of(self.step)
        one = bytes_of_a_row(self.model, *self.lengths(room, size), self.state_dtype)
        free = free_memory(self.model.device) + size.rows * one
        return max(1, min(MOST, int(SHARE * free / one)))

    def rebuild(self, rows: int, room: Room) -> None:
        """Replace the step by one with this number of rows and room for a call. Sequences keep what they have read."""
        before, old = Room.of(self.step), self.step
        if not self.held:
            self.step = old = None  # frees its memory before the next one is allocated
        self.step = step = self.build(rows, room, before)
        self.calm = 0
        if old is not None:
            index = torch.tensor(list(self.held), device=step.tokens.device)
            step.take_over(torch.arange(len(index), device=index.device), old, index)
            self.held = dict(enumerate(self.held.values()))
            for row, sequence in self.held.items():
                sequence.row = row

    def build(self, rows: int, room: Room, before: Room | None = None, reorders: bool = False) -> DecodeStep:
        """Build a step. Buffers that were too small `before` at least double."""
        before = before or Room(rows, 0, 0)
        how: dict[str, Any] = {"compiled": self.compiled, "reorders": reorders, "state_dtype": self.state_dtype}
        how["biases"] = enlarged(room.biases, before.biases, BIASES)
        check_memory(self.model, rows, *self.lengths(room, before), self.state_dtype)
        return DecodeStep(self.model, rows, *self.lengths(room, before), **how, tuned=True)

    def lengths(self, room: Room, before: Room) -> tuple[int | None, int | None]:
        """Return the lengths of the buffers of softmax attention. None: there is none of this kind."""
        own, source = max(room.length, before.length), max(room.source, before.source)
        return (
            ((self.max_length or enlarged(room.length, before.length, self.block)) if own else None),
            ((self.source_length or enlarged(room.source, before.source, self.block)) if source else None),
        )


def bytes_of_a_row(model: Any, length: int | None, source: int | None, state_dtype: torch.dtype | None) -> int:
    """Return the size of a row of a step: its cache, and its scores and random numbers."""
    scores = 8 * (getattr(model.config.get_text_config(), "vocab_size", None) or 0)
    return int(model.row_bytes(length or 1, source or 1, state_dtype) + scores)


def check_memory(
    model: Any, rows: int, length: int | None = None, source: int | None = None, state_dtype: torch.dtype | None = None
) -> None:
    """Raise T2RError if a step with this number of rows cannot fit into the free memory."""
    one = bytes_of_a_row(model, length, source, state_dtype)
    tokens = f" of {counted(length, 'token')}" if model.grows() and length else ""
    what = f"{counted(rows, 'sequence')}{tokens} at a time need"
    refuse_beyond_memory(rows * one, model.device, what, "give fewer rows, beams, sequences or tokens")
