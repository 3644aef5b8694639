"""Figures and tables of the benchmarks of decoding, translation and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from t2r.bench import decoding, memory, translating
from t2r.bench.summary import with_short_names
from t2r.reporting.page import Page, bars, lines

LOOK: dict[str, Any] = {"log_x": True, "markers": True}


def decoding_page(reports: Sequence[decoding.Report]) -> Page:
    """Return a page with the results of the decoding benchmark."""
    page = Page("Cost per generated token")
    for report in reports:
        add_decoding(page, report)
    return page


def add_decoding(page: Page, report: decoding.Report) -> None:
    """Add figures of speed and memory by context length, beside the limits that the sizes imply, and a table."""
    report = with_short_names(report)
    points, x = report.points, "context length in tokens"
    batch = report.settings.batch
    figures = {
        "Speed by context length": lines(by_length(points, "tokens_per_second"), x, "tokens/s", **LOOK),
        "State or KV cache by context length": lines(
            by_length(points, "cache_bytes", 2**20), x, "MiB", log_y=True, **LOOK
        ),
    }
    bounds = {
        name: (lengths, [1e3 * batch / bound for bound in values])
        for name, (lengths, values) in by_length(points, "bound").items()
        if not name.endswith((", engine", ", captured"))  # they move the same bytes
    }
    if bounds:
        caption = "Limit of speed: bytes that a step must move, at the measured bandwidth"
        figures[caption] = lines(bounds, x, "tokens/s", log_y=True, **LOOK)
    figures |= by_feature_size(report.features, points)
    page.figures(figures)
    add_table(page, decoding, report)


def translating_page(report: translating.Report) -> Page:
    """Return a page with the paper's two figures, speed and memory by length, and a table."""
    report = with_short_names(report)
    page, x = Page("Speed and memory of translation"), "length of source and target in tokens"
    figures = {
        "Speed by length": lines(by_length(report.points, "tokens_per_second"), x, "tokens/s", **LOOK),
        "Memory of attention by length": lines(
            by_length(report.points, "cache_bytes", 2**20), x, "MiB", log_y=True, **LOOK
        ),
    }
    page.figures(figures | by_feature_size(report.features, report.points))
    add_table(page, translating, report)
    return page


def memory_page(report: memory.Report) -> Page:
    """Return a page with the largest batch of each model, and its speed there."""
    report = with_short_names(report)
    page = Page("Largest batch in memory")
    figures = {"Largest batch": bars({row.model: row.batch for row in report.rows}, "sequences")}
    speeds = {row.model: row.tokens_per_second for row in report.rows if row.tokens_per_second is not None}
    if speeds:
        figures["Speed of that batch"] = bars(speeds, "tokens/s")
    page.figures(figures)
    add_table(page, memory, report)
    return page


def add_table(page: Page, benchmark: Any, report: Any) -> None:
    """Add the table and the notes of a report, by the module of its benchmark."""
    page.table(benchmark.HEADER, benchmark.cells(report), benchmark.title(report))
    for note in benchmark.notes(report):
        page.paragraph(note)


def by_length(points: Sequence[Any], field: str, unit: float = 1.0) -> dict[str, tuple[list[int], list[float]]]:
    """Return the lengths and values of each model. Points without a value are skipped."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for point in points:
        if (value := getattr(point, field)) is not None:
            lengths, values = found.setdefault(point.model, ([], []))
            lengths.append(point.length)
            values.append(value / unit)
    return found


def by_feature_size(features: Mapping[str, list[int] | None], points: Sequence[Any]) -> dict[str, str]:
    """Return a figure of the speed by feature size at the greatest length, if several sizes were measured."""
    last = max(point.length for point in points)
    speeds: dict[str, dict[int, float]] = {}
    for point in points:
        sizes = features.get(point.model)
        if point.length == last and sizes is not None and len(sizes) == 1 and point.model.startswith(f"T2R {sizes[0]}"):
            way = point.model.removeprefix(f"T2R {sizes[0]}").removeprefix(", ") or "T2R"
            speeds.setdefault(way, {})[sizes[0]] = point.tokens_per_second
    series = {way: (sorted(own), [own[k] for k in sorted(own)]) for way, own in speeds.items() if len(own) > 1}
    if not series:
        return {}
    return {f"Speed by feature size, at {last:,} tokens": lines(series, "feature size", "tokens/s", **LOOK)}
