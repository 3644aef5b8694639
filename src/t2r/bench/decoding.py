"""What one more token costs, and what must be kept for it, after ever longer texts: whole models side by side.

A model decodes in up to two ways. One is its own forward on one token with its own cache, which is what
`model.generate()` runs. The other is a step at fixed addresses that is captured once and replayed: a converted model
has `t2r.Engine`, a softmax model on a GPU the same with transformers' static cache, as long as the text and no longer.

The text before is random tokens, which the model has really read: how long a step takes does not depend on what they
say.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, StaticCache

from t2r.attention.cache import cache_bytes
from t2r.errors import T2RError
from t2r.evaluation.inputs import refuse_seq2seq
from t2r.evaluation.logits import evaluating
from t2r.generation.engine.step import DecodeStep
from t2r.model.modeling import T2RModel
from t2r.surgery.adapters import family_of

if TYPE_CHECKING:
    from rich.table import Table

LENGTHS = (512, 2048, 8192)
READ = 512
"""Tokens of the text before that are read at a time: more would need memory that no step needs."""


@dataclass(frozen=True)
class Settings:
    batch: int
    steps: int
    repeats: int
    dtype: str
    device: str
    threads: int
    """Of torch, on the CPU: two measurements compare only where this is the same."""


@dataclass(frozen=True)
class Point:
    """One model after one length of text."""

    model: str
    length: int
    milliseconds: float
    """Of a step: a token for every sequence of the batch."""
    tokens_per_second: float
    """Of the whole batch."""
    cache_bytes: int
    """Of the whole batch, before the step."""
    spread: float = 0.0
    """Between the slowest and the fastest round, relative to the median."""


@dataclass(frozen=True)
class Report:
    settings: Settings
    points: list[Point]
    """Length by length, and within a length in the order of the models."""
    crossovers: dict[str, float | None]
    """From which length on a model is faster than the first one (see `crossover`), for each model but that."""
    extended: list[str]
    """Models that have fewer positions than were needed, and repeated them: only time and memory are measured there,
    what such a model would write after so long a text means nothing."""

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
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Measure the models, given by what to call them, after each of these lengths. The first is compared with.

    Times are medians over `repeats` rounds of `steps` tokens; the models take turns, so that whatever else the machine
    does falls on all alike.

    Args:
        engine: a second row for each model, decoded by captured steps. A softmax model has one on a GPU only.
        compiled: fuse captured steps by torch.compile.
        window: a row for the first model with a window whose keys and values take as many bytes as the smallest
            state of the others: the same memory, spent on softmax attention.
        progress: called with a line about what is being done.
    """
    lengths = sorted(set(lengths))
    if not models or not lengths:
        raise T2RError("name at least one model and one length to measure")
    for name, number in (("length", lengths[0]), ("batch", batch), ("steps", steps), ("repeats", repeats)):
        if number < 1:
            raise T2RError(f"{name} must be at least 1, got {number}")
    first = next(iter(models.values()))
    for name, model in models.items():
        refuse_seq2seq(model.config, name)
        if (model.dtype, model.device) != (first.dtype, first.device):
            raise T2RError(
                f"{name} is {model.dtype} on {model.device}, and the first model {first.dtype} on {first.device}: "
                "times compare only between models of one dtype on one device"
            )
    tell = progress or (lambda line: None)
    ready = {name: with_positions(model, lengths[-1] + 1 + steps) for name, model in models.items()}
    readers = [Reader(name, model, batch, seed) for name, model in ready.items()]
    if engine:
        readers += [
            (EngineReader if isinstance(reader.model, T2RModel) else CapturedReader)(reader, compiled)
            for reader in list(readers)
            if isinstance(reader.model, T2RModel) or reader.model.device.type == "cuda"
        ]
    points = []
    with evaluating(*ready.values()):
        if window and len(readers) > 1:
            readers += windowed(readers, engine and first.device.type == "cuda", compiled)
        for length in lengths:
            for reader in readers:
                tell(f"{reader.name}: reading {length:,} tokens")
                reader.read_until(length)
            tell(f"one more token after {length:,}")
            rounds = [[reader.milliseconds(steps) for reader in readers] for _ in range(1 + repeats)]
            times = zip(*rounds[1:], strict=True)  # the first also pays for what is set up once
            for reader, own in zip(readers, times, strict=True):
                each = median(own)
                spread = (max(own) - min(own)) / each
                held = reader.held_bytes()
                points.append(Point(reader.name, length, each, 1e3 * batch / each, held, spread))

    def times_of(name: str) -> list[float]:
        return [point.milliseconds for point in points if point.model == name]

    reference, *others = [reader.name for reader in readers]
    return Report(
        Settings(
            batch, steps, repeats, str(first.dtype).removeprefix("torch."), str(first.device), torch.get_num_threads()
        ),
        points,
        {name: crossover(lengths, times_of(reference), times_of(name)) for name in others},
        [name for name, model in models.items() if ready[name] is not model],
    )


