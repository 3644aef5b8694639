"""Measures time and memory per generated token by context length, for several models.

A model decodes in up to three ways: with its own forward on one token and its own cache, as `model.generate()` does;
with `t2r.Engine`, for a softmax model over a static cache that is only as long as the context; and, for a softmax model
on a GPU, with a captured step over transformers' static cache. The engine is compared with the engine.

The context is random tokens, which are read by the model: the time of a step does not depend on their values.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, StaticCache

from t2r.attention.cache import cache_bytes
from t2r.bench.analytic import bandwidth, step_cost
from t2r.bench.models import check_alike, feature_sizes, on_the_engine
from t2r.bench.summary import crossover, from_length
from t2r.errors import T2RError
from t2r.evaluation.inputs import refuse_seq2seq
from t2r.evaluation.logits import evaluating
from t2r.generation.engine.engine import no_static_cache
from t2r.generation.engine.step import DecodeStep
from t2r.model.modeling import T2RModel
from t2r.ops.constants import constant_weights
from t2r.surgery.adapters import family_of

if TYPE_CHECKING:
    from rich.table import Table

LENGTHS = (512, 2048, 8192)
READ = 512
"""Tokens of the context that are read at a time, so that reading needs little memory."""


@dataclass(frozen=True)
class Settings:
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


@dataclass(frozen=True)
class Report:
    settings: Settings
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
        narrow = windowed(plain) if window else None
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
            points += [reader.point(length, times[reader.name][1:], speed) for reader in readers]
    report = Report(
        Settings(
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


def compare(report: Report, names: Sequence[str]) -> None:
    """Add from which length on each model is faster and smaller than its reference."""
    first, *others = names
    for name in others:
        like = f"{first}, engine"
        reference = like if name.endswith(", engine") and name != like and like in names else first
        pairs = [(a, b) for a in report.of(reference) for b in report.of(name) if a.length == b.length]
        if not pairs:
            continue
        base, own = (list(side) for side in zip(*pairs, strict=True))
        lengths = [point.length for point in own]
        report.references[name] = reference
        report.crossovers[name] = crossover(lengths, [p.milliseconds for p in base], [p.milliseconds for p in own])
        report.smaller[name] = crossover(lengths, [p.cache_bytes for p in base], [p.cache_bytes for p in own])


class Reader:
    """A model and its cache of the context so far. A step is the model's own forward."""

    def __init__(self, name: str, model: Any, batch: int, seed: int, window: int | None = None) -> None:
        self.name, self.model, self.batch, self.seed, self.window = name, model, batch, seed, window
        self.generator = torch.Generator().manual_seed(seed)
        self.cache: Any = None
        self.constants: dict[Any, Any] = {}
        """Values that depend only on the weights. `generate` computes them once per call."""
        self.length = 0

    def tokens(self, count: int) -> Tensor:
        vocabulary = self.model.config.get_text_config().vocab_size
        ids = torch.randint(vocabulary, (self.batch, count), generator=self.generator)
        return ids.to(self.model.device)

    def read_until(self, length: int) -> None:
        """Read random tokens up to this length. With a window, at most the window is read: a step costs the same."""
        length = length if self.window is None else min(length, self.window)
        while self.length < length:
            count = min(READ, length - self.length)
            read = self.model(input_ids=self.tokens(count), past_key_values=self.cache, use_cache=True)
            self.cache = getattr(read, "past_key_values", None)
            if self.cache is None:
                raise T2RError(f"{self.name} has no cache, so its decoding cannot be measured")
            self.length += count

    def held_bytes(self) -> int:
        return cache_bytes(self.cache)

    def free(self) -> None:
        """Free the memory of the cache. The reader cannot be used after this."""
        self.cache = None
        self.constants.clear()
        gc.collect()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def point(self, length: int, times: Sequence[float], speed: float) -> Point:
        """Return the measurements from the times of all rounds."""
        each = median(times)
        spread = (max(times) - min(times)) / each
        try:
            cost = step_cost(self.model, self.length)
        except T2RError:  # an unknown family
            cost = None
        limits: tuple[Any, ...] = (None, None, None)
        if cost is not None:
            moved = cost.moved(self.batch)
            limits = (cost.operations * self.batch, moved, 1e3 * moved / speed)
        return Point(self.name, length, each, 1e3 * self.batch / each, self.held_bytes(), spread, *limits)

    def milliseconds(self, steps: int) -> float:
        """Return the mean time of a step over `steps` steps, which use a copy of the cache."""
        cache, tokens = copy.deepcopy(self.cache), self.tokens(1 + steps)

        def step(i: int) -> None:
            self.model(input_ids=tokens[:, i : i + 1], past_key_values=cache, use_cache=True)

        with constant_weights(self.constants):
            return self.timed(step, steps)

    def timed(self, step: Callable[[int], None], steps: int) -> float:
        step(0)  # warm-up: the copy of the cache is loaded
        self.wait()
        started = time.perf_counter()
        for i in range(1, 1 + steps):
            step(i)
        self.wait()
        return (time.perf_counter() - started) * 1e3 / steps

    def wait(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)


