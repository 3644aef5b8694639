"""What the reports of benchmarks have in common: spreads, crossovers, and tables with a row for each measurement."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from t2r.words import counted, short_names

if TYPE_CHECKING:
    from rich.table import Table


def median_and_spread(times: Sequence[float]) -> tuple[float, float]:
    """Return the median, and the difference between the slowest and the fastest relative to it."""
    middle = median(times)
    return middle, (max(times) - min(times)) / middle


def crossover(lengths: Sequence[int], reference: Sequence[float], values: Sequence[float]) -> float | None:
    """Return the length from which `values` is below `reference`, by linear interpolation between measured points.

    None: it is not below at the last length. The first length: it is below at all lengths."""
    behind = [own - other for own, other in zip(values, reference, strict=True)]
    last = max((i for i, gap in enumerate(behind) if gap >= 0), default=None)
    if last is None:
        return float(lengths[0])
    if last == len(lengths) - 1:
        return None
    share = behind[last] / (behind[last] - behind[last + 1])
    return lengths[last] + share * (lengths[last + 1] - lengths[last])


def crossovers(reference: Sequence[Any], points: Sequence[Any], *fields: str) -> list[float | None]:
    """Return the crossover of each field of the points of two models, over the lengths that both have."""
    pairs = [(a, b) for a in reference for b in points if a.length == b.length]
    lengths = [own.length for _, own in pairs]
    return [
        crossover(lengths, [getattr(a, field) for a, _ in pairs], [getattr(b, field) for _, b in pairs])
        for field in fields
    ]


def from_length(name: str, reference: str, word: str, length: float | None, lengths: Sequence[int]) -> str:
    """Say from which length on a model is `word` (faster, smaller) than the reference."""
    if length is None:
        return f"{name} is not {word} than {reference} up to {lengths[-1]:,} tokens."
    if length == lengths[0]:
        return f"{name} is {word} than {reference} at all lengths measured, from {lengths[0]:,} tokens."
    return f"{name} is {word} than {reference} from about {length:,.0f} tokens on."


# --- Formatting ---------------------------------------------------------------------------------------------

R = TypeVar("R")


def with_short_names(report: R) -> R:
    """Return a report in which models have short names instead of their paths, for tables and figures."""
    measured: Any = getattr(report, "points", None) or getattr(report, "rows", ())
    named = short_names({name for one in measured for name in (one.model, one.model.partition(", ")[0])})

    def renamed(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.replace(value, **{name: renamed(x) for name, x in vars(value).items()})
        if isinstance(value, list):
            return [renamed(x) for x in value]
        if isinstance(value, dict):
            return {renamed(name): renamed(x) for name, x in value.items()}
        return named.get(value, value) if isinstance(value, str) else value

    result: R = renamed(report)
    return result


def place(settings: Any) -> str:
    """Return the dtype and device of the settings of a benchmark, on a CPU with the number of threads."""
    threads = f" ({counted(settings.threads, 'thread')})" if settings.device == "cpu" else ""
    return f"{settings.dtype} on {settings.device}{threads}"


def shown_lengths(points: Sequence[Any]) -> list[str]:
    """Return the first cell of each row: the length of a point, in the first row of each length only."""
    before = [None, *(point.length for point in points)]
    return [f"{point.length:,}" if point.length != last else "" for point, last in zip(points, before, strict=False)]


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"


def titled_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, sections: bool = True) -> Table:
    """Return a table for the terminal. With `sections`, a line is drawn above each row with a first cell."""
    from rich.table import Table

    table = Table(title=title)
    for heading in header:
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(*row, end_section=sections and following is not None and following[0] != "")
    return table