class Reader:
    """A model, and its cache of the text that it has read so far. A step is the model's own forward."""

    def __init__(self, name: str, model: Any, batch: int, seed: int, window: int | None = None) -> None:
        self.name, self.model, self.batch, self.seed, self.window = name, model, batch, seed, window
        self.generator = torch.Generator().manual_seed(seed)
        self.cache: Any = None
        self.length = 0

    def tokens(self, count: int) -> Tensor:
        vocabulary = self.model.config.get_text_config().vocab_size
        ids = torch.randint(vocabulary, (self.batch, count), generator=self.generator)
        return ids.to(self.model.device)

    def read_until(self, length: int) -> None:
        """Read on. With a window, what has left it is not there to be read: a step costs what it costs there."""
        length = length if self.window is None else min(length, self.window)
        while self.length < length:
            count = min(READ, length - self.length)
            read = self.model(input_ids=self.tokens(count), past_key_values=self.cache, use_cache=True)
            self.cache = getattr(read, "past_key_values", None)
            if self.cache is None:
                raise T2RError(f"{self.name} has no cache: it reads the whole text again for every token")
            self.length += count

    def held_bytes(self) -> int:
        return cache_bytes(self.cache)

    def milliseconds(self, steps: int) -> float:
        """Of a step, on average over so many. They go to a copy of the cache: its length stays as it is."""
        cache, tokens = copy.deepcopy(self.cache), self.tokens(1 + steps)

        def step(i: int) -> None:
            self.model(input_ids=tokens[:, i : i + 1], past_key_values=cache, use_cache=True)

        return self.timed(step, steps)

    def timed(self, step: Callable[[int], None], steps: int) -> float:
        step(0)  # the first has also brought the copy to where it is used
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
    """A converted model by the captured step of `t2r.Engine`."""

    def __init__(self, other: Reader, compiled: bool = False) -> None:
        super().__init__(f"{other.name}, engine", other.model, other.batch, other.seed)
        self.compiled = compiled
        self.decode: DecodeStep | None = None

    def milliseconds(self, steps: int) -> float:
        size = self.length + 1 + steps if self.model.kept_layers() else None
        if self.decode is None or self.decode.max_length != size:
            self.decode = None  # its memory is free before the next is allocated
            self.decode = DecodeStep(self.model, self.batch, size, compiled=self.compiled)
        for row in range(self.batch):
            self.decode.put(row, self.cache, row, 0, True)
        decode = self.decode
        return self.timed(lambda i: decode.run(), steps)


class CapturedReader(Reader):
    """A softmax model by a captured step on transformers' static cache, which is as long as the text."""

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
        model(input_ids=self.token, past_key_values=self.static, use_cache=True)  # allocates it
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

    def fill(self) -> None:
        """What was read, in the static buffers."""
        for own, read in zip(self.static.layers, self.cache.layers, strict=True):
            own.keys[:, :, : self.length].copy_(read.keys)
            own.values[:, :, : self.length].copy_(read.values)
            own.cumulative_length.fill_(self.length)
        if hasattr(self, "position"):
            self.position.fill_(self.length)


