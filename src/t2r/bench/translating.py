"""Measures translation: tokens per second and size of the cache by length, for several models.

A translation is greedy, and its source and target have the same length. The time includes the encoder. Every model is
decoded by `t2r.Engine`. The layers of a transformer are then softmax layers with a static cache, which is exactly as
long as the translation; a captured step reads all of it. `generate()` reads only the tokens so far.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from t2r.attention.cache import cache_bytes
from t2r.bench.models import check_alike, check_shape, feature_sizes
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
from t2r.evaluation.logits import evaluating
from t2r.generation.engine import Engine
from t2r.generation.engine.request import no_static_cache
from t2r.generation.engine.softmax import on_the_engine
from t2r.hub import synchronize
from t2r.surgery.adapters import family_of

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from rich.table import Table

SHAPE = "paper-mt"
LENGTHS = (8, 32, 128, 512, 2048)
SOFTMAX, ELU, RFA, T2R = "softmax", "ELU 64-64", "RFA 32-4", "T2R 32-4"


def paper_models(shape: str = SHAPE) -> list[str]:
    """Return the models of the paper's figures, with random weights. Their names have the feature sizes of cross and
    causal attention.

    Raises T2RError if the shape is that of a language model."""
    check_shape(shape, translates=True)
    sizes = "recurrent=both,cross_feature_size=32,feature_size=4"
    return [
        f"{SOFTMAX}=random:{shape}",
        f"{ELU}=random:{shape},feature_map=elu,recurrent=both",
        f"{RFA}=random:{shape},feature_map=rfa,{sizes}",
        f"{T2R}=random:{shape},feature_map=t2r,{sizes},merged",
    ]


@dataclass(frozen=True)
class TranslatingSettings:
    batch: int
    repeats: int
    dtype: str
    device: str
    threads: int
    """CPU threads of torch."""


@dataclass(frozen=True)
class Point:
    """The measurements of one model at one length."""

    model: str
    length: int
    seconds: float
    """Median time of the translation of a batch, including its encoder."""
    tokens_per_second: float
    cache_bytes: int
    """States, or keys and values, of the batch at the end, including those of the source."""
    spread: float
    """Difference between the slowest and the fastest repeat, relative to the median."""
    peak_bytes: int | None = None
    """Allocated on the GPU during a translation, including the weights of all models. None on a CPU."""


@dataclass(frozen=True)
class Report:
    settings: TranslatingSettings
    points: list[Point]
    """Ordered by length, then by model."""
    crossovers: dict[str, float | None]
    """The length from which each other model is faster than the first one."""
    smaller: dict[str, float | None]
    """The length from which the cache of each other model is smaller than that of the first one."""
    features: dict[str, list[int] | None]
    """Feature sizes, from the largest; None for models with softmax layers."""

    def of(self, model: str) -> list[Point]:
        return [point for point in self.points if point.model == model]


def run(
    models: Mapping[str, PreTrainedModel],
    lengths: Sequence[int] = LENGTHS,
    *,
    batch: int = 16,
    repeats: int = 3,
    generate: bool = False,
    compiled: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Measure encoder-decoders, given by name, at each length. The first model is the reference.

    Args:
        generate: also measure `generate()` of each model.
        compiled: compile captured steps with torch.compile.
        progress: called with a line for each step of the benchmark.
    """
    lengths = sorted(set(lengths))
    if not models or not lengths:
        raise T2RError("give at least one model and one length")
    for name, number in (("length", lengths[0] - 1), ("batch", batch), ("repeats", repeats)):
        if number < 1:
            raise T2RError(f"{name} must be at least {2 if name == 'length' else 1}")
    for name, model in models.items():
        if not model.config.is_encoder_decoder:
            raise T2RError(f"{name} is not an encoder-decoder: use t2r bench decode")
        for limit in (family_of(model).max_positions(model), getattr(model.config, "max_position_embeddings", None)):
            if limit is not None and lengths[-1] + 1 > limit:
                raise T2RError(f"{name} has {limit} positions, fewer than {lengths[-1] + 1}: give smaller lengths")
    check_alike(models)
    tell = progress or (lambda line: None)
    first = next(iter(models.values()))
    ways: dict[str, Translator] = {}
    for name, model in models.items():
        if (reason := no_static_cache(on_the_engine(model))) is None:
            ways[name] = EngineTranslator(model, batch, compiled)
        else:
            logger.warning("%s is measured with generate(), not with the engine: %s", name, reason)
        if generate or reason is not None:
            ways[f"{name}, generate()"] = Translator(model, batch)
    points = []
    with evaluating(*(way.model for way in ways.values())):
        for length in lengths:
            tell(f"translating {length:,} tokens")
            times: dict[str, list[float]] = {name: [] for name in ways}
            held, peaks = {}, {}
            for round_ in range(1 + repeats):  # the first round captures the steps
                for name, way in ways.items():
                    seconds, held[name], peaks[name] = way.translate(length)
                    if round_:
                        times[name].append(seconds)
            for name, own in times.items():
                each, spread = median_and_spread(own)
                points.append(Point(name, length, each, batch * length / each, held[name], spread, peaks[name]))
            for way in ways.values():
                way.forget()
    report = Report(
        TranslatingSettings(
            batch, repeats, str(first.dtype).removeprefix("torch."), str(first.device), torch.get_num_threads()
        ),
        points,
        {},
        {},
        {name: feature_sizes(model) for name, model in models.items()},
    )
    reference, *others = ways
    for name in others:
        base, other = report.of(reference), report.of(name)
        report.crossovers[name], report.smaller[name] = crossovers(base, other, "seconds", "cache_bytes")
    return report


