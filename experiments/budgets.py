"""The table and the figure of an experiment about memory budgets: what a model is worth within so many bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from t2r.experiments.markup import markdown

MODELS = {
    "variant": "one window for all heads",
    "windows": "a window for each head, not trained",
    "state": "a state for each head, trained",
    "trained": "**a window and a state for each head, trained**",
}
"""The rows of a budget, by the beginnings of the names of steps."""
STEPS = ("budget-", "alone-")
"""The beginnings of the names of the evaluations. What follows is the budget."""


def rows_of(record: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of the evaluations of all budgets, from the largest, with their kind. The teacher comes once."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for part in record["steps"]:
        if not part["name"].startswith(STEPS) or "result" not in part:
            continue
        teacher, *others = part["result"]
        if not found:
            yield "teacher", teacher
        rows = found.setdefault(part["name"].partition("-")[2], {})
        rows |= {"variant" if "variant" in row else row["model"].partition("-")[0]: row for row in others}
    for rows in found.values():
        yield from ((kind, rows[kind]) for kind in MODELS if kind in rows)


def table(record: Mapping[str, Any]) -> str:
    """Return a row for each model: its memory, perplexity, divergence and recall."""
    rows, distances = [], None
    for kind, row in rows_of(record):
        distances = distances or [part["distance"] for part in row["recall"]]
        ratio = "" if row.get("ratio") is None else f" ({100 * (row['ratio'] - 1):+.1f} %)"
        title = f"the model itself, {row['window']:,} tokens" if kind == "teacher" else MODELS[kind]
        recalled = [f"{100 * part['accuracy']:.0f} %" for part in row["recall"]]
        divergence = "" if row["kl"] is None else f"{row['kl']:.3f}"
        memory = f"{row['kept_bytes'] / 2**20:.2f} MiB"
        rows.append([title, memory, f"{row['perplexity']:.2f}{ratio}", divergence, *recalled])
    header = ["", "memory", "perplexity", "KL to the teacher"]
    return markdown([*header, *(f"recall after {each:,}" for each in distances or ())], rows)


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw the divergence against the memory as an SVG file."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "t2r", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(5, 3), facecolor="white", layout="constrained")
        axes = figure.subplots()
        for kind, label in MODELS.items():
            own = [(row["kept_bytes"] / 2**20, row["kl"]) for found, row in rows_of(record) if found == kind]
            if own:
                axes.plot(*zip(*sorted(own), strict=True), marker="o", label=label.strip("*"))
        axes.set(xlabel="MiB of a sequence", ylabel="KL to the teacher", xscale="log", ylim=(0, None))
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.legend(frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})
