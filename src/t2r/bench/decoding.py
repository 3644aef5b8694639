"""Measures time and memory per generated token by context length, for several models.

A model decodes in up to three ways: with its own forward on one token and its own cache, as `model.generate()` does;
with `t2r.Engine`, for a softmax model over a static cache that is only as long as the context; and, for a softmax model
on a GPU, with a captured step over transformers' static cache. `t2r.bench.readers` implements them. The engine is
compared with the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from t2r.bench.analytic import step_cost
from t2r.bench.clock import bandwidth
from t2r.bench.models import check_alike, feature_sizes, with_positions
from t2r.bench.readers import Reader, captured, windowed
from t2r.bench.summary import (
    crossovers,
    from_length,
    mebibytes,
    median_and_spread,
    place,
    shown_lengths,
    titled_table,
    with_short_names,
)
from t2r.errors import T2RError
from t2r.evaluation.inputs import refuse_seq2seq
from t2r.evaluation.logits import evaluating
from t2r.words import counted

if TYPE_CHECKING:
    from rich.table import Table

LENGTHS = (512, 2048, 8192)


@dataclass(frozen=True)
class DecodingSettings:
    batch: int
    steps: int
    repeats: int
    dtype: str
    device: str
    threads: int
    """CPU threads of torch. Only measurements with the same number can be compared."""


@dataclass(frozen=True)
class Point:
    """The measurements of one model at one context length."""

    model: str
    length: int
    milliseconds: float
    """Time of a step: one token for every sequence of the batch."""
    tokens_per_second: float
    """Tokens of the whole batch."""
    cache_bytes: int
    """Bytes for the whole batch, before the step."""
    spread: float = 0.0
    """Difference between the slowest and the fastest round, relative to the median."""
    operations: int | None = None
    """Operations of a step for the whole batch, computed from the sizes of the model (see `t2r.bench.analytic`)."""
    bytes_moved: int | None = None
    """Bytes that a step must read and write, likewise."""
    bound: float | None = None
    """Milliseconds that this takes at the measured bandwidth of the memory: a step cannot be faster."""
    launches: int | None = None
    """Kernels, or on a CPU operations, that a step of the engine launches."""


@dataclass(frozen=True)
class Report:
    settings: DecodingSettings
    points: list[Point]
    """Ordered by length, then by model."""
    crossovers: dict[str, float | None]
    """The length from which each other model is faster than its reference (see `crossover`): the first model, decoded
    in the same way if that was measured."""
    extended: list[str]
    """Models with fewer positions than required, whose position embeddings were repeated. Their times and memory are
    valid, but their output would not be meaningful."""
    references: dict[str, str] = field(default_factory=dict)
    """The reference of each other model."""
    smaller: dict[str, float | None] = field(default_factory=dict)
    """The length from which the cache of each other model is smaller than that of its reference."""
    without_engine: dict[str, str] = field(default_factory=dict)
    """Models that the engine does not support, with the reason."""
    out_of_memory: dict[str, int] = field(default_factory=dict)
    """Models that did not fit into memory, with the length."""
    bandwidth: float | None = None
    """Bytes per second of a copy in memory, as measured."""
    features: dict[str, list[int] | None] = field(default_factory=dict)
    """Feature sizes, from the largest; None for models with softmax layers."""

    def of(self, model: str) -> list[Point]:
        return [point for point in self.points if point.model == model]


def run(
    models: Mapping[str, PreTrainedModel],
    lengths: Sequence[int] = LENGTHS,
    *,
    batch: int = 1,
    steps: int = 16,
    repeats: int = 5,
    engine: bool = False,
    compiled: bool = False,
    window: bool = False,
    own: bool = True,
    state_dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Measure models, given by name, at each context length. The first model is the reference.

    Times are medians over `repeats` rounds of `steps` tokens. The models are measured in turn, so that other load on
    the machine affects all of them.

    Args:
        engine: also measure each model in the engine and, on a GPU, captured steps of softmax models.
        compiled: compile captured steps with torch.compile.
        window: also measure the first model with an attention window whose keys and values take as many bytes as the
            smallest state of the others.
        own: measure the forward of each model itself. If false, only the engine is measured, and the context is not
            read, which needs less memory and time: a step takes the same time for any values in the cache.
        state_dtype: the dtype in which the engine stores states, if not float32.
        progress: called with a line for each step of the benchmark.
    """
    lengths = sorted(set(lengths))
    if not models or not lengths:
        raise T2RError("give at least one model and one length")
    for name, number in (("length", lengths[0]), ("batch", batch), ("steps", steps), ("repeats", repeats)):
        if number < 1:
            raise T2RError(f"{name} must be at least 1, got {number}")
    for name, model in models.items():
        refuse_seq2seq(model.config, name)
    check_alike(models)
    first = next(iter(models.values()))
    tell = progress or (lambda line: None)
    ready = {name: with_positions(model, lengths[-1] + 1 + steps) for name, model in models.items()}
    if not own and not engine:
        raise T2RError("nothing would be measured: neither the models' own forward nor the engine")
    plain = [Reader(name, model, batch, seed) for name, model in ready.items()]
    without: dict[str, str] = {}
    full: dict[str, int] = {}
    points: list[Point] = []
    with evaluating(*ready.values()):
        narrow = windowed(plain, state_dtype) if window else None
        readers = (plain if own else []) + (captured(plain, compiled, without, own, state_dtype) if engine else [])
        if narrow is not None:
            readers += ([narrow] if own else []) + (
                captured([narrow], compiled, {}, own, state_dtype) if engine else []
            )
        if not readers:
            raise T2RError(f"the engine does not support {', '.join(without)}: {next(iter(without.values()))}")
        names, speed = [reader.name for reader in readers], bandwidth(first.device)
        for length in lengths:
            times: dict[str, list[float]] = {reader.name: [] for reader in readers}
            for round_ in range(1 + repeats):  # the first round is a warm-up
                tell(f"decoding after {length:,} tokens, round {round_}")
                for reader in list(readers):
                    try:
                        reader.read_until(length)
                        times[reader.name].append(reader.milliseconds(steps))
                    except torch.OutOfMemoryError:
                        full[reader.name] = length
                        readers.remove(reader)
                        reader.free()
            points += [point_of(reader, length, times[reader.name][1:], speed) for reader in readers]
            if not points:
                raise T2RError(f"no model fits into memory at {length:,} tokens: use a smaller batch or fewer tokens")
    report = Report(
        DecodingSettings(
            batch, steps, repeats, str(first.dtype).removeprefix("torch."), str(first.device), torch.get_num_threads()
        ),
        points,
        {},
        [name for name, model in models.items() if ready[name] is not model],
        without_engine=without,
        out_of_memory=full,
        bandwidth=speed,
        features={reader.name: feature_sizes(reader.model) for reader in readers},
    )
    compare(report, [name for name in names if report.of(name)])
    return report


