"""Compares linear attention with softmax attention: time, and memory of a training step.

Softmax attention is torch's causal scaled_dot_product_attention, with the same head size as the values. Its time is
quadratic in the length, that of linear attention is linear, so the speedup grows with the length.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from t2r import ops
from t2r.bench import fla
from t2r.bench.clock import bandwidth, clock
from t2r.capacity import refuse_beyond_memory
from t2r.errors import T2RError
from t2r.hub import choose_device
from t2r.words import counted

if TYPE_CHECKING:
    from rich.table import Table

LENGTHS = (512, 2048, 8192)
GROWTH = (8192, 32768)
"""Four times the length should take about four times as long."""
GROWTH_BOUND = 4.6
ABSENT = "-"
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""q, k, v and a gradient for the output."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class OpsSettings:
    batch: int
    heads: int
    feature_size: int
    head_dim: int
    dtype: str
    device: str
    backends: tuple[str, ...]
    decay: bool
    repeats: int
    threads: int
    """CPU threads of torch. Only measurements with the same number can be compared."""


@dataclass(frozen=True)
class Row:
    """Milliseconds and peak memory at one length with one backend.

    On a GPU these are device times: the work is captured as a CUDA graph and replayed, also for softmax attention."""

    length: int
    backend: str
    softmax_forward: float
    linear_forward: float
    linear_training: float | None
    """Forward and backward. None: the backend cannot run it here."""
    memory_multiple: float | None
    """Peak bytes of forward and backward beyond the inputs (q, k, v and the gradient of out), divided by the bytes of
    q, k, v and out."""
    forward_bytes: int
    """Minimum memory traffic of the forward pass: q, k and v read once, out written once."""
    training_bytes: int
    """Minimum traffic with the backward pass: q, k, v, out and its gradient read once, three gradients written once."""
    softmax_training: float | None = None
    """On a GPU only: on a CPU it would take most of the benchmark's time."""


@dataclass(frozen=True)
class Report:
    settings: OpsSettings
    rows: list[Row]
    growth: float | None
    """Time of forward and backward at the longer length of GROWTH divided by the shorter's, with the first backend.
    None: lengths were given."""
    bandwidth: float | None = None
    """Bytes per second of a large copy on the same GPU, read and written."""


