"""The scheduler: what the engine does next. Calls wait in a queue, are read in pieces, and run in the rows of a step.

One `advance` gives rows to waiting groups, in their order, reads prompts within a budget of tokens, and runs the
decoding step. Prompts that are being read take turns, and the budget bounds the time between two steps: a long prompt
delays the others by one piece at a time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator

import torch

from t2r.generation.engine.prefill import Prefill
from t2r.generation.engine.room import Room
from t2r.generation.engine.rows import Rows
from t2r.generation.engine.sampler import Sampler
from t2r.generation.engine.sequences import Event, Group, Reason, Sequence
from t2r.generation.state import PIECE
from t2r.threads import own_threads

logger = logging.getLogger(__name__)

LOOK_EVERY = 8
"""On a GPU, the number of steps between reads of the generated tokens, because each read synchronizes."""
SHORT = 64
"""On a CPU, prompts of at most this many tokens are read with as many threads as a step uses."""
BUDGET = {"cpu": 256}
"""Default number of prompt tokens between two steps. On a CPU, reading more at a time is hardly faster. On a GPU, where
the time of a small model hardly depends on their number, it is `PIECE`."""
AT_ONCE = 8
"""On a GPU, the number of prompts between two steps, however short they are."""


class Queue:
    """Groups that wait for rows, in the order in which they came."""

    def __init__(self) -> None:
        self.groups: deque[Group] = deque()

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    @property
    def sequences(self) -> int:
        """The number of waiting sequences."""
        return sum(len(group.sequences) for group in self.groups)

    def add(self, group: Group) -> None:
        self.groups.append(group)

    def next(self) -> Group:
        return self.groups.popleft()

    def drop_finished(self) -> None:
        """Remove groups that have been cancelled."""
        self.groups = deque(group for group in self.groups if group.running)


class Scheduler:
    """Decides which sequences have rows, and how many tokens of prompts are read between two steps.

    Args:
        rows: the rows of the decoding step.
        budget: the maximum number of tokens of prompts between two steps. A piece of a call with several prompts has at
            most this number of tokens of each.
    """

    def __init__(self, rows: Rows, budget: int | None = None) -> None:
        kind = rows.model.device.type
        self.rows, self.budget = rows, budget or BUDGET.get(kind, PIECE)
        self.least = self.budget // AT_ONCE if kind == "cuda" else 1
        """What a piece counts at least: on a GPU, short pieces take as long as longer ones."""
        self.look_every = LOOK_EVERY if kind == "cuda" else 1
        """Number of steps between reads of the generated tokens, if they are chosen on the device."""
        self.queue = Queue()
        self.reading: deque[tuple[Group, Prefill]] = deque()
        """Groups that have rows, and whose prompts are being read."""
        self.running: list[Group] = []
        """Groups whose sequences are in the rows of the step."""
        self.sampler = Sampler()
        self.events: list[Event] = []
        """Events of submitted sequences that `step` has not returned yet. Other calls cause them too."""

    @property
    def busy(self) -> bool:
        """Whether sequences are running, being read or waiting."""
        return bool(self.running or self.reading or self.queue)

    def add(self, group: Group) -> None:
        """Add a group to the queue. Raises T2RError if it can never have the room that it requires."""
        self.rows.check(self.room(group))
        self.queue.add(group)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence, wherever it is, and free its row."""
        if sequence.finished:
            return
        self.end(sequence, "cancelled")

    def stop(self, sequence: Sequence) -> None:
        """End a sequence as a stopping criterion would have done after its last token."""
        if sequence.finished:
            return
        group = next((group for group in self.running if sequence in group.sequences), None)
        if group is not None and group.keep_state and sequence.row is not None:
            assert self.rows.step is not None
            sequence.state = self.rows.step.own.take(sequence.row)
        self.end(sequence, "stop")

    def end(self, sequence: Sequence, reason: Reason) -> None:
        sequence.reason = reason
        if any(sequence in group.sequences for group in self.groups() if group.submitted):
            self.events.append(Event.last(sequence))
        self.release()

    def groups(self) -> list[Group]:
        return [*self.running, *(group for group, _ in self.reading), *self.queue]

    def room(self, group: Group) -> Room:
        return Room.needed(self.rows.model, group.request, group.state, group.choice)

    @torch.no_grad()
    def advance(self) -> None:
        """Read prompts within the budget, and advance the running sequences by one to `look_every` tokens."""
        self.rows.shrink()
        self.admit()
        self.read()
        if self.running:
            tokens = self.decode()
            for group in self.running:
                try:
                    self.deliver(group, tokens)
                except Exception as error:
                    self.fail(group, error)
            self.release()

    # --- Before a step --------------------------------------------------------------------------------------

    @torch.no_grad()
    def admit(self) -> None:
        """Give rows to waiting groups, in their order, as long as there are enough."""
        while self.queue:
            group = next(iter(self.queue))
            waiting = self.queue.sequences - len(group.sequences)
            try:
                if not self.rows.take(group.sequences, self.room(group), waiting):
                    return
            except Exception as error:  # for example, the memory is not enough for larger buffers
                self.fail(group, error)
            self.queue.next()
            if group.running:
                self.reading.append((group, Prefill(self.rows.model, group.request, group.state, self.budget)))

    def read(self) -> None:
        """Read the next pieces of prompts, one of each group, until the budget is spent."""
        left = self.budget
        for _ in range(len(self.reading)):
            group, prefill = self.reading[0]
            cost = max(prefill.tokens, self.least)
            if cost > left and left < self.budget:
                return
            left -= cost
            self.reading.popleft()
            try:
                with own_threads(self.threads(prefill)):
                    prefill.read()
                if not prefill.done:
                    self.reading.append((group, prefill))
                    continue
                self.start(group, prefill)
            except Exception as error:
                self.fail(group, error)
                self.rows.release(group.sequences)

    def threads(self, prefill: Prefill) -> int:
        assert self.rows.step is not None
        short = prefill.ids.numel() <= SHORT
        return self.rows.step.threads if short else torch.get_num_threads()

    def start(self, group: Group, prefill: Prefill) -> None:
        """Choose the first tokens of a group whose prompts have been read, and put its sequences into their rows."""
        step, cache, choice = self.rows.step, prefill.cache, group.choice
        assert step is not None and prefill.logits is not None
        scores = group.biased(prefill.logits) if group.logprobs is not None else prefill.logits
        chosen = group.first(prefill.logits)
        new = group.advance(chosen[:, None].tolist())
        group.note(new, scores)
        self.events += new if group.submitted else []
        for i, sequence in enumerate(group.sequences):
            if sequence.finished and group.keep_state:
                sequence.state = cache.take(i)
        if not group.ends_together:
            self.rows.release([sequence for sequence in group.sequences if sequence.finished])
        index = torch.tensor([s.index for s in group.sequences if s.row is not None], device=chosen.device)
        if len(index):
            rows = torch.tensor([s.row for s in group.sequences if s.row is not None], device=chosen.device)
            greedy, biases = (False, None) if choice is None else (choice.greedy, choice.biases)
            step.put_rows(rows, cache, index, chosen[index], greedy, group.request.source_mask, biases)
        group.request.inputs.pop("past_key_values", None)  # the rows have copies
        self.running.append(group)
        self.release()

    # --- A step ---------------------------------------------------------------------------------------------

    def decode(self) -> list[list[int]]:
        """Run the decoding step one or more times, and return the new tokens of every row.

        The tokens are read once, and only if some of them are chosen on the device."""
        step = self.rows.step
        assert step is not None
        on_device = [group for group in self.running if group.choice is not None]
        drawn = [group for group in on_device if group.ends_together]
        times = min(group.new_tokens - len(s.tokens) for group in self.running for s in group.running)
        if any(group.one_at_a_time for group in self.running):
            times = 1
        history = []
        for _ in range(min(self.look_every, times)):
            step.run()
            if drawn:
                self.sampler.use(drawn, step.logits)
                self.sampler.choose(step)
            history.append(step.tokens.clone())
        tokens: list[list[int]] = torch.cat(history, dim=1).tolist() if on_device else []
        return tokens

    def deliver(self, group: Group, tokens: list[list[int]]) -> None:
        """Give a group its new tokens, from those of every row or chosen from its logits."""
        step = self.rows.step
        assert step is not None
        rows = [0 if sequence.row is None else sequence.row for sequence in group.sequences]
        scores = None if group.logprobs is None else step.logits[rows]  # with the biases of a choice
        if group.choice is None:
            scores = None if scores is None else group.biased(scores)
            chosen = group.choose(step.logits[rows].clone())
            step.tokens[rows] = chosen[:, None]
            own = chosen[:, None].tolist()
        else:
            own = [[] if s.row is None else tokens[s.row] for s in group.sequences]
        new = group.advance(own)
        if scores is not None:
            group.note(new, scores)
        self.events += new if group.submitted else []
        for sequence in (event.sequence for event in new if group.keep_state and event.sequence.finished):
            sequence.state = step.own.take(sequence.row)

    def fail(self, group: Group, error: Exception) -> None:
        """End a group whose prefill, logits processor or criterion has failed. Other groups are not affected.

        The call that made the group raises the error; of a submitted sequence, it is an attribute."""
        ended = group.end("error", error)
        if group.submitted:
            self.events += ended
            logger.error("a sequence has ended with an error: %s: %s", type(error).__name__, error)

    def release(self) -> None:
        """Forget groups that have ended, and free the rows of finished sequences."""
        done: list[Sequence] = []
        for group in self.groups():
            # Groups whose tokens are chosen together need all their rows until the last of them has ended.
            if not (group.ends_together and group.running):
                done += [sequence for sequence in group.sequences if sequence.finished]
        self.rows.release(done)
        self.queue.drop_finished()
        self.reading = deque((group, prefill) for group, prefill in self.reading if group.running)
        self.running = [group for group in self.running if group.running]
