"""Measures a server over HTTP: users who come one after the other, and the turns of a conversation.

Prompts are random tokens, new ones in each round, so that no state has read them. The models of a server take turns.
A turn is asked after a state that has read a number of tokens; the same tokens are read from their beginning for
comparison.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from t2r.bench.client import Client, Refused
from t2r.bench.requests import percentiles
from t2r.bench.summary import mebibytes, median_and_spread, titled_table
from t2r.errors import T2RError
from t2r.words import counted

if TYPE_CHECKING:
    from rich.table import Table

USERS = (1, 8, 64)
PROMPTS = (20, 600, 60, 2000, 200)
AFTER = (1000, 8000)
LINE = "What comes next in this story? Tell me about it."
"""What is said in a turn."""
FIRST_TOKEN = 10
"""Tokens before it may have a meaning of their own."""
START, END = 600.0, 30.0
"""Seconds that a server may take to start, and to end."""
KEY = "T2R_API_KEY"


@dataclass(frozen=True)
class ServeSettings:
    prompts: list[int]
    """Lengths of the prompts, in turn."""
    new_tokens: int
    gap: float
    """Milliseconds between the arrivals of two users."""
    repeats: int
    dtype: str
    device: str
    version: str


@dataclass(frozen=True)
class Row:
    """One model and one number of users."""

    model: str
    users: int
    tokens_per_second: float
    """New tokens, from the first request to the last token."""
    spread: float
    first_token: tuple[float, float]
    """Milliseconds from a request to its first token: median, and the 99th percentile."""
    between_tokens: tuple[float, float]
    """Milliseconds between two arrivals of new tokens of a user: median, and the 99th percentile."""
    bytes_per_user: int
    """What the user with the longest prompt costs at the end."""


@dataclass(frozen=True)
class Turn:
    """A turn of a conversation that has a number of tokens."""

    model: str
    tokens: int
    """Tokens before it."""
    reading: float | None
    """Milliseconds to the first token if these tokens are read from their beginning."""
    first_token: float
    """Milliseconds to the first token, from a state."""
    whole: float
    """Milliseconds to the last token."""
    read: int
    """Tokens that were read in the turn."""
    state_bytes: int
    """Bytes of the state after it."""


@dataclass(frozen=True)
class Report:
    settings: ServeSettings
    rows: list[Row]
    turns: list[Turn]
    notes: list[str] = field(default_factory=list)


def run(url: str, users: Sequence[int] = USERS, *, key: str | None = None, **options: Any) -> Report:
    """Measure the server at a URL. The options are those of `measure`."""
    return asyncio.run(measure(Client(url, key), users, **options))


async def measure(
    client: Client,
    users: Sequence[int] = USERS,
    *,
    prompts: Sequence[int] = PROMPTS,
    new_tokens: int = 32,
    after: Sequence[int] = AFTER,
    gap: float = 50.0,
    repeats: int = 3,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Measure the language models of a server.

    Args:
        users: numbers of users.
        prompts: lengths of their prompts, in turn.
        new_tokens: tokens that each request generates.
        after: numbers of tokens after which a turn of a conversation is measured, besides the first turn.
        gap: milliseconds between the arrivals of two users.
        repeats: number of rounds, after one that is not counted.
    """
    numbers = [("new_tokens", new_tokens), ("repeats", repeats), *(("users", n) for n in users)]
    numbers += [*(("prompts", n) for n in prompts), *(("after", n) for n in after)]
    for name, number in numbers:
        if number < 1:
            raise T2RError(f"{name} must be at least 1; got {number}")
    models = [model for model in (await client.ask("/v1/models"))["data"] if "state_bytes" in model.get("t2r", {})]
    if not models:
        raise T2RError("the server has no language model of t2r: see `t2r bench translate` for translation")
    tell = progress or (lambda line: None)
    rows, turns, notes = [], [], []
    for count in users:
        rounds: dict[str, list[Round]] = {model["id"]: [] for model in models}
        for number in range(1 + repeats):
            for model in models:
                tell(f"{model['id']}: {counted(count, 'user')}, round {number} of {repeats}")
                done = Round(client, model, number)
                await done.run(count, prompts, new_tokens, gap / 1e3)
                rounds[model["id"]] += [done] if number else []
        longest = max(prompts[i % len(prompts)] for i in range(count)) + new_tokens
        rows += [row_of(model, count, rounds[model["id"]], longest) for model in models]
    for tokens in (0, *after):
        for model in models:
            tell(f"{model['id']}: a turn after {counted(tokens, 'token')}")
            try:
                turns.append(await turn_of(client, model, tokens, new_tokens, repeats))
            except Refused as error:
                if error.code != "context_length_exceeded":
                    raise
                notes.append(f"{model['id']}: no turn after {tokens:,} tokens: {error}")
    first = models[0]["t2r"]
    version = (await client.ask("/health")).get("version", "")
    about = ServeSettings(list(prompts), new_tokens, gap, repeats, first["dtype"], first["device"], version)
    return Report(about, rows, turns, notes)


