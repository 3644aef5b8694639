"""The running batch: sequences that are decoded together. They join while there are free rows, and leave at their end.

A row of the decoding step holds one sequence. It is filled by a prefill or from a saved state, advanced with the other
rows, and freed when the sequence ends.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from t2r.errors import T2RError
from t2r.generation.engine.beams import uses_beams
from t2r.generation.engine.prefill import prefill
from t2r.generation.engine.request import ForGenerate, Request, seeded
from t2r.generation.engine.room import BLOCK, Room, enlarged, total_length
from t2r.generation.engine.sequences import Event, Group, Sequence
from t2r.generation.engine.step import DecodeStep
from t2r.threads import own_threads

logger = logging.getLogger(__name__)

LOOK_EVERY = 8
"""On a GPU, the number of steps between reads of the generated tokens, because each read synchronizes."""
SHORT = 64
"""On a CPU, prompts of at most this many tokens are read with as many threads as a step uses."""


class RunningBatch:
    """Groups of sequences, waiting or in the rows of a decoding step. The step is built when it is first needed, and
    again when a group does not fit into its buffers or its table of positions. The arguments are those of `Engine`."""

    def __init__(
        self,
        model: Any,
        *,
        rows: int | None,
        max_length: int | None,
        source_length: int | None,
        compiled: bool,
        state_dtype: torch.dtype | None,
    ) -> None:
        self.model: Any = model
        self.rows, self.max_length, self.source_length = rows, max_length, source_length
        self.compiled, self.state_dtype = compiled, state_dtype
        self.decode: DecodeStep | None = None
        self.look_every = LOOK_EVERY if model.device.type == "cuda" else 1
        """Number of steps between reads of the generated tokens, if the decoding step chooses all tokens."""
        self.block = BLOCK
        self.waiting: deque[Group] = deque()
        self.groups: list[Group] = []
        self.free: list[int] = []
        self.events: list[Event] = []
        """New tokens of submitted sequences that `step` has not returned yet. Other calls generate them too."""
        self.lock = threading.RLock()
        """Held while the rows or the lists above are used, but not while a generator waits for its consumer."""

    def _admitted(self, request: Request, state: Any, seed: int | None, keep_state: bool) -> Group:
        """Make a group of sequences and add it to the waiting groups."""
        if uses_beams(request):
            raise ForGenerate("beam search is requested")
        group = Group(request, state, seeded(seed, self.model.device), keep_state)
        self._check_room(Room.needed(self.model, request, state), request, state)
        self.waiting.append(group)
        return group

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence immediately and free its row."""
        with self.lock:
            sequence.finished = True
            self._release()
            self.waiting = deque(group for group in self.waiting if group.running)

    def run(self) -> Iterator[Event]:
        """Yield every new token of submitted sequences until no sequence is running or waiting."""
        while self.busy or self.events:
            yield from self.step()

    @property
    def busy(self) -> bool:
        """Whether sequences are running or waiting."""
        return bool(self.groups or self.waiting)

    def step(self) -> list[Event]:
        """Start waiting sequences if there is room, and advance the running ones by one to `look_every` tokens.

        Returns the new tokens of submitted sequences, with those that other calls generated since the last step."""
        with self.lock:
            self._advance()
            events, self.events = self.events, []
            return events

    @torch.no_grad()
    def _advance(self) -> None:
        """Do the work of `step`. The caller holds the lock."""
        self._start_waiting()
        if not self.groups:
            return
        assert self.decode is not None
        tokens = self._decoded()
        for group in self.groups:
            try:
                self._continued(group, tokens)
            except Exception as error:
                self._failed(group, error)
        self._release()

    def _continued(self, group: Group, tokens: list[list[int]]) -> None:
        """Give a group its new tokens, from those of every row or chosen from its logits."""
        assert self.decode is not None
        if not group.plain:
            rows = [sequence.row for sequence in group.sequences]
            chosen = group.choose(self.decode.logits[rows].clone())
            self.decode.tokens[rows] = chosen[:, None]
            own = chosen[:, None].tolist()
        else:
            own = [[] if s.row is None else tokens[s.row] for s in group.sequences]
        new = group.advance(own)
        self.events += new if group.submitted else []
        for sequence in (event.sequence for event in new if group.keep_state and event.sequence.finished):
            sequence.state = self.decode.own.take(sequence.row)

    def _failed(self, group: Group, error: Exception) -> None:
        """End a group whose prefill, logits processor or criterion has failed. Other groups are not affected.

        The call that made the group raises the error; of a submitted sequence, it is an attribute."""
        group.fail(error)
        if group.submitted:
            logger.error("a sequence has ended with an error: %s: %s", type(error).__name__, error)

    def _decoded(self) -> list[list[int]]:
        """Run the decoding step one or more times, and return the new tokens of every row.

        The tokens are read only if there are plain groups."""
        assert self.decode is not None
        if any(group.keep_state or not group.plain for group in self.groups):
            self.decode.run()
            return self.decode.tokens.tolist() if any(group.plain for group in self.groups) else []
        left = min(group.new_tokens - len(s.tokens) for group in self.groups for s in group.running)
        history = []
        for _ in range(min(self.look_every, left)):
            self.decode.run()
            history.append(self.decode.tokens.clone())
        tokens: list[list[int]] = torch.cat(history, dim=1).tolist()
        return tokens

    # --- Rows -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _start_waiting(self) -> None:
        """Start the waiting groups for which there is room."""
        while self.waiting and self._has_room(self.waiting[0]):
            group = self.waiting.popleft()
            try:
                self._start(group)
            except Exception as error:
                self._failed(group, error)
            self._release()

    def _start(self, group: Group) -> None:
        """Prefill the prompts of a group, choose their first tokens and assign rows."""
        decode = self._make_room(group)
        decode.forbid(group.forbidden)
        short = group.request.ids.numel() <= SHORT
        with own_threads(decode.threads if short else torch.get_num_threads()):
            cache, logits = prefill(self.model, group.request, group.state)
        chosen = group.choose(logits)
        new = group.advance(chosen[:, None].tolist())
        self.events += new if group.submitted else []
        self.groups.append(group)
        index = []
        for i, sequence in enumerate(group.sequences):
            if sequence.finished and group.keep_state:
                sequence.state = cache.take(i)
            if not (sequence.finished and group.plain):
                sequence.row = self.free.pop()
                index.append(i)
        if index:
            rows = torch.tensor([group.sequences[i].row for i in index], device=chosen.device)
            which = torch.tensor(index, device=chosen.device)
            decode.put_rows(rows, cache, which, chosen[which], group.plain, group.request.source_mask)
        group.request.inputs.pop("past_key_values", None)  # the rows have copies

    def _release(self) -> None:
        """Free the rows of finished sequences."""
        freed = []
        for group in self.groups:
            # Groups that are not plain choose tokens for all their sequences, so their rows are freed together.
            done = [s for s in group.sequences if s.finished] if group.plain or not group.running else []
            for sequence in done:
                if sequence.row is not None:
                    freed.append(sequence.row)
                    sequence.row = None
        if freed:
            assert self.decode is not None
            self.decode.free(freed)
            self.free += freed
        self.groups = [group for group in self.groups if group.running]

    def _has_room(self, group: Group) -> bool:
        """Return whether a group can start now. If no sequence is running, the engine can grow within its limits."""
        if self.groups and self.decode is not None and not self.decode.by_row:
            return False  # this decoder has the same positions for the whole batch
        if self.groups and self.decode is not None and self.decode.forbidden != group.forbidden:
            return False  # the forbidden tokens of a step are those of all its rows
        room = Room.needed(self.model, group.request, group.state)
        return (room.fits(self.decode) and room.rows <= len(self.free)) or not self.groups

    def _make_room(self, group: Group) -> DecodeStep:
        """Return a decoding step with room for this group. A new one is built only if the current one is too small."""
        decode, room = self.decode, Room.needed(self.model, group.request, group.state)
        if decode is not None and room.rows <= len(self.free) and room.fits(decode):
            return decode
        rows = self.rows or max(room.rows, 0 if decode is None else decode.rows)
        before = Room.of(decode)
        self.decode = decode = None  # frees its memory before the next one is allocated
        self.decode = self._build(rows, room, before)
        self.free = list(range(rows))[::-1]
        return self.decode

    # --- Decoding steps -------------------------------------------------------------------------------------

    def _check_room(self, room: Room, request: Request, state: Any) -> None:
        if state is not None:
            self.model.check_generated_length(total_length(request, state))
        if self.rows is not None and room.rows > self.rows:
            raise T2RError(f"{room.rows} sequences do not fit into the engine's {self.rows} rows: give fewer at a time")
        if self.max_length is not None and room.length > self.max_length:
            raise T2RError(f"{room.length} tokens exceed the engine's max_length of {self.max_length}")
        if self.source_length is not None and room.source > self.source_length:
            raise T2RError(f"a source of {room.source} tokens exceeds the engine's source_length {self.source_length}")

    def _build(self, rows: int, room: Room, before: Room | None, reorders: bool = False) -> DecodeStep:
        """Build a step. Buffers of softmax layers that were too small `before` at least double."""
        before = before or Room(rows, 0, 0)
        length = (
            self.max_length if room.length and self.max_length else enlarged(room.length, before.length, self.block)
        )
        source = (
            self.source_length
            if room.source and self.source_length
            else enlarged(room.source, before.source, self.block)
        )
        how: dict[str, Any] = {"compiled": self.compiled, "reorders": reorders, "state_dtype": self.state_dtype}
        return DecodeStep(self.model, rows, length or None, source or None, **how, tuned=True)
