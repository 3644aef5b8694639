"""The thread that owns the engines. Everything that touches a model while it runs happens here.

Requests come through a queue. What they generate goes back to the event loop of the server in one call for each step.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from t2r.errors import T2RError
from t2r.generation.engine import Event
from t2r.generation.engine import Sequence as EngineSequence
from t2r.generation.engine.sequences import LogProbability
from t2r.serving.served import ServedModel
from t2r.serving.text import Detokenizer, StopStrings

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Piece(NamedTuple):
    """What one step has added to a request."""

    text: str
    tokens: list[int]
    logprobs: list[LogProbability]
    last: bool


@dataclass(eq=False)
class Job:
    """A request for one sequence. The worker fills it; its pieces arrive in the event loop."""

    model: ServedModel
    tokens: list[int]
    """What to read, after the state."""
    options: dict[str, Any]
    """Options of `generate`."""
    state: Any = None
    history: Any = None
    """The tokens that the state has read, if they are known, as an array of `int` of 4 bytes."""
    context: Sequence[int] = ()
    """The last tokens of the text that goes on. Empty: the generated text is one of its own, such as an answer."""
    seed: int | None = None
    stop: Sequence[str] = ()
    """Strings that end the text, which does not contain them."""
    logprobs: int | None = None
    keep_state: bool = False
    reads: bool = False
    """Whether it is there for its state only, from which others go on."""
    streams: bool = False
    """Whether pieces have text. Otherwise, only the last one has."""
    pieces: asyncio.Queue[Piece] = field(default_factory=asyncio.Queue)
    sequence: EngineSequence | None = None
    """None until the engine has accepted the request."""
    error: Exception | None = None
    cancelled: bool = False
    stopped: bool = False
    """Whether a stop string has ended it."""
    submitted: float = field(default_factory=time.monotonic)
    first: float | None = None
    """When the first token was there."""
    told: int = 0
    """Number of tokens that were passed on."""

    def __post_init__(self) -> None:
        self.text = Detokenizer(self.model.tokenizer, self.context)
        self.strings = StopStrings(self.stop)

    @property
    def generated(self) -> list[int]:
        return [] if self.sequence is None else self.sequence.tokens

    @property
    def reason(self) -> str:
        """Why it has ended, in the words of the API: a stop string may come with the last token that is allowed."""
        ended = self.sequence is not None and self.sequence.reason == "length" and not self.strings.found
        return "length" if ended else "stop"

    def piece(self, tokens: list[int], last: bool) -> Piece:
        """Return the next piece, with these new tokens."""
        logprobs = [] if self.logprobs is None else self.generated_logprobs(len(tokens))
        self.told += len(tokens)
        text = ""
        if (self.streams or self.stop or last) and not self.strings.found:
            new = self.generated[self.text.count : self.told]
            at_end = last or bool(new and new[-1] in self.model.stops)
            text = self.text.add([token for token in new if token not in self.model.stops], at_end)
            text = self.strings.add(text, at_end) if self.stop else text
        return Piece(text, tokens, logprobs, last)

    def generated_logprobs(self, count: int) -> list[LogProbability]:
        return [] if self.sequence is None else self.sequence.logprobs[self.told : self.told + count]


class Load(NamedTuple):
    """How busy a model is."""

    waiting: int = 0
    running: int = 0
    rows: int = 0


class Worker:
    """Runs jobs on the engines of some models, in a thread of its own.

    Args:
        models: the models.
        loop: the event loop in which the pieces of a job arrive.
    """

    def __init__(self, models: Sequence[ServedModel], loop: asyncio.AbstractEventLoop) -> None:
        self.models, self.loop = models, loop
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.jobs: dict[EngineSequence, Job] = {}
        self.load = {model.name: Load() for model in models}
        self.outbox: list[tuple[Job, Piece]] = []
        self.thread = threading.Thread(target=self.run, name="t2r-engine", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def close(self) -> None:
        """End the thread. Jobs that run are cancelled."""
        self.inbox.put(None)
        self.thread.join()

    # --- From the event loop --------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        self.inbox.put(lambda: self.begin(job))

    def cancel(self, job: Job) -> None:
        self.inbox.put(lambda: self.abandon(job))

    def cancel_waiting(self, error: Exception) -> None:
        """End the jobs that have not begun to run."""
        self.inbox.put(lambda: self.refuse_waiting(error))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call a function between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        self.inbox.put(run)
        return future

    # --- In the thread --------------------------------------------------------------------------------------

    def run(self) -> None:
        while True:
            busy = any(model.engine.busy or model.engine.scheduler.events for model in self.models)
            try:
                task = self.inbox.get(block=not busy)
                while task is not None:
                    task()
                    task = self.inbox.get_nowait()
                break  # None: the end
            except queue.Empty:
                task = None  # it holds its job
            for model in self.models:
                self.step(model)
            self.send()
        for job in list(self.jobs.values()):
            self.abandon(job)
        self.send()

    def step(self, model: ServedModel) -> None:
        engine = model.engine
        if not engine.busy and not engine.scheduler.events:
            return
        try:
            events = engine.step()
        except Exception as error:  # a bug, or a device that fails: nothing that ran can go on
            logger.exception("the engine of %s has failed", model.name)
            for job in [job for job in self.jobs.values() if job.model is model]:
                job.error = job.error or error
                self.abandon(job)
            return
        new: dict[Job, list[Event]] = {}
        for event in events:
            if event.sequence in self.jobs:
                new.setdefault(self.jobs[event.sequence], []).append(event)
        for job, own in new.items():
            self.deliver(job, own)
        self.note(model)

    def begin(self, job: Job) -> None:
        if job.cancelled:
            return
        model = job.model
        ids = torch.tensor([job.tokens])
        try:
            history = None if job.history is None else torch.frombuffer(job.history, dtype=torch.int32)
            how: dict[str, Any] = {"state": job.state, "history": history, "copy_state": False}  # states never change
            how |= {"seed": job.seed, "keep_state": job.keep_state, "logprobs": job.logprobs}
            job.sequence = model.engine.submit(ids, **how, **job.options)
        except Exception as error:
            job.error = error
            self.outbox.append((job, Piece("", [], [], True)))
            return
        job.state = job.history = None
        self.jobs[job.sequence] = job
        self.note(model)

    def deliver(self, job: Job, events: list[Event]) -> None:
        """Pass new tokens on, and stop the sequence if its text contains a stop string."""
        assert job.sequence is not None
        if job.first is None:
            job.first = time.monotonic()
        last = events[-1].reason is not None
        tokens = [event.token for event in events if event.token is not None]
        job.error = job.error or job.sequence.error
        try:
            piece = job.piece(tokens, last)
        except Exception as error:  # of the tokenizer
            job.error, piece, last = error, Piece("", tokens, [], True), True
            job.model.engine.cancel(job.sequence)
        if job.strings.found and not last:
            job.stopped = last = True
            job.model.engine.stop(job.sequence)
            piece = piece._replace(last=True)
        if last:
            del self.jobs[job.sequence]
        if last or piece.text or job.streams:
            self.outbox.append((job, piece))

    def abandon(self, job: Job) -> None:
        """End a job, wherever it is. It gets a last piece."""
        job.cancelled = True
        if job.sequence is None or job.sequence not in self.jobs:
            return
        del self.jobs[job.sequence]
        try:
            job.model.engine.cancel(job.sequence)
        except Exception:
            logger.exception("a sequence could not be cancelled")
        self.outbox.append((job, Piece("", [], [], True)))
        self.note(job.model)

    def refuse_waiting(self, error: Exception) -> None:
        for job in list(self.jobs.values()):
            if job.sequence is not None and job.sequence.row is None and not job.sequence.tokens:
                job.error = error
                self.abandon(job)

    def note(self, model: ServedModel) -> None:
        rows = model.engine.rows
        step = rows.step
        waiting = model.engine.scheduler.queue.sequences
        self.load[model.name] = Load(waiting, len(rows.held), 0 if step is None else step.rows)

    def send(self) -> None:
        """Pass what was collected to the event loop."""
        if not self.outbox:
            return
        pieces, self.outbox = self.outbox, []

        def put() -> None:
            for job, piece in pieces:
                job.pieces.put_nowait(piece)

        try:
            self.loop.call_soon_threadsafe(put)
        except RuntimeError:  # the loop is closed: nobody waits for them
            return


def explained(error: Exception) -> T2RError | None:
    """Return an error of a job as one of the user, or None if it is a bug."""
    if isinstance(error, T2RError):
        return error
    # transformers checks options with ValueError.
    return T2RError(f"cannot generate: {error}") if isinstance(error, ValueError) else None