def run(
    lengths: Sequence[int] | None = None,
    *,
    batch: int = 1,
    heads: int = 8,
    feature_size: int = 32,
    head_dim: int = 128,
    dtype: str = "float32",
    device: str = "cpu",
    backend: str = "auto",
    decay: bool = False,
    repeats: int = 5,
) -> Report:
    """Measure on this machine. Times are medians over interleaved repeats.

    Args:
        lengths: None: LENGTHS, and the growth of the time from one length of GROWTH to the other.
        backend: one or several backends, separated by commas. `fla` is flash-linear-attention, on a GPU.
        decay: use a decay rate for each feature.
    """
    chosen = LENGTHS if lengths is None else lengths
    for name, number in (("length", min(chosen)), ("batch", batch), ("heads", heads), ("repeats", repeats)):
        if number < 1:
            raise T2RError(f"{name} must be at least 1, got {number}")
    if feature_size < 1 or head_dim < 1:
        raise T2RError(f"feature size and head dim must be at least 1, got {feature_size} and {head_dim}")
    if dtype not in DTYPES:
        raise T2RError(f"no dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    backends = tuple(name.strip() for name in backend.split(","))
    if fla.NAME in backends:
        fla.check(device)
    device, threads = str(choose_device(device)), torch.get_num_threads()
    settings = OpsSettings(batch, heads, feature_size, head_dim, dtype, device, backends, decay, repeats, threads)
    refuse_beyond_memory(_needed(max(chosen), settings), choose_device(device), f"{max(chosen):,} tokens need")
    rows = [row for length in chosen for row in _rows(length, settings)]
    speed = bandwidth(choose_device(device), repeats) if _on_cuda(settings) else None
    return Report(settings, rows, _growth(settings) if lengths is None else None, speed)


def _needed(length: int, settings: OpsSettings) -> int:
    """Return the bytes of the inputs and of their gradients. What is computed between them is more."""
    features, values = settings.feature_size, settings.head_dim
    softmax = 3 if _on_cuda(settings) else 2  # with its output
    size = 2 * (2 * features + values) + values + (softmax + 1) * values
    return settings.batch * settings.heads * length * size * DTYPES[settings.dtype].itemsize


def _on_cuda(settings: OpsSettings) -> bool:
    return settings.device.startswith("cuda")


def _rows(length: int, settings: OpsSettings) -> list[Row]:
    q, k, v, grad = inputs = _inputs(length, settings)
    decay = _decay(settings)
    softmax_inputs = _softmax_inputs(v)
    functions: list[Callable[[], object]] = [lambda: _softmax(*softmax_inputs, None)]
    if _on_cuda(settings):
        functions.append(lambda: _softmax(*softmax_inputs, grad))
    softmax = len(functions)
    pairs = [_linear(inputs, decay, name) for name in settings.backends]
    functions += [function for pair in pairs for function in pair if function is not None]
    medians = iter(_medians(functions, settings))
    softmax_times = [next(medians) for _ in range(softmax)]
    own = q.nbytes + k.nbytes + v.nbytes
    rows = []
    for name, (_, training) in zip(settings.backends, pairs, strict=True):
        rows.append(
            Row(
                length,
                name,
                softmax_times[0],
                next(medians),
                None if training is None else next(medians),
                # The gradient of out is as large as out.
                None if training is None else _peak_bytes(training, v.device) / (own + grad.nbytes),
                own + grad.nbytes,
                3 * own + 3 * grad.nbytes,
                softmax_times[1] if softmax == 2 else None,
            )
        )
    return rows


def _softmax_inputs(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn_like(v).requires_grad_(), torch.randn_like(v).requires_grad_(), v


def _softmax(q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None) -> object:
    """Run forward, and backward if there is a gradient. In half precision on a GPU, flash attention is required."""
    flash = q.is_cuda and q.dtype != torch.float32
    with torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flash else nullcontext():
        if grad is None:
            with torch.no_grad():
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out, (q, k, v), grad)


def _decay(settings: OpsSettings) -> Tensor | None:
    """Return decay rates like those of a trained model, for a memory of one to thousands of tokens."""
    if not settings.decay:
        return None
    rates = torch.logspace(-4, 0, settings.heads * settings.feature_size, device=settings.device)
    return rates.view(settings.heads, settings.feature_size).requires_grad_()


def _linear(
    inputs: Inputs, decay: Tensor | None, backend: str
) -> tuple[Callable[[], object], Callable[[], object] | None]:
    """Return the forward pass of linear attention, and forward and backward where the backend can run that here."""
    if backend == fla.NAME:
        return fla.functions(*inputs, decay)
    q, k, v, grad = inputs

    @torch.no_grad()
    def forward() -> Tensor:
        return ops.linear_attention(q, k, v, decay=decay, backend=backend)[0]

    def training() -> tuple[Tensor, ...]:
        out, _ = ops.linear_attention(q, k, v, decay=decay, backend=backend)
        return torch.autograd.grad(out, (q, k, v) if decay is None else (q, k, v, decay), grad)

    return forward, training


def _growth(settings: OpsSettings) -> float:
    decay, backend = _decay(settings), settings.backends[0]
    functions = [_linear(_inputs(length, settings), decay, backend)[1] for length in GROWTH]
    short, long = _medians([function for function in functions if function is not None], settings)
    return long / short


def _inputs(length: int, settings: OpsSettings) -> Inputs:
    """Return q, k and v, and a gradient of the output. Features are positive, like those of feature maps."""
    device = choose_device(settings.device)
    generator = torch.Generator(device).manual_seed(0)
    shape = (settings.batch, settings.heads, length)
    dtype = DTYPES[settings.dtype]

    def random(size: int) -> Tensor:
        return torch.rand(*shape, size, generator=generator, device=device, dtype=dtype)

    q, k = random(settings.feature_size), random(settings.feature_size)
    v, grad = random(settings.head_dim), random(settings.head_dim)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad


def _medians(functions: Sequence[Callable[[], object]], settings: OpsSettings) -> list[float]:
    """Return the median milliseconds of each. Functions run in turn, so that other load affects all of them."""
    device = choose_device(settings.device)
    timed = [clock(function, device) for function in functions]
    rounds = [[measure() for measure in timed] for _ in range(settings.repeats)]
    return [median(times) for times in zip(*rounds, strict=True)]


def _peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Return the peak memory of the function, beyond that allocated before.

    On a CPU, the allocations and releases that torch's allocator reports to the profiler are added up. Unlike the
    resident size of the process, this is not affected by malloc or other libraries. Unlike a dispatch mode, it includes
    temporaries inside an operator.
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
    """Silence stderr of the process: the profiler prints messages from C++ that cannot be disabled."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def tables(report: Report) -> "list[Table | str]":
    """Return the report as a table and notes."""
    from rich.table import Table

    s = report.settings
    where = s.device if report.bandwidth is not None else f"{s.device} ({counted(s.threads, 'thread')})"
    table = Table(
        title=f"batch {s.batch}, heads {s.heads}, feature size {s.feature_size}, head dim {s.head_dim}, "
        f"{s.dtype} on {where}, {'with' if s.decay else 'without'} decay, median of {s.repeats}"
    )
    headings = ["length", "backend", "softmax forward", "forward", "softmax / linear", "training", "memory"]
    if report.bandwidth is not None:
        headings[5:6] = ["softmax training", "training", "softmax / linear", "bandwidth forward", "training"]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "backend" else "right")
    for row in report.rows:
        ms = row.linear_training
        training = [ABSENT if ms is None else f"{ms:.3f} ms"]
        if report.bandwidth is not None and row.softmax_training is not None:
            training = [
                f"{row.softmax_training:.3f} ms",
                *training,
                ABSENT if ms is None else f"{row.softmax_training / ms:.2f}×",
                f"{row.forward_bytes / row.linear_forward * 1e3 / report.bandwidth:.0%}",
                ABSENT if ms is None else f"{row.training_bytes / ms * 1e3 / report.bandwidth:.0%}",
            ]
        table.add_row(
            str(row.length),
            row.backend,
            f"{row.softmax_forward:.3f} ms",
            f"{row.linear_forward:.3f} ms",
            f"{row.softmax_forward / row.linear_forward:.2f}×",
            *training,
            ABSENT if row.memory_multiple is None else f"{row.memory_multiple:.2f}×",
        )
    notes = ["Training is forward and backward. Memory is its peak for linear attention, relative to q, k, v and out."]
    if any(row.linear_training is None for row in report.rows):
        notes.append(f"{ABSENT}: {fla.UNTRAINED}")
    if report.growth is not None:
        notes.append(
            f"Forward and backward take {report.growth:.1f} times as long at {GROWTH[1]:,} tokens as at {GROWTH[0]:,} "
            f"(linear growth: {GROWTH[1] / GROWTH[0]:.0f}; accepted: up to {GROWTH_BOUND})."
        )
    if report.bandwidth is not None:
        notes.append(
            "Times are of replayed CUDA graphs. Bandwidth is for reading every input and writing every output once, "
            f"relative to a copy ({report.bandwidth / 1e12:.2f} TB/s)."
        )
    return [table, *notes]
