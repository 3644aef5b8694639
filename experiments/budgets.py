"""The table of an experiment about memory budgets: what a model is worth within so many bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from t2r.experiments.markup import markdown
from t2r.experiments.record import recorded

MODELS = {
    "variant": "one window for all heads",
    "windows": "a window for each head, not trained",
    "state": "a state for each head, trained",
    "trained": "**a window and a state for each head, trained**",
    "pure": "the RNN: a state for each head, trained longer",
    "kept": "7 of 30 layers kept, the others an RNN",
}
"""The rows of a budget, by the beginnings of the names of steps; the last two are of other records."""
EXPERIMENT, WINDOW = "smollm2-memory", 2048
OTHERS = (
    ("smollm2-pure", "pure", None),
    ("smollm2-kept", "kept", None),
    ("smollm2-kept", "smollm2", "window 772 + 4 sinks"),
)
"""Rows of other records that are measured in the same way as this experiment: the record, the model and its variant."""
STEPS = ("budget-", "alone-")
"""The beginnings of the names of the evaluations. What follows is the budget."""


def rows_of(*records: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of the evaluations of all budgets, with their kind: the teacher once, and the others by memory and
    divergence. A budget that the first record does not have is that of the next."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    steps = {part["name"]: part for record in reversed(records) for part in record["steps"] if "result" in part}
    for name, part in steps.items():
        if name.startswith(STEPS):
            teacher, *others = part["result"]
            if not found:
                yield "teacher", teacher
            found += [("variant" if "variant" in row else row["model"].partition("-")[0], row) for row in others]
    found += [(kind, row) for kind, row in others_of(records[0]) if found]
    yield from sorted(found, key=lambda each: (-round(each[1]["kept_bytes"], -5), each[1]["kl"]))


def others_of(record: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of other records that belong to this one's table."""
    for name, model, variant in OTHERS if record.get("experiment") == EXPERIMENT else ():
        steps = (recorded(name) or {"steps": []})["steps"]
        rows: list[Any] = next((part["result"] for part in steps if part["name"] == "controls"), [])
        for row in rows:
            if (row["model"], row.get("variant")) == (model, variant):
                (at,) = (part for part in row["measured"] if part["window"] == WINDOW)
                yield ("variant" if variant else model), row | at


def table(*records: Mapping[str, Any]) -> str:
    """Return a row for each model of `rows_of`: its memory, perplexity, divergence and recall."""
    rows: list[list[str]] = []
    distances: list[int] = []
    for kind, row in rows_of(*records):
        distances = [part["distance"] for part in row["recall"]] if kind == "teacher" else distances
        ratio = "" if row.get("ratio") is None else f" ({100 * (row['ratio'] - 1):+.1f} %)"
        title = f"the model itself, {row['window']:,} tokens" if kind == "teacher" else MODELS[kind]
        accuracy = {part["distance"]: part["accuracy"] for part in row["recall"]}
        recalled = [f"{100 * accuracy[distance]:.0f} %" for distance in distances]
        divergence = "" if row["kl"] is None else f"{row['kl']:.3f}"
        memory = f"{row['kept_bytes'] / 2**20:.{1 if row['kept_bytes'] > 10 * 2**20 else 2}f} MiB"
        rows.append([title, memory, f"{row['perplexity']:.2f}{ratio}", divergence, *recalled])
    header = ["", "memory", "perplexity", "KL to the teacher"]
    return markdown([*header, *(f"recall after {each:,}" for each in distances)], rows)
