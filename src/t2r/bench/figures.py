"""Figures and tables of the decoding benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from t2r.bench import decoding
from t2r.reporting.page import Page, lines


def decoding_page(reports: Sequence[decoding.Report]) -> Page:
    """Return a page with the results of the decoding benchmark."""
    page = Page("Cost per generated token")
    for report in reports:
        add_decoding(page, report)
    return page


def add_decoding(page: Page, report: decoding.Report) -> None:
    """Add figures of speed and memory by context length, and a table."""
    names = list(dict.fromkeys(point.model for point in report.points))
    lengths = {name: [point.length for point in report.of(name)] for name in names}
    speed = {name: (lengths[name], [point.tokens_per_second for point in report.of(name)]) for name in names}
    memory = {name: (lengths[name], [point.cache_bytes / 2**20 for point in report.of(name)]) for name in names}
    look: dict[str, Any] = {"log_x": True, "markers": True}
    page.figures(
        {
            "Speed by context length": lines(speed, "context length in tokens", "tokens/s", **look),
            "State or KV cache by context length": lines(memory, "context length in tokens", "MiB", log_y=True, **look),
        }
    )
    page.table(decoding.HEADER, decoding.cells(report), decoding.title(report))
    for note in decoding.notes(report):
        page.paragraph(note)