class Translator:
    """A model and how it translates a batch: with its own `generate()`."""

    def __init__(self, model: Any, batch: int) -> None:
        self.model, self.batch = model, batch
        self.words = model.get_input_embeddings().weight.shape[0]

    def source(self, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(3, self.words, (self.batch, length), generator=generator)
        return ids.to(self.model.device)

    def translate(self, length: int) -> tuple[float, int, int | None]:
        """Return the seconds of a translation, the bytes of its cache, and the peak of memory on a GPU."""
        ids, device = self.source(length), self.model.device
        how: dict[str, Any] = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": length,
            "do_sample": False,
            "num_beams": 1,
            "eos_token_id": None,  # translations have a given length
            "forced_eos_token_id": None,
            "use_cache": True,
        }
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        held = self.run(ids, how, length)
        synchronize(device)
        seconds = time.perf_counter() - started
        return seconds, held, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None

    def run(self, ids: Tensor, how: dict[str, Any], length: int) -> int:
        out = self.model.generate(ids, return_dict_in_generate=True, **how)
        assert out.sequences.shape[1] == 1 + length
        return cache_bytes(out.past_key_values)

    def forget(self) -> None:
        """Free what was allocated for this length."""


class EngineTranslator(Translator):
    def __init__(self, model: Any, batch: int, compiled: bool) -> None:
        super().__init__(on_the_engine(model), batch)
        self.compiled = compiled
        self.engine: Engine | None = None

    def run(self, ids: Tensor, how: dict[str, Any], length: int) -> int:
        if self.engine is None:
            self.engine = Engine(self.model, compiled=self.compiled)
            self.engine.rows.block = 1  # buffers of softmax layers are exactly as long as the translation
        done = self.engine._attempt(ids, **how)
        assert done.result().shape[1] == 1 + length
        return self.engine._state_bytes(done)

    def forget(self) -> None:
        self.engine = None


# --- Formatting ---------------------------------------------------------------------------------------------

HEADER = ("length", "model", "tokens/s", "spread", "cache")


def title(report: Report) -> str:
    s = report.settings
    how = f"greedy, batch {s.batch}, source and target of equal length"
    return f"Translation: {how}, {place(s)}, median of {s.repeats}"


def cells(report: Report) -> list[tuple[str, ...]]:
    """Return the rows under `HEADER`."""
    return [
        (
            length,
            point.model,
            f"{point.tokens_per_second:,.0f}",
            f"{point.spread:.0%}",
            mebibytes(point.cache_bytes),
        )
        for length, point in zip(shown_lengths(report.points), report.points, strict=True)
    ]


def tables(report: Report) -> list[Table | str]:
    report = with_short_names(report)
    return [titled_table(title(report), HEADER, cells(report)), *notes(report)]


def notes(report: Report) -> list[str]:
    """Return conclusions from the measurements, one sentence each, and the paper's claims as measured here."""
    lengths = sorted({point.length for point in report.points})
    reference = report.points[0].model
    lines = []
    for name in (name for name in report.crossovers if name in report.features):
        lines.append(from_length(name, reference, "faster", report.crossovers[name], lengths))
        lines.append(from_length(name, reference, "smaller", report.smaller[name], lengths))
    for name in (name for name in report.crossovers if report.features.get(name)):
        own = report.of(name)
        if len(own) > 1 and own[0].cache_bytes == own[-1].cache_bytes:
            change = own[-1].tokens_per_second / own[0].tokens_per_second
            lines.append(
                f"{name}: constant memory; at {own[-1].length:,} tokens {change:.2f} times the tokens/s of "
                f"{own[0].length:,}."
            )
    return lines + claims(report)


def claims(report: Report) -> list[str]:
    """Compare the models of the paper at the greatest length. The paper claims that T2R is at least 15 % faster than
    ELU and RFA, with 70 % less memory for attention than ELU."""
    last = {point.model: point for point in report.points if point.length == report.points[-1].length}
    own = last.get(T2R)
    if own is None:
        return []
    lines = []
    for name in (SOFTMAX, ELU, RFA):
        if name in last:
            faster = own.tokens_per_second / last[name].tokens_per_second - 1
            less = 1 - own.cache_bytes / last[name].cache_bytes
            holds = ""
            if name != SOFTMAX:
                holds = "; the paper's 15 % holds here" if faster >= 0.15 else "; the paper's 15 % does not hold here"
            lines.append(
                f"{T2R} against {name} at {own.length:,} tokens: {faster:+.0%} tokens/s{holds}; {less:.0%} less memory."
            )
    return lines
