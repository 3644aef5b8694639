"""Linear attention against softmax attention: how long each takes, and what a training step needs in memory.

Softmax attention here is torch's own causal scaled_dot_product_attention, on heads of the same size as the
values of ours. It is quadratic in the length and ours is linear, so the ratio must fall as the length grows.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from t2r import ops
from t2r.errors import T2RError
from t2r.hub import choose_device

if TYPE_CHECKING:
    from rich.table import Table

LENGTHS = (512, 2048, 8192)
GROWTH = (8192, 32768)
"""Four times the length should take about four times as long."""
GROWTH_BOUND = 4.6
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Settings:
    batch: int
    heads: int
    feature_size: int
    head_dim: int
    dtype: str
    device: str
    backend: str
    repeats: int
    threads: int
    """Of torch, on the CPU: two measurements compare only where this is the same."""


@dataclass(frozen=True)
class Row:
    """What one length takes: milliseconds, and the peak memory of forward and backward."""

    length: int
    softmax_forward: float
    linear_forward: float
    linear_training: float
    memory_multiple: float
    """Peak bytes beyond q, k, v and the gradient of out, held before, over the bytes of q, k, v and out."""


@dataclass(frozen=True)
class Report:
    settings: Settings
    rows: list[Row]
    growth: float
    """Time of forward and backward at the longer length of GROWTH over that at the shorter."""


def run(
    lengths: Sequence[int] = LENGTHS,
    *,
    batch: int = 1,
    heads: int = 8,
    feature_size: int = 32,
    head_dim: int = 128,
    dtype: str = "float32",
    device: str = "cpu",
    backend: str = "chunked",
    repeats: int = 5,
) -> Report:
    """Measure on this machine; times are medians over interleaved repeats."""
    for name, number in (("length", min(lengths)), ("batch", batch), ("heads", heads), ("repeats", repeats)):
        if number < 1:
            raise T2RError(f"{name} must be at least 1, got {number}")
    if feature_size < 1 or head_dim < 1:
        raise T2RError(f"feature size and head dim must be at least 1, got {feature_size} and {head_dim}")
    if dtype not in DTYPES:
        raise T2RError(f"no dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    threads = torch.get_num_threads()
    settings = Settings(batch, heads, feature_size, head_dim, dtype, device, backend, repeats, threads)
    return Report(settings, [_row(length, settings) for length in lengths], _growth(settings))


def _row(length: int, settings: Settings) -> Row:
    q, k, v, grad = _inputs(length, settings)
    queries, keys = torch.randn_like(v), torch.randn_like(v)

    @torch.no_grad()
    def softmax_forward() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(queries, keys, v, is_causal=True)

    @torch.no_grad()
    def linear_forward() -> Tensor:
        return ops.linear_attention(q, k, v, backend=settings.backend)[0]

    def linear_training() -> tuple[Tensor, ...]:
        return _train(q, k, v, grad, settings)

    softmax, linear, training = _medians([softmax_forward, linear_forward, linear_training], settings)
    own = sum(t.nbytes for t in (q, k, v, grad))  # the gradient of out is as large as out
    return Row(length, softmax, linear, training, _peak_bytes(linear_training, v.device) / own)


def _growth(settings: Settings) -> float:
    def training(length: int) -> Callable[[], object]:
        inputs = _inputs(length, settings)
        return lambda: _train(*inputs, settings)

    short, long = _medians([training(length) for length in GROWTH], settings)
    return long / short


def _inputs(length: int, settings: Settings) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and v, and a gradient for the output. Features are positive, as feature maps make them."""
    device = choose_device(settings.device)
    generator = torch.Generator(device).manual_seed(0)
    shape = (settings.batch, settings.heads, length)
    dtype = DTYPES[settings.dtype]

    def random(size: int) -> Tensor:
        return torch.rand(*shape, size, generator=generator, device=device, dtype=dtype)

    q, k = random(settings.feature_size), random(settings.feature_size)
    v, grad = random(settings.head_dim), random(settings.head_dim)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad


def _train(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, settings: Settings) -> tuple[Tensor, ...]:
    out, _ = ops.linear_attention(q, k, v, backend=settings.backend)
    return torch.autograd.grad(out, (q, k, v), grad)


def _medians(functions: Sequence[Callable[[], object]], settings: Settings) -> list[float]:
    """Median milliseconds of each. Taking turns lets whatever else the machine does fall on all alike."""
    cuda = settings.device.startswith("cuda")

    def milliseconds(function: Callable[[], object]) -> float:
        start = time.perf_counter()
        function()
        if cuda:
            torch.cuda.synchronize(settings.device)
        return (time.perf_counter() - start) * 1e3

    for function in functions:
        milliseconds(function)  # a first call also pays for what is set up once
    rounds = [[milliseconds(function) for function in functions] for _ in range(settings.repeats)]
    return [median(times) for times in zip(*rounds, strict=True)]


def _peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """The most memory that the function held at one time, over what was held before it.

    On the CPU we add up every allocation and release that torch's allocator reports to the profiler. Unlike
    the resident size of the process, this has no noise from pages that malloc keeps or libraries touch; and
    unlike a dispatch mode, it also sees the temporaries inside an operator.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before

    cpu = [torch.profiler.ProfilerActivity.CPU]
    with _silent_stderr(), torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        function()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """The profiler announces itself on the process's own stderr, below Python, and has no switch for it."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def tables(report: Report) -> "list[Table | str]":
    """The report for people."""
    from rich.table import Table

    s = report.settings
    table = Table(
        title=f"batch {s.batch}, heads {s.heads}, feature size {s.feature_size}, head dim {s.head_dim}, "
        f"{s.dtype} on {s.device} ({s.threads} threads), median of {s.repeats}"
    )
    headings = ("length", "softmax forward", f"{s.backend} forward", "softmax / ours", "training", "memory")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in report.rows:
        table.add_row(
            str(row.length),
            f"{row.softmax_forward:.2f} ms",
            f"{row.linear_forward:.2f} ms",
            f"{row.softmax_forward / row.linear_forward:.2f}×",
            f"{row.linear_training:.2f} ms",
            f"{row.memory_multiple:.2f}×",
        )
    return [
        table,
        "Training is ours, forward and backward; memory is its peak, over the bytes of q, k, v and out.",
        f"Training at {GROWTH[1]} over training at {GROWTH[0]}: {report.growth:.2f}× the time "
        f"(linear is {GROWTH[1] / GROWTH[0]:.0f}, our bound {GROWTH_BOUND}).",
    ]