class EngineReader(Reader):
    """A model decoded with the captured step of `t2r.Engine`. The layers of a softmax model are softmax layers there.

    Unless it `reads`, its cache stays empty and only the number of tokens in it is set.
    Raises T2RError if the engine does not support the model."""

    def __init__(
        self, other: Reader, compiled: bool = False, reads: bool = True, state_dtype: torch.dtype | None = None
    ) -> None:
        model = on_the_engine(other.model)
        super().__init__(f"{other.name}, engine", model, other.batch, other.seed, other.window)
        if (reason := no_static_cache(model)) is not None:
            raise T2RError(reason)
        self.compiled, self.reads, self.state_dtype = compiled, reads, state_dtype
        self.decode: DecodeStep | None = None

    def read_until(self, length: int) -> None:
        if self.reads:
            super().read_until(length)
        else:
            self.length = length if self.window is None else min(length, self.window)

    def held_bytes(self) -> int:
        return super().held_bytes() if self.decode is None else self.batch * self.decode.row_bytes(self.length)

    def free(self) -> None:
        self.decode = None
        super().free()

    def milliseconds(self, steps: int) -> float:
        size = self.length + 1 + steps if self.model.kept_layers() else None
        if self.decode is None or self.decode.max_length != size:
            self.decode = None  # frees its memory before the next is allocated
            how: dict[str, Any] = {"compiled": self.compiled, "state_dtype": self.state_dtype}
            self.decode = DecodeStep(self.model, self.batch, size, **how)
        decode = self.decode
        for row in range(self.batch if self.reads else 0):
            decode.put(row, self.cache, row, 0, True)
        decode.own.lengths.fill_(self.length)
        decode.active.fill_(1)
        decode.greedy.fill_(True)
        return self.timed(lambda i: decode.run(), steps)


