"""The figure of README.md: quality against memory, from the table of docs/memory.md."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import budgets
from t2r.errors import T2RError

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
COLUMNS = ("", "memory", "perplexity", "KL to the teacher")
LABELS = {title: title.strip("*").partition(":")[0].partition(",")[0] if kind in ("pure", "kept") else title.strip("*")
    for kind, title in budgets.MODELS.items()}  # fmt: skip
"""The kinds of models in the table, and their labels in the figure."""


class Row(NamedTuple):
    """A row of the table."""

    model: str
    mebibytes: float
    kl: float | None
    cells: tuple[str, ...]


def rows(text: str) -> list[Row]:
    """Return the rows of the table of quality against memory in a page. The first is the teacher."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if tuple(_cells(line)[: len(COLUMNS)]) == COLUMNS), None)
    if start is None:
        raise T2RError(f"the page has no table with the columns {', '.join(COLUMNS[1:])}")
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = tuple(_cells(line))
        found.append(Row(cells[0], float(cells[1].split()[0]), float(cells[3]) if cells[3] else None, cells))
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []


def draw(path: Path) -> None:
    """Draw the divergence from the teacher against the memory of a sequence as an SVG file."""
    import matplotlib
    from matplotlib.figure import Figure

    table = rows(PAGE.read_text(encoding="utf-8"))
    unknown = {row.model for row in table[1:]} - set(LABELS)
    if unknown:
        raise T2RError(f"the figure has no label for {', '.join(sorted(unknown))}")
    with matplotlib.rc_context({"svg.hashsalt": "t2r", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(6.5, 3.2), facecolor="white", layout="constrained")
        axes = figure.subplots()
        for model, label in LABELS.items():
            points = sorted((row.mebibytes, row.kl) for row in table if row.model == model and row.kl is not None)
            mark, line = ("o", "-") if len(points) > 1 else ("D", "")
            if points:
                axes.plot(*zip(*points, strict=True), label=label, marker=mark, linestyle=line)
        axes.plot(table[0].mebibytes, 0, marker="*", linestyle="", color="black", label="the teacher", clip_on=False)
        axes.set(xlabel="MiB for 2,048 tokens", ylabel="KL to the teacher", xscale="log", ylim=(0, None))
        axes.set_xticks([1, 2, 4, 8, 16, 32], labels=["1", "2", "4", "8", "16", "32"])
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=8)
        figure.savefig(path, format="svg", metadata={"Date": None})
