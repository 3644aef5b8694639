"""The table of a grid: a row for each cell, with the paper's numbers beside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from t2r.experiments.cells import OF_ANALYSIS, Cell, cells_of_record
from t2r.experiments.experiment import Experiment
from t2r.experiments.markup import markdown

MEASURES = {
    "valid": "perplexity, valid",
    "test": "perplexity, test",
    "novels": "perplexity, novels",
    "speeches": "perplexity, speeches",
    "trained": "perplexity after training",
    "bleu": "BLEU",
    "tokenized_bleu": "tokenized BLEU",
    "tatoeba": "BLEU, Tatoeba",
    "euclidean": "Euclidean distance",
    "jensen_shannon": "Jensen-Shannon divergence, nats",
    "entropy": "entropy, nats",
}
"""Measures in the order of the columns, and their titles."""
PAPER = {"tokenized_bleu": "tokenized BLEU"}
"""Titles of the columns with the paper's numbers, where they differ from the name of the measure."""
GROUPS = "pair"
"""Cells with the same label on this axis, a language pair, are together in the table."""


def grid_table(experiment: Experiment, record: Mapping[str, Any]) -> str:
    """Return the table of a grid. Rows are the models that were made, by pair, in the order of the experiment.
    Nothing if none was trained."""
    cells = cells_of_record(record)
    groups = list(dict.fromkeys(cell.labels.get(GROUPS) for cell in cells.values()))
    cells = dict(sorted(cells.items(), key=lambda item: groups.index(item[1].labels.get(GROUPS))))
    axes = varied_axes(cells)
    measures = [measure for measure in MEASURES if any(measure in cell.values for cell in cells.values())]
    if "trained" in measures and all(_evaluated(cell) for cell in cells.values() if "trained" in cell.values):
        measures.remove("trained")
    header = [*(axes or ["model"])]
    for measure in measures:
        header += [_title(measure, cells), f"{PAPER.get(measure, measure)} in the paper"]
    header += ["tokens", "training", "with pretraining", "time against random", "GPU hours in the paper"]
    crossed = any(cell.cross is not None for cell in cells.values())
    header += ["peak, GiB", "parameters", "state or cache, causal + cross" if crossed else "state or cache"]
    rows = []
    for name, cell in cells.items():
        if not cell.values and not cell.seconds and not cell.failed:
            continue
        paper = experiment.paper.get(name, {})
        row = [titled(experiment, cell.labels.get(axis, "")) for axis in axes] or [titled(experiment, name)]
        for measure in measures:
            row += [shown(cell, measure), number(paper.get(measure))]
        if cell.failed and not cell.values:
            row[len(axes or [""])] = "failed"
        row += [count(cell.tokens), duration(cell), *with_pretraining(cells, cell), number(paper.get("hours"), 0)]
        peak = "" if cell.peak is None else f"{cell.peak / 2**30:.1f}"
        rows.append([*row, peak, parameters(cells, cell), kept(cell)])
    return markdown(header, rows) if rows else ""


def _evaluated(cell: Cell) -> bool:
    """Whether more is measured on a cell than the perplexity at the end of its training."""
    return bool(cell.values.keys() - {"trained"})


def _title(measure: str, cells: Mapping[str, Cell]) -> str:
    windows = {cell.windows for cell in cells.values() if cell.windows} if measure == "trained" else set()
    return MEASURES[measure] + (f", {windows.pop():,} windows" if len(windows) == 1 else "")


def varied_axes(cells: Mapping[str, Cell]) -> list[str]:
    """Return the axes on which cells differ."""
    axes = dict.fromkeys(axis for cell in cells.values() for axis in cell.labels)
    return [axis for axis in axes if len({cell.labels.get(axis) for cell in cells.values()}) > 1]


def cell_titles(experiment: Experiment, record: Mapping[str, Any]) -> dict[str, str]:
    """Return a title for each cell of a record, by name, made from its labels. Equal ones are left out."""
    cells = cells_of_record(record)
    axes = varied_axes(cells)
    found = {}
    for name, cell in cells.items():
        labels = [titled(experiment, cell.labels[axis]) for axis in axes if axis in cell.labels]
        found[name] = ", ".join(labels)
    return {name: title for name, title in found.items() if title and list(found.values()).count(title) == 1}


def titled(experiment: Experiment, label: str) -> str:
    return experiment.titles.get(label, label)


def shown(cell: Cell, measure: str) -> str:
    """Format a measure: its mean and, with several seeds, its standard deviation."""
    value, spread = cell[measure], cell.spread(measure)
    digits = 3 if measure in OF_ANALYSIS else 2 if value is None or value < 1000 else 0
    return number(value, digits) + ("" if spread is None else f" ± {spread:.{max(digits, 1)}f}")


def number(value: float | str | None, digits: int = 1) -> str:
    if isinstance(value, str):  # diverged
        return value
    return "" if value is None else f"{value:,.{digits}f}"


def count(value: int | None) -> str:
    """Format a number of tokens or parameters."""
    if not value:
        return ""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= unit:
            return f"{value / unit:.1f}{name}"
    return str(value)


def duration(cell: Cell) -> str:
    return in_time(sum(cell.seconds) / len(cell.seconds)) if cell.seconds else ""


def in_time(seconds: float) -> str:
    if seconds >= 6000:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 100 else f"{seconds:.0f} s"


def with_pretraining(cells: Mapping[str, Cell], cell: Cell) -> tuple[str, str]:
    """Return tokens and time of a conversion together with those of its teacher, and the time of the same system from
    random initialization relative to the conversion alone. Times on different machines are not put together."""
    parent = cells.get(cell.parent or "")
    if parent is None or not cell.seconds:
        return "", ""
    total = ""
    if parent.seconds:
        total = count(cell.tokens + parent.tokens)
        total += f", {in_time(average(cell) + average(parent))}" if parent.machine == cell.machine else ""
    scratch = cells.get(cell.name.replace("pretrained-", "random-"))
    if scratch is None or scratch is cell or not scratch.seconds or scratch.machine != cell.machine:
        return total, ""
    return total, f"{average(scratch) / average(cell):.1f}x"


def average(cell: Cell) -> float:
    return sum(cell.seconds) / len(cell.seconds)


def parameters(cells: Mapping[str, Cell], cell: Cell) -> str:
    """Format the number of parameters, with the share that a conversion adds to its teacher's."""
    parent = cells.get(cell.parent or "")
    if parent is None or not parent.parameters or not cell.parameters:
        return count(cell.parameters)
    return f"{count(cell.parameters)} ({100 * (cell.parameters / parent.parameters - 1):+.2f} %)"


def kept(cell: Cell) -> str:
    """Format the memory of attention. For translation, that of causal and of cross attention, and for which length."""
    if cell.cross is None:
        return size(cell.state)
    length = "" if cell.kept_tokens is None else f" at {cell.kept_tokens} tokens"
    return f"{size(cell.state)} + {size(cell.cross)}{length}"


def size(value: int | None) -> str:
    if value is None:
        return ""
    return f"{value / 2**20:.2f} MiB" if value >= 2**18 else f"{value / 2**10:.1f} KiB"
