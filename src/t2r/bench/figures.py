"""What decoding costs, as figures and tables of a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from t2r.bench import decoding
from t2r.reporting.page import Page, lines


def decoding_page(reports: Sequence[decoding.Report]) -> Page:
    """A page of its own about what one more token costs."""
    page = Page("What one more token costs")
    for report in reports:
        add_decoding(page, report)
    return page


def add_decoding(page: Page, report: decoding.Report) -> None:
    """Speed and memory against the length of the text, and the numbers."""
    names = list(dict.fromkeys(point.model for point in report.points))
    lengths = {name: [point.length for point in report.of(name)] for name in names}
    speed = {name: (lengths[name], [point.tokens_per_second for point in report.of(name)]) for name in names}
    memory = {name: (lengths[name], [point.cache_bytes / 2**20 for point in report.of(name)]) for name in names}
    look: dict[str, Any] = {"log_x": True, "markers": True}
    page.figures(
        {
            "Tokens a second, after so many tokens": lines(speed, "tokens before", "tokens/s", **look),
            "What is kept from token to token": lines(memory, "tokens before", "MiB", log_y=True, **look),
        }
    )
    page.table(decoding.HEADER, decoding.cells(report), decoding.title(report))
    for note in decoding.notes(report):
        page.paragraph(note)
