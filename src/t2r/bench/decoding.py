"""What one more token costs, and what must be kept for it, after ever longer texts: whole models side by side.

A step is the model's own forward on one token with its own cache: keys and values that grow where attention is softmax,
a state of fixed size where it is recurrent. The text before it is random tokens, which the model has really read: how
long something takes does not depend on what they say.
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
from transformers import PreTrainedModel

from t2r.attention.cache import cache_bytes
from t2r.errors import T2RError
from t2r.evaluation.inputs import refuse_seq2seq
from t2r.evaluation.logits import evaluating
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
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Measure the models, given by what to call them, after each of these lengths. The first is compared with.

    Times are medians over `repeats` rounds of `steps` tokens; the models take turns, so that whatever else the machine
    does falls on all alike. `progress` is called with a line about what is being done."""
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
    points = []
    with evaluating(*ready.values()):
        for length in lengths:
            for reader in readers:
                tell(f"{reader.name}: reading {length:,} tokens")
                reader.read_until(length)
            tell(f"one more token after {length:,}")
            rounds = [[reader.milliseconds(steps) for reader in readers] for _ in range(1 + repeats)]
            times = zip(*rounds[1:], strict=True)  # the first also pays for what is set up once
            for reader, own in zip(readers, times, strict=True):
                each = median(own)
                points.append(Point(reader.name, length, each, 1e3 * batch / each, cache_bytes(reader.cache)))

    def times_of(name: str) -> list[float]:
        return [point.milliseconds for point in points if point.model == name]

    reference, *others = models
    return Report(
        Settings(
            batch, steps, repeats, str(first.dtype).removeprefix("torch."), str(first.device), torch.get_num_threads()
        ),
        points,
        {name: crossover(lengths, times_of(reference), times_of(name)) for name in others},
        [name for name, model in models.items() if ready[name] is not model],
    )


class Reader:
    """A model, and its cache of the text that it has read so far."""

    def __init__(self, name: str, model: Any, batch: int, seed: int) -> None:
        self.name, self.model, self.batch = name, model, batch
        self.generator = torch.Generator().manual_seed(seed)
        self.cache: Any = None
        self.length = 0

    def tokens(self, count: int) -> Tensor:
        vocabulary = self.model.config.get_text_config().vocab_size
        ids = torch.randint(vocabulary, (self.batch, count), generator=self.generator)
        return ids.to(self.model.device)

    def read_until(self, length: int) -> None:
        while self.length < length:
            count = min(READ, length - self.length)
            read = self.model(input_ids=self.tokens(count), past_key_values=self.cache, use_cache=True)
            self.cache = getattr(read, "past_key_values", None)
            if self.cache is None:
                raise T2RError(f"{self.name} has no cache: it reads the whole text again for every token")
            self.length += count

    def milliseconds(self, steps: int) -> float:
        """Of a step, on average over so many. They go to a copy of the cache: its length stays as it is."""
        cache, tokens = copy.deepcopy(self.cache), self.tokens(1 + steps)
        started = 0.0
        for i in range(1 + steps):
            if i == 1:  # the first has also brought the copy to where it is used
                self.wait()
                started = time.perf_counter()
            self.model(input_ids=tokens[:, i : i + 1], past_key_values=cache, use_cache=True)
        self.wait()
        return (time.perf_counter() - started) * 1e3 / steps

    def wait(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)


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
