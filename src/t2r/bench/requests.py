"""Measures an engine whose requests join one after the other: tokens per second, and how long a request waits.

Before every step of the engine one more request is submitted, until all have been. Prompts are random tokens, and the
same for all models. Waiting is measured from the submission to the first token, and between two reads of new tokens of
one sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from t2r.bench.models import check_alike, with_positions
from t2r.bench.summary import median_and_spread, place, titled_table, with_short_names
from t2r.errors import T2RError
from t2r.evaluation.inputs import refuse_seq2seq
from t2r.evaluation.logits import evaluating
from t2r.generation.engine import Engine
from t2r.words import counted

if TYPE_CHECKING:
    from rich.table import Table

REQUESTS = (1, 16, 256)
PROMPTS = (16, 64, 32, 128)
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95}


@dataclass(frozen=True)
class RequestsSettings:
    prompts: list[int]
    """Lengths of the prompts, in turn."""
    new_tokens: int
    sampled: int
    """Every request of this number is sampled; 0: all are greedy."""
    rows: int | None
    step_tokens: int | None
    repeats: int
    dtype: str
    device: str
    threads: int


@dataclass(frozen=True)
class Row:
    """One model and one number of requests."""

    model: str
    requests: int
    tokens_per_second: float
    """New tokens, from the first submission to the last token."""
    spread: float
    first_token: tuple[float, float]
    """Milliseconds from the submission to the first token: median, and the 99th percentile."""
    between_tokens: tuple[float, float]
    """Milliseconds between two reads of new tokens of a sequence: median, and the 99th percentile."""


@dataclass(frozen=True)
class Report:
    settings: RequestsSettings
    rows: list[Row]


def run(
    models: Mapping[str, PreTrainedModel],
    requests: Sequence[int] = REQUESTS,
    *,
    prompts: Sequence[int] = PROMPTS,
    new_tokens: int = 32,
    sampled: int = 0,
    rows: int | None = None,
    step_tokens: int | None = None,
    repeats: int = 3,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Measure language models, given by name.

    Args:
        requests: numbers of requests.
        prompts: lengths of the prompts, in turn.
        new_tokens: tokens that each request generates.
        sampled: every request of this number is sampled, with a seed of its own; 0: all are greedy.
        rows, step_tokens: those of `t2r.Engine`.
        repeats: a speed is the median of this number of rounds, after one that is not counted. Models take turns.
    """
    if not models:
        raise T2RError("give at least one model")
    for name, number in (("new_tokens", new_tokens), ("repeats", repeats), *(("requests", n) for n in requests)):
        if number < 1:
            raise T2RError(f"{name} must be at least 1; got {number}")
    for name, model in models.items():
        refuse_seq2seq(model.config, name)
    check_alike(models)
    first = next(iter(models.values()))
    ready = {name: with_positions(model, max(prompts) + new_tokens) for name, model in models.items()}
    given = random_prompts(first, prompts, max(requests))
    limits: dict[str, Any] = {name: n for name, n in (("rows", rows), ("step_tokens", step_tokens)) if n is not None}
    found, tell = [], progress or (lambda line: None)
    with evaluating(*ready.values()):
        for count in requests:
            engines = {name: Engine(model, **limits) for name, model in ready.items()}
            rounds: dict[str, list[Round]] = {name: [] for name in engines}
            for turn in range(1 + repeats):
                for name, engine in engines.items():
                    tell(f"{name}: {counted(count, 'request')}, round {turn} of {repeats}")
                    done = Round(engine, given[:count], new_tokens, sampled)
                    rounds[name] += [done] if turn else []
            found += [row_of(name, count, done) for name, done in rounds.items()]
    dtype = str(first.dtype).removeprefix("torch.")
    where = (dtype, str(first.device), torch.get_num_threads())
    return Report(RequestsSettings(list(prompts), new_tokens, sampled, rows, step_tokens, repeats, *where), found)


def random_prompts(model: Any, lengths: Sequence[int], count: int) -> list[Tensor]:
    words, generator = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    return [
        torch.randint(words, (lengths[i % len(lengths)],), generator=generator).to(model.device) for i in range(count)
    ]


class Round:
    """One round of requests: the time of all of them, and how long each has waited."""

    def __init__(self, engine: Engine, prompts: Sequence[Tensor], new_tokens: int, sampled: int) -> None:
        self.waited: list[float] = []
        self.between: list[float] = []
        left, tokens = list(enumerate(prompts)), 0
        seen: dict[Any, float] = {}
        started: set[Any] = set()
        # Without EOS tokens, all sequences have the same length.
        how: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": None, "pad_token_id": 0}
        began = time.perf_counter()
        while left or engine.busy:
            if left:
                number, prompt = left.pop(0)
                options = {"seed": number, **SAMPLED} if sampled and number % sampled == 0 else {"do_sample": False}
                seen[engine.submit(prompt, **how, **options)] = time.perf_counter()
            events = engine.step()
            now, tokens = time.perf_counter(), tokens + len(events)
            for sequence in {event.sequence: None for event in events}:
                (self.between if sequence in started else self.waited).append(1e3 * (now - seen[sequence]))
                seen[sequence] = now
                started.add(sequence)
        self.tokens_per_second = tokens / (time.perf_counter() - began)


def row_of(name: str, count: int, rounds: Sequence[Round]) -> Row:
    speed, spread = median_and_spread([each.tokens_per_second for each in rounds])
    waited, between = ([x for each in rounds for x in getattr(each, part)] for part in ("waited", "between"))
    return Row(name, count, speed, spread, percentiles(waited), percentiles(between))


def percentiles(times: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile. Zeros if there are no times."""
    found = torch.tensor(times or [0.0], dtype=torch.float64).quantile(torch.tensor([0.5, 0.99], dtype=torch.float64))
    return float(found[0]), float(found[1])


# --- Formatting ---------------------------------------------------------------------------------------------

HEADER = ("model", "requests", "tokens/s", "spread", "first token ms (p99)", "between tokens ms (p99)")


def title(report: Report) -> str:
    s = report.settings
    drawn = f", one of {s.sampled} sampled" if s.sampled else ""
    return (
        f"Requests that join one after the other: prompts of {', '.join(map(str, s.prompts))} tokens, "
        f"{s.new_tokens} new ones{drawn}; {place(s)}, median of {counted(s.repeats, 'round')}"
    )


def tables(report: Report) -> list[Table | str]:
    report = with_short_names(report)
    cells = [
        (
            row.model,
            f"{row.requests:,}",
            f"{row.tokens_per_second:,.0f}",
            f"{row.spread:.0%}",
            *(f"{middle:,.1f} ({last:,.1f})" for middle, last in (row.first_token, row.between_tokens)),
        )
        for row in report.rows
    ]
    return [titled_table(title(report), HEADER, cells, sections=False)]
