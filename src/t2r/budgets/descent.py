"""Windows by the price of a byte.

The memory of a model falls, step by step, from all keys and values to the smallest windows. In each step, the gradient
of the divergence from the model itself says what a byte is worth to each head. Where it is worth less than the price,
the window shrinks, and where it is worth more, it grows; the price is the one with which the memory of all heads is
what the step allows. So heads are not limited one at a time: what a byte is worth depends on the windows of all others.

Words in the middle of a text can mostly be predicted from what is near. Therefore half of the gradient comes from
questions about a word that was said once, long ago: a few heads are needed to answer them, and keep their windows.

A descent passes every budget. Its path is kept, so another budget needs no second one.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from t2r.budgets.costs import SMALLEST, Costs
from t2r.budgets.limited import Limited
from t2r.budgets.text import Batch, Text
from t2r.data.fingerprint import cache_folder, digest
from t2r.data.progress import progress_bar
from t2r.errors import T2RError
from t2r.ops.soft_windows import REACH
from t2r.storage import take_lock, write_text, writing

logger = logging.getLogger(__name__)

STEPS = {"cpu": 120}
MANY = 256
"""Steps from the whole memory to the smallest: fewer on a CPU, where a step takes longer."""
TOKENS = {"cpu": 1}
TEXT = 8192
"""Tokens of text in a step; on a CPU, one block."""
PACE = 0.08
"""How far a window moves in a step, in powers of two, for each power of e between worth and price."""
FARTHEST = 2.0
"""The largest such ratio that counts, as a power of e."""
MEMORY = 0.93
"""The share of the worth that is kept from step to step, because a few texts say it with much noise."""
ANSWERS = 0.2
"""What the divergence in an answer counts, relative to that of a word of text. With a tenth of it, SmolLM2 forgets
words after 1,024 tokens in a tenth of its memory."""
QUESTIONS = 2
"""The version of the questions: a path that was found with others is not used."""
LEAST = 1e-12
"""Worth below it counts as this."""
SAVE_EVERY = 5
POLL = 2.0
"""Seconds between two looks at the path of another process."""
PATIENCE = 900.0
"""Seconds without a step of it after which the work is done twice: it has stalled, or the file system has no locks."""

Ask = Callable[[int], tuple[Tensor, Tensor] | None]
"""Returns questions for a step: token ids, and which tokens precede an answer. None: the model does not answer any."""


class Descent:
    """The path of the windows of a model along a falling memory. It is computed as far as it is asked for, and saved.

    Args:
        limited: the model.
        text: the text, or token ids `[blocks, context]`.
        ask: questions for each step.
        name: what the path depends on: the model and the text.
    """

    def __init__(self, limited: Limited, text: Tensor | Text, ask: Ask, name: str, *, progress: bool = True) -> None:
        self.limited, self.costs, self.ask, self.progress = limited, limited.costs, ask, progress
        self.text = Text.of(text)
        kind = limited.model.device.type
        self.steps = STEPS.get(kind, MANY)
        self.rows = max(1, TOKENS.get(kind, TEXT) // self.text.tokens)
        self.file = cache_folder("windows") / f"{digest([name, self.constants()])}.json"
        self.path: list[list[list[float]]] = []
        """The sizes of all windows after each step."""
        self.longest = [torch.full((x.heads,), math.log2(x.longest / REACH)) for x in self.costs.layers]
        self.logs = [row.clone() for row in self.longest]
        """Logarithms of the sizes, to base 2."""
        self.value = [torch.zeros_like(row) for row in self.longest]
        """What one more token is worth to each head, a running mean."""
        self.warned = False
        self.load()

    def constants(self) -> list[Any]:
        return [self.costs.layers, self.steps, self.rows, PACE, FARTHEST, MEMORY, ANSWERS, QUESTIONS]

    def windows(self, memory: int, costs: Costs) -> list[list[int]]:
        """Return windows within a number of bytes.

        Args:
            costs: the costs of a plan, which may have states.
        """

        def enough(sizes: list[list[float]]) -> bool:
            return costs.of_windows(fitted(sizes, costs)) <= memory

        with self.turn(enough) as mine:
            if mine:
                self.descend(enough)
        sizes = next((s for s in self.path if costs.of_windows(fitted(s, costs)) <= memory), self.path[-1])
        return fitted(sizes, costs, memory)

    @contextmanager
    def turn(self, enough: Callable[[list[list[float]]], bool]) -> Iterator[bool]:
        """Wait while another process makes the same path, until it is enough. Yields whether to go on from there."""
        lock, changed, length = None, time.monotonic(), len(self.path)
        try:
            while not (self.path and (enough(self.path[-1]) or len(self.path) == self.steps)):
                if lock is not None or time.monotonic() - changed > PATIENCE:
                    yield True
                    return
                with writing(self.file.parent, then="repeat the command"):  # before the work, which would be lost
                    self.file.parent.mkdir(parents=True, exist_ok=True)
                    lock = take_lock(self.file.with_suffix(".lock"))
                if lock is None:
                    if time.monotonic() - changed < POLL:
                        logger.info("windows: another process makes the same plan: waiting for it")
                    time.sleep(POLL)
                self.load()
                if len(self.path) > length:
                    changed, length = time.monotonic(), len(self.path)
            yield False
        finally:
            if lock is not None:
                lock.close()

    def descend(self, enough: Callable[[list[list[float]]], bool]) -> None:
        """Go on until the windows are small enough, or the smallest."""
        with progress_bar("windows", self.steps, "steps", done=len(self.path), shown=self.progress) as report:
            while len(self.path) < self.steps:
                divergence = self.step(len(self.path))
                self.path.append([[round(2**x, 1) for x in row.tolist()] for row in self.logs])
                report(len(self.path))
                logger.debug("windows: step %d, divergence %.4f", len(self.path), divergence)
                stop = enough(self.path[-1]) or len(self.path) == self.steps
                if stop or len(self.path) % SAVE_EVERY == 0:
                    self.save()
                if stop:
                    return

    def load(self) -> None:
        """Take the path as far as it was saved. One that is damaged is made again."""
        if not self.file.exists():
            return
        try:
            path, logs, value = self.read()
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            if not self.warned:
                logger.warning("%s is damaged (%s): the plan is made again", self.file, error)
            self.warned = True
            return
        if len(path) > len(self.path):
            self.path, self.logs, self.value = path, logs, value

    def read(self) -> tuple[list[list[list[float]]], list[Tensor], list[Tensor]]:
        """Return what was saved. Raises an error of Python if it is not what `save` writes."""
        saved = json.loads(self.file.read_text(encoding="utf-8"))
        path, largest = saved["path"], 1 + max(2 ** float(row[0]) for row in self.longest)
        if not isinstance(path, list) or len(path) > self.steps:
            raise ValueError(f"it has no path of at most {self.steps} steps")
        heads = [len(row) for row in self.longest]
        for sizes in (*path, saved["logs"], saved["value"]):
            numbers = [x for row in sizes for x in row]
            if [len(row) for row in sizes] != heads or not all(type(x) is float and math.isfinite(x) for x in numbers):
                raise ValueError("it does not have a number for each head")
        if not all(0 < x <= largest for sizes in path for row in sizes for x in row):
            raise ValueError("it has a window that is not possible")
        logs, value = ([torch.tensor(row) for row in saved[name]] for name in ("logs", "value"))
        return path, logs, value

    def save(self) -> None:
        state = {"logs": [x.tolist() for x in self.logs], "value": [x.tolist() for x in self.value]}
        with writing(self.file, then="repeat the command"):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.file, json.dumps({"path": self.path, **state}))

    def step(self, number: int) -> float:
        """Make one step. Returns the divergence before it."""
        windows = [2**x for x in self.logs]
        chosen = torch.randint(len(self.text), (self.rows,), generator=torch.Generator().manual_seed(number))
        divergence, worth = self.worth(self.text.batches_of(chosen.tolist()), windows)
        if (questions := self.ask(number)) is not None:
            ids, where = questions
            _, more = self.limited.worth(ids, windows, where)
            worth = [own + ANSWERS * x for own, x in zip(worth, more, strict=True)]
        if not all(bool(x.isfinite().all()) for x in worth):
            raise T2RError("the logits of the model are not finite on this text: its heads cannot be measured")
        self.value = [MEMORY * old + (1 - MEMORY) * x for old, x in zip(self.value, worth, strict=True)]
        unbiased = 1 - MEMORY ** (number + 1)
        ratios = [
            (x / unbiased / layer.token).clamp_min(LEAST).log()
            for x, layer in zip(self.value, self.costs.layers, strict=True)
        ]
        first, last = (sum(float((2**x).sum()) * layer.token for x, layer in zip(of, self.costs.layers, strict=True))
                       for of in (self.longest, self.smallest()))  # fmt: skip
        self.logs = self.moved(ratios, first * (last / first) ** ((number + 1) / self.steps))
        return divergence

    def worth(self, batches: Sequence[Batch], windows: Sequence[Tensor]) -> tuple[float, list[Tensor]]:
        """Return the divergence per token of these batches, and what one more token is worth to each head."""
        found = [self.limited.worth(batch, windows) for batch in batches]
        shares = [batch.positions / sum(each.positions for each in batches) for batch in batches]
        divergence = sum(share * own for share, (own, _) in zip(shares, found, strict=True))
        worth = zip(*([share * x for x in own] for share, (_, own) in zip(shares, found, strict=True)), strict=True)
        return divergence, [torch.stack(each).sum(0) for each in worth]

    def smallest(self) -> list[Tensor]:
        return [torch.full_like(x, math.log2(min(SMALLEST, 2 ** float(x[0])))) for x in self.longest]

    def moved(self, ratios: Sequence[Tensor], memory: float) -> list[Tensor]:
        """Return the sizes after a step in which they get a number of bytes, at one price for all."""
        # In one tensor: layer by layer, the search for the price would be thousands of small operations.
        logs, ratio, least, most = (torch.cat([*rows]) for rows in (self.logs, ratios, self.smallest(), self.longest))
        heads = [len(row) for row in self.logs]
        costs = torch.cat([torch.full((x.heads,), x.token, dtype=torch.float64) for x in self.costs.layers])

        def at(price: float) -> Tensor:
            return (logs + PACE * (ratio - price).clamp(-FARTHEST, FARTHEST)).clamp(least, most)

        low, high = math.log(LEAST) - 99.0, 99.0
        for _ in range(60):
            price = (low + high) / 2
            used = float((2 ** at(price)).double() @ costs)
            low, high = (price, high) if used > memory else (low, price)
        return list(at(high).split(heads))


def grid(longest: int) -> list[int]:
    """Return the windows that a head may have: two for each power of two, so that heads of a layer often have the
    same, and can be stored together. None is just below the longest: a soft window of that size still sees a little of
    everything, and so the heads that answer about the first words would lose exactly those."""
    sizes = [round(SMALLEST * 2 ** (i / 2)) for i in range(64)]
    return [*(size for size in sizes if size < longest * (1 if size == SMALLEST else REACH)), longest]


def fitted(sizes: Sequence[Sequence[float]], costs: Costs, memory: int | None = None) -> list[list[int]]:
    """Round windows to the grid. With a `memory`, all grow by one factor as long as they fit; what is left goes to
    those that are next."""
    steps = []
    for layer, row in enumerate(sizes):
        possible = grid(costs.layers[layer].longest)
        for head, size in enumerate(row):
            edges = [0.0, *(math.sqrt(a * b) for a, b in pairwise(possible))]
            steps += [(edge / size, layer, head, to) for edge, to in zip(edges, possible, strict=True)]
    windows = [[0] * len(row) for row in sizes]
    left = math.inf if memory is None else memory - costs.of_windows(windows)
    for factor, layer, head, to in sorted(steps):
        price = (to - windows[layer][head]) * costs.layers[layer].token
        if (factor <= 1 or memory is not None) and (price <= left or to == grid(costs.layers[layer].longest)[0]):
            windows[layer][head] = to
            left -= price
    return windows