def point_of(reader: Reader, length: int, times: Sequence[float], speed: float) -> Point:
    """Return the measurements of a reader from the times of all rounds, and what its sizes imply at this bandwidth."""
    each, spread = median_and_spread(times)
    try:
        cost = step_cost(reader.model, reader.length, state_dtype=reader.state_dtype)
    except T2RError:  # an unknown family
        cost = None
    limits: dict[str, Any] = {}
    if cost is not None:
        moved = cost.moved(reader.batch)
        limits = {"operations": cost.operations * reader.batch, "bytes_moved": moved, "bound": 1e3 * moved / speed}
    tokens, held = 1e3 * reader.batch / each, reader.held_bytes()
    return Point(reader.name, length, each, tokens, held, spread, **limits, launches=reader.launches())


def compare(report: Report, names: Sequence[str]) -> None:
    """Add from which length on each model is faster and smaller than its reference."""
    first, *others = names
    for name in others:
        like = f"{first}, engine"
        reference = like if name.endswith(", engine") and name != like and like in names else first
        base, own = report.of(reference), report.of(name)
        if {point.length for point in base} & {point.length for point in own}:
            report.references[name] = reference
            report.crossovers[name], report.smaller[name] = crossovers(base, own, "milliseconds", "cache_bytes")


# --- Formatting ---------------------------------------------------------------------------------------------

HEADER = ("context", "model", "ms per step", "spread", "bound", "tokens/s", "cache")


def tables(report: Report) -> list[Table | str]:
    report = with_short_names(report)
    return [titled_table(title(report), HEADER, cells(report)), *notes(report)]


def title(report: Report) -> str:
    s = report.settings
    return (
        f"Decoding: batch {s.batch}, {place(s)}, median of {counted(s.repeats, 'round')} of {counted(s.steps, 'step')}"
    )


def cells(report: Report) -> list[tuple[str, ...]]:
    """Return the rows under `HEADER`."""
    return [
        (
            length,
            point.model,
            f"{point.milliseconds:.2f}",
            f"{point.spread:.0%}",
            "" if point.bound is None else f"{point.bound:.2f}",
            f"{point.tokens_per_second:,.0f}",
            mebibytes(point.cache_bytes),
        )
        for length, point in zip(shown_lengths(report.points), report.points, strict=True)
    ]


def notes(report: Report) -> list[str]:
    """Return conclusions from the measurements, one sentence each."""
    reference = report.points[0].model
    lines = []
    for name, length in report.crossovers.items():
        against = report.references.get(name, reference)
        lengths = sorted({point.length for point in report.of(against)} & {point.length for point in report.of(name)})
        lines.append(from_length(name, against, "faster", length, lengths))
        if name in report.smaller and name.removesuffix(", engine") != against:
            lines.append(from_length(name, against, "smaller", report.smaller[name], lengths))
    for name, count in {point.model: point.launches for point in report.points if point.launches}.items():
        kind = "operations" if report.settings.device == "cpu" else "kernels"
        lines.append(f"A step of {name} has {count:,} {kind}.")
    for name, length in report.out_of_memory.items():
        lines.append(f"{name} does not fit into memory at {length:,} tokens.")
    for name, reason in report.without_engine.items():
        lines.append(f"{name} is not measured in the engine: {reason}.")
    if report.extended:
        who = f"{', '.join(report.extended)} {'has' if len(report.extended) == 1 else 'have'}"
        lines.append(f"{who} fewer positions than required. They were repeated: only time and memory are measured.")
    return lines
