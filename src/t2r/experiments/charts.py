"""The figures of a record of a grid.

A figure is an entry of `figures` in the file of an experiment:

    title       the title
    name        the name of its file, if not that of the experiment
    x, y        an axis of the grid or a measure; a measure
    lines       the axis with one line for each label
    level       a cell whose measure is a horizontal line
    by_distance attention by distance instead of x and y
    where       labels that cells must have

A figure of a benchmark of translation has `bench` instead: the field of its points to draw by length.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import StatisticsError, correlation
from typing import TYPE_CHECKING, Any

from t2r.experiments.cells import Cell, cells_of_record
from t2r.experiments.comparison import MEASURES, titled
from t2r.experiments.experiment import Experiment
from t2r.reporting.page import plain_ticks, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = tuple[list[float], list[float], list[float]]
"""x, y and the spread over seeds of y."""
SIZES = {
    "k": "feature size",
    "cross": "feature size of cross attention",
    "causal": "feature size of causal attention",
}
"""Axes of feature sizes, drawn on a logarithmic scale, and their titles."""
BENCH = {"tokens_per_second": ("tokens per second", 1.0), "cache_bytes": ("MiB", 2.0**20)}


def drawn(experiment: Experiment, record: Mapping[str, Any]) -> dict[str, str]:
    """Return the figures of an experiment for a page, by title. Figures without any line are left out."""
    found = {}
    for figure in experiment.figures:
        if shown := lines(experiment, record, figure):
            words = f"{figure['title']}: {', '.join(shown)}"
            found[figure["title"]] = svg(lambda axes, own=figure: plot(axes, experiment, record, own), words)
    return found


def plot(axes: Axes, experiment: Experiment, record: Mapping[str, Any], figure: Mapping[str, Any]) -> None:
    """Draw the lines, the level, the scales and the legend of a figure."""
    shown = lines(experiment, record, figure)
    joined = "none" if figure.get("x") in MEASURES else "-"  # between two measures there is no order
    for label, (x, y, spread) in shown.items():
        axes.errorbar(x, y, spread if any(spread) else None, marker="o", linestyle=joined, capsize=2, label=label)
    if "level" in figure:
        cell = cells_of_record(record).get(figure["level"])
        if cell is not None and (value := cell[figure["y"]]) is not None:
            axes.axhline(value, color="gray", linestyle="--", label=titled(experiment, figure["level"]))
    xlabel, ylabel = names(figure)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if figure.get("x") in SIZES or "by_distance" in figure or "bench" in figure:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,g}")
    drawn = [value for _, y, _ in shown.values() for value in y]
    # Weights of signed maps can be negative, which a logarithmic axis would hide.
    if ("by_distance" in figure or "bench" in figure) and drawn and min(drawn) > 0:
        axes.set_yscale("log")
        plain_ticks(axes.yaxis, drawn)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, title=correlated(figure, shown) or SIZES.get(figure.get("lines", "")))


def correlated(figure: Mapping[str, Any], shown: Mapping[str, Line]) -> str | None:
    """Return the correlation of two measures over all models of a figure, or None if it does not compare measures."""
    if figure.get("x") not in MEASURES:
        return None
    x, y = ([value for line in shown.values() for value in line[i]] for i in (0, 1))
    try:
        return f"Pearson's r = {correlation(x, y):.2f}, {len(x)} models"
    except StatisticsError:  # fewer than two models, or equal values
        return None


def names(figure: Mapping[str, Any]) -> tuple[str, str]:
    """Return the titles of the axes."""
    if "by_distance" in figure:
        return "distance + 1", "attention weight"
    if "bench" in figure:
        return "length of source and target", BENCH[figure["bench"]][0]
    return SIZES.get(figure["x"], MEASURES.get(figure["x"], figure["x"])), MEASURES[figure["y"]]


def lines(experiment: Experiment, record: Mapping[str, Any], figure: Mapping[str, Any]) -> dict[str, Line]:
    """Return the lines of a figure by their titles."""
    if "by_distance" in figure:
        return by_distance(experiment, record, figure)
    if "bench" in figure:
        return by_length(record, figure)
    found: dict[str, Line] = {}
    for cell in cells_of_record(record).values():
        axis, y = figure["lines"], cell[figure["y"]]
        x = float(cell.labels[figure["x"]]) if figure["x"] in cell.labels else cell[figure["x"]]
        if axis in cell.labels and x is not None and y is not None and fits(cell, figure):
            line = found.setdefault(titled(experiment, cell.labels[axis]), ([], [], []))
            for own, value in zip(line, (x, y, cell.spread(figure["y"]) or 0.0), strict=True):
                own.append(value)
    return {label: in_order(line) for label, line in found.items()}


def in_order(line: Line) -> Line:
    ordered = sorted(zip(*line, strict=True))
    x, y, spread = (list(column) for column in zip(*ordered, strict=True))
    return x, y, spread


def fits(cell: Cell, figure: Mapping[str, Any]) -> bool:
    return all(cell.labels.get(axis) == str(label) for axis, label in figure.get("where", {}).items())


def by_distance(experiment: Experiment, record: Mapping[str, Any], figure: Mapping[str, Any]) -> dict[str, Line]:
    """Return the attention over preceding tokens, by distance, of each analyzed cell and of the teacher."""
    cells = cells_of_record(record)
    found: dict[str, Line] = {}
    for part in record["steps"]:
        rows = part["result"].get("by_distance") if isinstance(part.get("result"), dict) else None
        cell = cells.get(part["command"].split()[2])
        if not rows or cell is None or not fits(cell, figure):
            continue
        label = titled(experiment, cell.labels.get(figure["lines"], cell.name))
        for name, key in ((label, "model"), (titled(experiment, "teacher"), "teacher")):
            known = [(1 + (row["first"] + row["last"]) / 2, row[key]) for row in rows if row.get(key)]
            if known and name not in found:
                found[name] = [x for x, _ in known], [y for _, y in known], [0.0] * len(known)
    return found


def by_length(record: Mapping[str, Any], figure: Mapping[str, Any]) -> dict[str, Line]:
    """Return the points of a benchmark of translation by length, for each model."""
    unit = BENCH[figure["bench"]][1]
    found: dict[str, Line] = {}
    for part in record["steps"]:
        report = part.get("result")
        for point in report["points"] if isinstance(report, dict) and "points" in report else ():
            x, y, spread = found.setdefault(point["model"], ([], [], []))
            x.append(point["length"])
            y.append(point[figure["bench"]] / unit)
            spread.append(0.0)
    return found
