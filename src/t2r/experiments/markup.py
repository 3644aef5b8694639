"""Markdown of the generated pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

WIDTH = 118
Row = Sequence[str]


def markdown(header: Row, rows: Iterable[Row]) -> str:
    """Return a Markdown table without columns that are empty in every row."""
    body = [list(row) for row in rows]
    used = [i for i in range(len(header)) if i == 0 or any(row[i] for row in body)]
    lines = [[header[i] for i in used], *([row[i] for i in used] for row in body)]
    text = [f"| {' | '.join(line)} |\n" for line in lines]
    return text[0] + "|" + " --- |" * len(used) + "\n" + "".join(text[1:])


def wrapped(line: str) -> str:
    lines = [""]
    for word in line.split():
        if len(lines[-1]) + len(word) + 1 > WIDTH:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)