class CapturedReader(Reader):
    """A softmax model, decoded with a captured step on transformers' static cache, as long as the context."""

    def __init__(self, other: Reader, compiled: bool = False) -> None:
        super().__init__(f"{other.name}, captured", other.model, other.batch, other.seed, other.window)
        self.compiled = compiled
        self.graph: Any = None
        self.size = 0

    def milliseconds(self, steps: int) -> float:
        size = self.length + 2 + steps
        if self.graph is None or self.size != size:
            self.size, self.graph = size, None
            self.capture(size)
        self.fill()
        return self.timed(lambda i: self.graph.replay(), steps)

    def capture(self, size: int) -> None:
        model = self.model
        self.static: Any = StaticCache(config=model.config, max_cache_len=size)
        self.token = self.tokens(1)
        model(input_ids=self.token, past_key_values=self.static, use_cache=True)  # allocates the cache
        self.fill()
        self.position = torch.full_like(self.token, self.length)
        column = torch.arange(size, device=model.device)

        def forward() -> None:
            seen = (column <= self.position[:, :1])[:, None, None, :]
            out = model(
                input_ids=self.token,
                position_ids=self.position,
                attention_mask=seen,
                past_key_values=self.static,
                use_cache=True,
            )
            self.token.copy_(out.logits[:, -1:].argmax(-1))
            self.position.add_(1)

        run = torch.compile(forward, dynamic=False) if self.compiled else forward
        stream = torch.cuda.Stream(model.device)
        stream.wait_stream(torch.cuda.current_stream(model.device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(model.device).wait_stream(stream)
        self.fill()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            run()

    def free(self) -> None:
        self.graph = self.static = None
        super().free()

    def fill(self) -> None:
        """Copy the cache into the static buffers."""
        for own, read in zip(self.static.layers, self.cache.layers, strict=True):
            own.keys[:, :, : self.length].copy_(read.keys)
            own.values[:, :, : self.length].copy_(read.values)
            own.cumulative_length.fill_(self.length)
        if hasattr(self, "position"):
            self.position.fill_(self.length)


def captured(
    readers: Sequence[Reader],
    compiled: bool,
    without: dict[str, str],
    reads: bool,
    state_dtype: torch.dtype | None = None,
) -> list[Reader]:
    """Return the readers in the engine and, for softmax models on a GPU that read the context, with captured steps.

    `without` receives the models that the engine does not support."""
    found: list[Reader] = []
    for reader in readers:
        try:
            found.append(EngineReader(reader, compiled, reads, state_dtype))
        except T2RError as reason:
            without[reader.name] = str(reason)
        if reads and not isinstance(reader.model, T2RModel) and reader.model.device.type == "cuda":
            found.append(CapturedReader(reader, compiled))
    return found


def windowed(readers: Sequence[Reader]) -> Reader | None:
    """Return a reader of the first model with a window, of as many bytes as the smallest state of the others.

    None: the first model is converted itself, or no other one is."""
    teacher = readers[0]
    states = []
    for reader in readers:
        reader.read_until(1)
        states += [reader.held_bytes()] if isinstance(reader.model, T2RModel) else []
    if not states or isinstance(teacher.model, T2RModel):
        return None
    size = max(1, min(states) // teacher.held_bytes())
    return Reader(f"{teacher.name}, window of {size:,}", teacher.model, teacher.batch, teacher.seed, size)


def with_positions(model: PreTrainedModel, length: int) -> PreTrainedModel:
    """Return the model if it has this many positions, otherwise a copy with its position embeddings repeated.

    The copy is only for timing: its output is not meaningful."""
    try:
        family = family_of(model)
    except T2RError:  # an unknown family: its forward raises if there are too few positions
        return model
    limit = family.max_positions(model)
    if limit is None or limit >= length:
        family.extend_positions(model, length)
        return model
    model = copy.deepcopy(model)
    words = model.get_input_embeddings()
    tables = [m for m in model.base_model.modules() if isinstance(m, nn.Embedding) and m is not words]
    # Some families keep rows for padding before those of the positions.
    tables = [table for table in tables if 0 <= table.num_embeddings - limit <= 2]
    if not tables:
        raise T2RError(f"this {family.model_type} model has {limit} positions, and their embeddings were not found")
    for table in tables:
        extra = table.num_embeddings - limit
        times = -(-length // limit)
        weight = torch.cat([table.weight.detach()[:extra], table.weight.detach()[extra:].repeat(times, 1)])
        table.weight = nn.Parameter(weight, requires_grad=False)
        table.num_embeddings = len(weight)
    model.config.max_position_embeddings = limit * times
    return model


# --- Formatting ---------------------------------------------------------------------------------------------

HEADER = ("context", "model", "ms per step", "spread", "bound", "tokens/s", "cache")


def tables(report: Report) -> list[Table | str]:
    from rich.table import Table

    table = Table(title=title(report))
    for heading in HEADER:
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for row, following in zip(rows := cells(report), [*rows[1:], None], strict=True):
        table.add_row(*row, end_section=following is not None and following[0] != "")
    return [table, *notes(report)]


def title(report: Report) -> str:
    s = report.settings
    threads = f" ({s.threads} threads)" if s.device == "cpu" else ""
    return (
        f"Decoding: batch {s.batch}, {s.dtype} on {s.device}{threads}, median of {s.repeats} rounds of {s.steps} steps"
    )


def cells(report: Report) -> list[tuple[str, ...]]:
    """Return the rows under `HEADER`. A length is shown in its first row only."""
    first = report.points[0].model
    return [
        (
            f"{point.length:,}" if point.model == first else "",
            point.model,
            f"{point.milliseconds:.2f}",
            f"{point.spread:.0%}",
            "" if point.bound is None else f"{point.bound:.2f}",
            f"{point.tokens_per_second:,.0f}",
            f"{point.cache_bytes / 2**20:.2f} MiB",
        )
        for point in report.points
    ]


def notes(report: Report) -> list[str]:
    """Return conclusions from the measurements, one sentence each."""
    lengths = sorted({point.length for point in report.points})
    reference = report.points[0].model
    lines = []
    for name, length in report.crossovers.items():
        against = report.references.get(name, reference)
        lines.append(from_length(name, against, "faster", length, lengths))
        if name in report.smaller and name.removesuffix(", engine") != against:
            lines.append(from_length(name, against, "smaller", report.smaller[name], lengths))
    for name, length in report.out_of_memory.items():
        lines.append(f"{name} does not fit into memory at {length:,} tokens.")
    for name, reason in report.without_engine.items():
        lines.append(f"{name} is not measured in the engine: {reason}.")
    if report.extended:
        who = f"{', '.join(report.extended)} {'has' if len(report.extended) == 1 else 'have'}"
        lines.append(f"{who} fewer positions than required. They were repeated: only time and memory are measured.")
    return lines