def random_tokens(model: dict[str, Any], count: int, seed: str) -> list[int]:
    words = int(model["t2r"]["vocabulary"])
    drawn = random.Random(seed)
    return [drawn.randrange(min(FIRST_TOKEN, words - 1), words) for _ in range(count)]


# --- Users --------------------------------------------------------------------------------------------------


class Round:
    """Users of one model who come one after the other: the time of all of them, and how long each has waited."""

    def __init__(self, client: Client, model: dict[str, Any], number: int) -> None:
        self.client, self.model, self.number = client, model, number
        self.waited: list[float] = []
        self.between: list[float] = []
        self.tokens = 0
        self.tokens_per_second = 0.0

    async def run(self, users: int, prompts: Sequence[int], new_tokens: int, gap: float) -> None:
        # What a user sends does not depend on the model.
        given = [
            random_tokens(self.model, prompts[i % len(prompts)], f"{users} {self.number} {i} {time.time_ns()}")
            for i in range(users)
        ]
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for i, prompt in enumerate(given):
                group.create_task(self.user(prompt, new_tokens, i * gap))
        self.tokens_per_second = self.tokens / (time.perf_counter() - began)

    async def user(self, prompt: list[int], new_tokens: int, delay: float) -> None:
        await asyncio.sleep(delay)
        body = {"model": self.model["id"], "prompt": prompt, "max_tokens": new_tokens, "temperature": 0}
        last, waited = time.perf_counter(), False
        async for event in self.client.events("/v1/completions", body | {"stream_options": {"include_usage": True}}):
            if not event.value["choices"]:
                self.tokens += event.value["usage"]["completion_tokens"]
                continue
            (self.between if waited else self.waited).append(1e3 * (event.at - last))
            last, waited = event.at, True


def row_of(model: dict[str, Any], users: int, rounds: Sequence[Round], longest: int) -> Row:
    speed, spread = median_and_spread([each.tokens_per_second for each in rounds])
    waited, between = ([x for each in rounds for x in getattr(each, part)] for part in ("waited", "between"))
    facts = model["t2r"]
    cost = facts["state_bytes"] + facts["bytes_per_token"] * longest
    return Row(model["id"], users, speed, spread, percentiles(waited), percentiles(between), cost)


# --- Turns --------------------------------------------------------------------------------------------------