def windowed(readers: Sequence[Reader], captured: bool, compiled: bool) -> list[Reader]:
    """The first model with a window: its keys and values take as many bytes as the smallest state of the others."""
    teacher = readers[0]
    for reader in readers:
        reader.read_until(1)
    states = [reader.held_bytes() for reader in readers if isinstance(reader.model, T2RModel)]
    if not states:
        return []
    size = max(1, min(states) // teacher.held_bytes())
    made = Reader(f"{teacher.name}, window of {size:,}", teacher.model, teacher.batch, teacher.seed, size)
    return [made, *([CapturedReader(made, compiled)] if captured else [])]


def with_positions(model: PreTrainedModel, length: int) -> PreTrainedModel:
    """The model itself, if it has so many positions; otherwise a copy that repeats those that it has learned.

    Such a copy is good for nothing but to be timed."""
    try:
        family = family_of(model)
    except T2RError:  # a family that we do not know: its own forward will say
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
        raise T2RError(f"this {family.model_type} model has {limit} positions, and it is not known where they are kept")
    for table in tables:
        extra = table.num_embeddings - limit
        times = -(-length // limit)
        weight = torch.cat([table.weight.detach()[:extra], table.weight.detach()[extra:].repeat(times, 1)])
        table.weight = nn.Parameter(weight, requires_grad=False)
        table.num_embeddings = len(weight)
    model.config.max_position_embeddings = limit * times
    return model


def crossover(lengths: Sequence[int], reference: Sequence[float], times: Sequence[float]) -> float | None:
    """The length from which on `times` is below `reference`: where the straight lines between measured points meet.

    None: it is not below at the last of them. The first length: it is below everywhere, perhaps before it too."""
    behind = [own - other for own, other in zip(times, reference, strict=True)]
    last = max((i for i, gap in enumerate(behind) if gap >= 0), default=None)
    if last is None:
        return float(lengths[0])
    if last == len(lengths) - 1:
        return None
    share = behind[last] / (behind[last] - behind[last + 1])
    return lengths[last] + share * (lengths[last + 1] - lengths[last])


# --- For people ---------------------------------------------------------------------------------------------

HEADER = ("after", "model", "ms per step", "tokens/s", "cache")


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
        f"One more token: batch {s.batch}, {s.dtype} on {s.device}{threads}, "
        f"median of {s.repeats} times {s.steps} steps"
    )


def cells(report: Report) -> list[tuple[str, ...]]:
    """The rows under `HEADER`; a length stands at its first row only."""
    first = report.points[0].model
    return [
        (
            f"{point.length:,}" if point.model == first else "",
            point.model,
            f"{point.milliseconds:.2f}",
            f"{point.tokens_per_second:,.0f}",
            f"{point.cache_bytes / 2**20:.2f} MiB",
        )
        for point in report.points
    ]


def notes(report: Report) -> list[str]:
    """What the numbers say, a sentence each."""
    lengths = sorted({point.length for point in report.points})
    reference = report.points[0].model
    lines = []
    for name, length in report.crossovers.items():
        if length is None:
            lines.append(f"{name} is not faster than {reference} up to {lengths[-1]:,} tokens.")
        elif length == lengths[0]:
            lines.append(f"{name} is faster than {reference} from {lengths[0]:,} tokens on, if not before.")
        else:
            lines.append(f"{name} is faster than {reference} from about {length:,.0f} tokens on.")
    if report.extended:
        who = f"{', '.join(report.extended)} {'has' if len(report.extended) == 1 else 'have'}"
        lines.append(f"{who} fewer positions than that, and repeated them here: only time and memory are measured.")
    return lines
