"""What the server does with a request, whatever its form: find a state, run it, keep its state."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from t2r.generation.engine.rows import MOST
from t2r.generation.turns import Transcript
from t2r.options.serving import MIB, ServeOptions
from t2r.serving.choosing import ALL_SEEDS, Choosing
from t2r.serving.errors import ApiError, closing, internal, too_long
from t2r.serving.metrics import Metrics
from t2r.serving.prompts import Prompt
from t2r.serving.served import ServedModel
from t2r.serving.states import States
from t2r.serving.stored import Stored
from t2r.serving.worker import Job, Piece, Worker, explained
from t2r.storage import check_named, kind_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

SHARED = 64
"""Prompts of more tokens than this are read once for all choices of a call. Shorter ones are read together."""

CONTEXT = 8
"""Tokens of a text with which those after it are decoded."""
CHARACTERS, SHORT_TEXT = 16, 1 << 16
"""A text may have as many characters for each token that is allowed, which no tokenizer reaches; or as many in all."""


@dataclass
class Call:
    """A request, in the terms of the engine."""

    model: ServedModel
    prompt: Prompt
    choosing: Choosing
    n: int = 1
    seed: int | None = None
    stop: Sequence[str] = ()
    logprobs: int | None = None
    streams: bool = False
    keep: bool = True
    """Whether the state is kept at the end."""


@dataclass(eq=False)
class Running:
    """A call that runs: a job for each of its choices."""

    call: Call
    jobs: list[Job]
    cached: int
    """Tokens of the prompt that a state has read."""
    read: int
    """Tokens of the prompt that are read now."""
    deadline: float
    left: set[Job] = field(default_factory=set)
    """Jobs that have not ended."""

    @property
    def prompt_tokens(self) -> int:
        return self.cached + self.read

    @property
    def generated(self) -> int:
        return sum(len(job.generated) for job in self.jobs)


class Service:
    """Runs calls on some models. The first one is that of requests that do not name any."""

    def __init__(self, models: Sequence[ServedModel], options: ServeOptions) -> None:
        self.models = {model.name: model for model in models}
        self.options = options
        self.metrics = Metrics()
        self.text = ThreadPoolExecutor(1, "t2r-text")
        """Tokenizes, so that long texts do not delay others."""
        self.running: set[Running] = set()
        self.closing = False
        self.started = int(time.time())
        self.worker: Worker
        self.states: States

    # --- The server -----------------------------------------------------------------------------------------

    def find_states(self) -> None:
        """Find states that were kept. Raises T2RError if their folder cannot be used."""
        options, folder = self.options, None
        if options.states is not None:
            check_named(options.states, "the folder of states")
            folder = Path(options.states)
            kind_of(folder)  # refuses what is not a path
        budget = (options.state_memory * MIB, options.state_disk * MIB, options.state_hours * 3600)
        self.states = States([model for model in self.models.values() if not model.translates], folder, *budget)

    async def start(self) -> None:
        """Start the engine's thread, and find states, if `find_states` has not."""
        if not hasattr(self, "states"):
            self.find_states()
        self.worker = Worker(list(self.models.values()), asyncio.get_running_loop())
        self.worker.start()
        self.measure()

    def measure(self) -> None:
        """Add what is measured when somebody asks."""
        gauge = self.metrics.gauge

        def of_load(name: str, kind: str) -> Callable[[], float]:
            return lambda: float(getattr(self.worker.load[name], kind))

        for name in self.models:
            for kind in ("waiting", "running", "rows"):
                gauge(f"t2r_{kind}", f"Sequences of the engine: {kind}.", of_load(name, kind), model=name)
        gauge("t2r_state_bytes", "Bytes of states.", lambda: self.states.in_memory, place="memory")
        gauge("t2r_state_bytes", "Bytes of states.", lambda: self.states.on_disk, place="disk")
        gauge("t2r_states", "States.", lambda: len(self.states))
        gauge("t2r_states_dropped", "States forgotten for lack of space.", lambda: self.states.dropped)
        gauge("t2r_state_failures", "States that could not be read or written.", lambda: self.states.failures)

    def refuse_new(self) -> None:
        """Refuse new requests and those that wait from now on. Those that run go on."""
        if not self.closing:
            self.closing = True
            if hasattr(self, "worker"):  # otherwise it is starting
                self.worker.cancel_waiting(closing())

    async def close(self) -> None:
        """End the engine's thread, and write what is not yet on disk."""
        self.closing = True
        await asyncio.to_thread(self.worker.close)
        await self.states.close()
        self.text.shutdown()

    def model(self, name: str | None) -> ServedModel:
        """Return a model by its name. Raises ApiError if there is none."""
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            shown = name if len(name) <= 100 else f"{name[:100]}..."
            known = ", ".join(self.models)
            raise ApiError(f"there is no model {shown!r}; there is {known}", 404, param="model", code="model_not_found")
        return self.models[name]

    def stored(self, model: ServedModel, id: str | None, param: str) -> Stored | None:
        """Return a state by the id that a request has in this field. Raises ApiError if the model cannot use it."""
        if id is None:
            return None
        if model.translates:
            raise ApiError(f"{model.name} translates, and has no states", param=param)
        stored = self.states.get(id, param)
        if stored.fingerprint != model.fingerprint:
            raise ApiError(f"{id} is a state of the model {stored.model}, not of {model.name}", param="model")
        return stored

    async def in_text_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.text, function, *args)

    # --- A call ---------------------------------------------------------------------------------------------

    async def begin(self, call: Call) -> Running:
        """Find the state of a call and submit its jobs. Raises ApiError if it is refused."""
        model, prompt = call.model, call.prompt
        self.admit(call)
        stored, tokens = prompt.stored, prompt.tokens
        self.check_length(call, len(tokens) + (0 if stored is None else stored.length))
        if stored is None and not model.translates:
            stored = self.states.longest(model, tokens)
            tokens = tokens if stored is None else tokens[stored.length :]
        cached = 0 if stored is None else stored.length
        options = call.choosing.options(model)
        state = history = None
        if stored is not None:
            history = stored.tokens
            try:
                state = await self.states.load(stored)
            except ApiError:
                if prompt.stored is not None:
                    raise
                tokens, cached, history = prompt.tokens, 0, None  # everything is read again
        self.admit(call)  # others may have come meanwhile
        deadline, read = time.monotonic() + self.options.timeout, len(tokens)
        forgotten = stored is not None and history is None  # what a repetition penalty has to see
        if call.n > 1 and read > SHARED and not model.translates and not forgotten:
            state = await self.read_once(call, tokens[:-1], state, history, deadline)
            history, tokens = array("i", [*(history or ()), *tokens[:-1]]), tokens[-1:]
        context = [*(history or ())[-CONTEXT:], *tokens][-CONTEXT:]
        seed = secrets.randbits(32) if call.seed is None else call.seed
        jobs = [
            Job(
                model,
                tokens,
                options | call.choosing.penalties(),
                state,
                history,
                () if model.translates or prompt.said is not None else context,
                (seed + i) & ALL_SEEDS,
                call.stop,
                call.logprobs,
                keep_state=call.keep and i == 0 and not model.translates,
                streams=call.streams,
            )
            for i in range(call.n)
        ]
        running = Running(call, jobs, cached, read, deadline, set(jobs))
        self.running.add(running)
        for job in jobs:
            self.worker.submit(job)
        self.metrics.tokens.labels(model.name, "cached").inc(cached)
        self.metrics.tokens.labels(model.name, "read").inc(read)
        return running

    async def read_once(self, call: Call, tokens: list[int], state: Any, history: Any, deadline: float) -> Any:
        """Return the state after these tokens, from which all choices of a call go on."""
        options = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": call.model.pad}
        job = Job(call.model, tokens, options, state, history, keep_state=True, reads=True)
        running = Running(replace(call, n=1), [job], 0, len(tokens), deadline, {job})
        self.running.add(running)
        self.worker.submit(job)
        try:
            async for _ in self.pieces(running, job):
                pass
        finally:
            self.leave(running)
        assert job.sequence is not None
        return job.sequence.state

    def admit(self, call: Call) -> None:
        """Raise ApiError if the server is full or closing."""
        if self.closing:
            raise closing()
        mine = sum(len(running.left) for running in self.running if running.call.model is call.model)
        load = self.worker.load[call.model.name]
        if mine - load.running + call.n > self.options.max_queue + self.free_rows(call.model):
            raise ApiError(
                "the server is busy: too many requests are waiting",
                429,
                code="queue_full",
                headers={"retry-after": "1"},
            )

    def free_rows(self, model: ServedModel) -> int:
        """Return the number of sequences that could run beside those that do."""
        most = model.engine.rows.limit or MOST
        return max(0, most - self.worker.load[model.name].running)

    def default_tokens(self, model: ServedModel, prompt: int) -> int:
        """Return how many tokens an answer may have, if the client does not say it."""
        limit = self.options.max_length if model.positions is None else min(self.options.max_length, model.positions)
        return max(1, min(self.options.max_tokens, limit - (1 if model.translates else prompt)))

    def check_length(self, call: Call, prompt: int) -> None:
        """Raise ApiError if a sequence becomes longer than the server or the model allows."""
        limit, what = self.longest(call.model), "tokens"
        if not call.model.translates:
            prompt, what = prompt + call.choosing.max_tokens, "tokens, with those to generate,"
        if prompt > limit:
            raise too_long(f"{prompt:,} {what}", f"{limit:,}")

    def check_size(self, model: ServedModel, texts: Sequence[str], least: int = 0) -> None:
        """Raise ApiError for texts that are certainly too long, before time is spent on them.

        `least` is a number of tokens that they have at least."""
        limit = self.longest(model)
        most, given = max(SHORT_TEXT, CHARACTERS * limit), sum(map(len, texts))
        if given > most:
            raise too_long(f"{given:,} characters", f"{most:,}")
        if least > limit:
            raise too_long(f"{least:,} tokens or more", f"{limit:,}")

    def longest(self, model: ServedModel) -> int:
        """Return how many tokens a prompt may have, with those to generate if the model is a decoder."""
        limit = self.options.max_length
        return limit if model.translates else min(limit, model.positions or limit)

    async def pieces(self, running: Running, job: Job) -> AsyncIterator[Piece]:
        """Yield the pieces of a job to its end. Raises ApiError if it fails or takes too long."""
        while True:
            try:
                async with asyncio.timeout_at(self.until(running)):
                    piece = await job.pieces.get()
            except TimeoutError:
                seconds = self.options.timeout
                raise ApiError(f"the request took longer than {seconds:g} seconds", 504, code="timeout") from None
            if piece.last:
                self.end(running, job)
            if job.error is not None:
                raise self.refused(job.error)
            if piece.last and job.cancelled:
                raise closing()
            yield piece
            if piece.last:
                return

    def until(self, running: Running) -> float:
        return asyncio.get_running_loop().time() + running.deadline - time.monotonic()

    def end(self, running: Running, job: Job) -> None:
        """Note that a job has ended. It may have been noted before."""
        if job not in running.left:
            return
        running.left.discard(job)
        if not running.left:
            self.running.discard(running)
        if job.reads:
            return
        name, count = job.model.name, len(job.generated)
        reason = (None if job.sequence is None else job.sequence.reason) or "cancelled"
        self.metrics.ended.labels(name, reason).inc()
        self.metrics.tokens.labels(name, "generated").inc(count)
        if job.first is not None:
            now = time.monotonic()
            self.metrics.first.labels(name).observe(job.first - job.submitted)
            if count > 1:
                self.metrics.later.labels(name).observe((now - job.first) / (count - 1))

    def leave(self, running: Running) -> None:
        """Cancel the jobs of a call that have not ended, and free their rows."""
        for job in list(running.left):
            self.worker.cancel(job)
            self.end(running, job)

    async def text_of(self, running: Running, job: Job) -> str:
        """Wait for the end of a job and return its text."""
        return "".join([piece.text async for piece in self.pieces(running, job)])

    def refused(self, error: Exception) -> ApiError:
        """Return what a client is told about an error."""
        if isinstance(error, ApiError):
            return error
        if (known := explained(error)) is not None:
            return ApiError(str(known))
        logger.error("a request has failed", exc_info=error)
        return internal()

    # --- States ---------------------------------------------------------------------------------------------

    def keep(
        self, running: Running, id: str, text: str, told: dict[str, Any] | None = None, kind: str = "response"
    ) -> Stored | None:
        """Keep the state of the first choice of a call that has ended, under this id. None: there is none."""
        job, call = running.jobs[0], running.call
        sequence, model = job.sequence, call.model
        if sequence is None or sequence.state is None:
            return None
        cache, sequence.state = sequence.state, None
        before = call.prompt.stored
        tokens: list[int] | None = [*call.prompt.tokens]
        if before is not None:  # whose unread tokens are the first of the prompt
            tokens = None if before.tokens is None else [*before.tokens, *call.prompt.tokens]
        generated = [] if kind == "document" else job.generated
        said, chat = call.prompt.said, None
        length = int(cache.get_seq_length())
        if said is not None and kind != "document":
            written = str(model.tokenizer.decode(generated, skip_special_tokens=False))
            answer = {"role": "assistant", "content": text}
            said = Transcript([*said.messages, answer], said.text + written, said.document)
        if said is not None:
            chat = said.of_state(length + (1 if generated else 0))
        if tokens is not None:
            tokens = [*tokens, *generated[:-1]]
            assert len(tokens) == length
        how: dict[str, Any] = {"unread": generated[-1:], "chat": chat, "told": told, "cache": cache}
        how["own"] = before is None or before.own
        stored = Stored(id, model.name, kind, model.fingerprint, length, tokens, **how)
        self.states.add(stored)
        return stored