async def turn_of(client: Client, model: dict[str, Any], tokens: int, new_tokens: int, repeats: int) -> Turn:
    """Measure a turn after this number of tokens. Each repetition goes on from the same state, and is a fork of it."""
    reading, state = await read(client, model, tokens) if tokens else (None, None)
    asked = {"model": model["id"], "max_output_tokens": new_tokens, "temperature": 0}
    firsts, wholes, usage, id = [], [], {}, ""
    for number in range(1 + repeats):
        body = asked | {"input": LINE} | ({} if state is None else {"previous_response_id": state})
        if state is None:  # a beginning that no state has read
            body["input"] = f"{number} {time.time_ns()} {LINE}"
        sent, first, last = time.perf_counter(), 0.0, 0.0
        async for event in client.events("/v1/responses", body):
            if event.value["type"] == "response.output_text.delta":
                first = first or event.at
            elif event.value["type"] in ("response.completed", "response.incomplete"):
                last, usage, id = event.at, event.value["response"]["usage"], event.value["response"]["id"]
        if number:
            firsts.append(1e3 * ((first or last) - sent))
            wholes.append(1e3 * (last - sent))
    new = usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"]
    size = (await client.ask(f"/v1/states/{id}"))["bytes"]
    return Turn(model["id"], tokens, reading, median(firsts), median(wholes), new, size)


async def read(client: Client, model: dict[str, Any], tokens: int) -> tuple[float, str]:
    """Let a model read random tokens. Returns the milliseconds to the first token after them, and the state's id."""
    prompt = random_tokens(model, tokens, f"{time.time_ns()}")
    body = {"model": model["id"], "prompt": prompt, "max_tokens": 1, "temperature": 0}
    sent = time.perf_counter()
    answer = await client.ask("/v1/completions", body)
    return 1e3 * (time.perf_counter() - sent), answer["id"]


# --- The server ---------------------------------------------------------------------------------------------


@contextmanager
def started(model: str, arguments: Sequence[str], key: str | None = None) -> Iterator[str]:
    """Start `t2r serve` as a process of its own, and yield its URL. Raises T2RError if it does not start."""
    command = [sys.executable, "-m", "t2r", "serve", model, "--port", "0", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != KEY}
    environment |= {} if key is None else {KEY: key}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        try:
            yield address(process, log)
        finally:
            process.terminate()
            try:
                process.wait(END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def address(process: subprocess.Popen[bytes], log: Any) -> str:
    """Wait until a server says where it listens."""
    until = time.monotonic() + START
    while True:
        ended = process.poll() is not None
        log.seek(0)
        text = log.read()
        if found := re.search(r" at (http://\S+) \(", text):
            return found[1]
        if ended or time.monotonic() > until:
            said = text.strip().splitlines() or ["it said nothing"]
            raise T2RError(f"the server did not start: {said[-1].removeprefix('t2r: ')}")
        time.sleep(0.1)


# --- Formatting ---------------------------------------------------------------------------------------------

HEADER = ("model", "users", "tokens/s", "spread", "first token ms (p99)", "between tokens ms (p99)", "memory of a user")
TURNS = ("model", "tokens before", "reading them ms", "first token ms", "turn ms", "against the first", "state")


def tables(report: Report) -> list[Table | str]:
    s = report.settings
    title = (
        f"Users who come every {s.gap:g} ms: prompts of {', '.join(f'{n:,}' for n in s.prompts)} tokens, "
        f"{s.new_tokens} new ones; {s.dtype} on {s.device}, median of {counted(s.repeats, 'round')}"
    )
    cells = [
        (
            row.model,
            f"{row.users:,}",
            f"{row.tokens_per_second:,.0f}",
            f"{row.spread:.0%}",
            *(f"{middle:,.1f} ({last:,.1f})" for middle, last in (row.first_token, row.between_tokens)),
            mebibytes(row.bytes_per_user),
        )
        for row in report.rows
    ]
    first = {turn.model: turn.whole for turn in report.turns if not turn.tokens}
    turns = [
        (
            turn.model,
            f"{turn.tokens:,}",
            "" if turn.reading is None else f"{turn.reading:,.1f}",
            f"{turn.first_token:,.1f}",
            f"{turn.whole:,.1f}",
            f"{turn.whole / first[turn.model]:.2f}x",
            mebibytes(turn.state_bytes),
        )
        for turn in report.turns
    ]
    told = f"A turn of a conversation: {counted(s.new_tokens, 'new token')}, median of {counted(s.repeats, 'turn')}"
    parts = [titled_table(title, HEADER, cells, sections=False), titled_table(told, TURNS, turns, sections=False)]
    return [*parts, *report.notes]
