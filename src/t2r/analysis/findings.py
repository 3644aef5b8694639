"""Tables and figures of an analysis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t2r.errors import T2RError
from t2r.reporting.page import COLORS, FIGURE, check_plots, heatmap, lines
from t2r.words import counted

if TYPE_CHECKING:
    from rich.table import Table

Rows = list[list[str]]
SHOWN_DISTANCES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 511)


class Listed:
    """A table as text: for the terminal and for a page."""

    def __init__(self, title: str, header: Sequence[str], rows: Rows) -> None:
        used = [i for i in range(len(header)) if i == 0 or any(row[i] for row in rows)]
        self.title = title
        self.header = [header[i] for i in used]
        self.rows = [[row[i] for i in used] for row in rows]


def tables(result: Mapping[str, Any]) -> list[Table | str]:
    """Return the tables of an analysis for the terminal, and its notes."""
    from rich.table import Table

    found: list[Table | str] = []
    for listed in listed_tables(result):
        table = Table()
        for i, name in enumerate(listed.header):
            table.add_column(name, justify="left" if i == 0 else "right")
        for row in listed.rows:
            table.add_row(*row)
        found += [listed.title, table]
    return [*found, *(f"note: {note}" for note in result["notes"])]


def listed_tables(result: Mapping[str, Any]) -> list[Listed]:
    """Return all tables of an analysis. Empty columns and tables are omitted."""
    found = [_summary(result), _layers(result), _distances(result), _states(result)]
    if result.get("by_position"):
        found.append(_positions(result))
    if result.get("recall"):
        found.append(_recall(result))
    if result.get("sensitivity"):
        rows = [[str(row["layer"]), f"{row['loss']:+.4f}"] for row in result["sensitivity"]]
        found.append(Listed("Sensitivity: loss if only this layer is recurrent", ("layer", "loss"), rows))
    return [table for table in found if table.rows]


def _summary(result: Mapping[str, Any]) -> Listed:
    where = result.get("text") or f"{result.get('source')} → {result.get('target')}"
    samples = counted(result["samples"], "sample")
    if "window" in result:
        samples += f" of {result['window']} tokens, attention of the last {result['words']} tokens"
    mean, features = result["mean"], result.get("features") or {}
    half_life = features.get("half_life") or {}
    rows = [
        ["Euclidean distance to the teacher's weights", _number(mean["euclidean"])],
        ["Jensen-Shannon divergence, nats", _number(mean["jensen_shannon"])],
        ["entropy, nats", _number(mean["entropy"])],
        ["entropy of the teacher", _number(mean["teacher_entropy"])],
        ["perplexity", _number((result.get("perplexity") or {}).get("model"), 2)],
        ["perplexity of the teacher", _number((result.get("perplexity") or {}).get("teacher"), 2)],
        ["dead features", _percent(features.get("dead"))],
        ["bounded denominators", _percent(features.get("bounded"), 3)],
        ["median half-life of a feature, tokens", _number(half_life.get("median"), 1)],
        ["features that outlast the window", _percent(half_life.get("above_window"))],
    ]
    title = f"{result['model']}: {where}, {samples}"
    return Listed(title, ("mean over layers and heads", "value"), [row for row in rows if row[1]])


def _layers(result: Mapping[str, Any]) -> Listed:
    header = ["layer", "distance", "JS", "entropy", "teacher", "worst head", "dead", "bounded", "half-life"]
    rows = []
    for layer in result["layers"]:
        kind = ("" if layer["kind"] == "causal" else " cross") + ("" if layer["recurrent"] else " softmax")
        far = [(head["euclidean"], head["head"]) for head in layer["heads"] if head["euclidean"] is not None]
        recurrent = layer["recurrent"]
        rows.append(
            [
                f"{layer['layer']}{kind}",
                *(_number(layer[name]) for name in ("euclidean", "jensen_shannon", "entropy", "teacher_entropy")),
                f"{max(far)[1]}: {max(far)[0]:.3f}" if far else "",
                _percent(layer["dead"]) if recurrent else "",
                _percent(layer["bounded"]) if recurrent else "",
                _number((layer.get("half_life") or {}).get("median"), 1),
            ]
        )
    return Listed("Layers: means over heads, the head with the largest distance, median half-life", header, rows)


def _distances(result: Mapping[str, Any]) -> Listed:
    rows = [
        [_range(row), f"{row['model']:.5f}", f"{row['teacher']:.5f}" if row.get("teacher") is not None else ""]
        for row in result["by_distance"]
        if any(row["first"] <= distance <= row["last"] for distance in SHOWN_DISTANCES)
    ]
    return Listed("Attention to a token by its distance", ("distance", "model", "teacher"), rows)


def _states(result: Mapping[str, Any]) -> Listed:
    rows = [[f"{s['tokens']:,}", f"{s['norm']:.3g}", f"{s['effective_rank']:.2f}"] for s in result.get("state") or ()]
    return Listed("State of a head by tokens read", ("tokens", "norm", "effective rank"), rows)


def _positions(result: Mapping[str, Any]) -> Listed:
    rows = [[_range(b), _number(b["perplexity"], 2), _number(b.get("teacher"), 2)] for b in result["by_position"]]
    return Listed("Perplexity by tokens of context", ("context", "model", "teacher"), rows)


def _recall(result: Mapping[str, Any]) -> Listed:
    def cell(found: Mapping[str, Any] | None) -> str:
        if not found:
            return ""
        low, high = found["interval"]
        return f"{100 * found['accuracy']:.1f} % ({100 * low:.0f}-{100 * high:.0f})"

    rows = [[f"{row['distance']:,}", cell(row), cell(row.get("teacher"))] for row in result["recall"]]
    first = result["recall"][0]
    trials, chance = counted(first["trials"], "trial"), _percent(first["chance"])
    title = f"Recall of a word by distance: {trials}, chance {chance}, 95 % interval"
    return Listed(title, ("distance", "model", "teacher"), rows)


# --- Figures ------------------------------------------------------------------------------------------------


def figures(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the figures of an analysis as SVG, by title."""
    found: dict[str, str] = {}
    names = [name for name in ("model", "teacher") if result.get("teacher") or name == "model"]
    if rows := result["by_distance"]:
        middle = [(row["first"] + row["last"]) / 2 + 1 for row in rows]
        series = {name: (middle, [row[name] for row in rows]) for name in names}
        found["Attention by distance"] = lines(series, "distance + 1", "attention", log_x=True, log_y=True, ticks=TICKS)
    for kind in result.get("kinds", ()):  # the record of an experiment keeps only means
        layers = [layer for layer in result["layers"] if layer["kind"] == kind]
        label = "" if kind == "causal" else f" ({kind})"
        numbers = [layer["layer"] for layer in layers]
        ways = {"model": "entropy", "teacher": "teacher_entropy"}
        series = {name: (numbers, [layer[key] for layer in layers]) for name, key in ways.items() if name in names}
        series = {name: line for name, line in series.items() if None not in line[1]}
        if series:
            # Of a signed model there is only the teacher's line, which must not be taken for the model's.
            colors = [COLORS[names.index(name)] for name in series]
            found[f"Entropy by layer{label}"] = lines(
                series, "layer", "entropy, nats", markers=True, colors=colors, legend="model" not in series
            )
        if layers[0]["euclidean"] is not None:
            grid = [[head["euclidean"] for head in layer["heads"]] for layer in layers]
            found[f"Euclidean distance by layer and head{label}"] = heatmap(grid, "head", "layer", "distance")
    if rows := result.get("by_position"):
        middle = [(row["first"] + row["last"]) / 2 for row in rows]
        series = {"model": (middle, [row["perplexity"] for row in rows])}
        if "teacher" in rows[0]:
            series["teacher"] = (middle, [row["teacher"] for row in rows])
        found["Perplexity by position"] = lines(series, "tokens of context", "perplexity", log_y=True)
    if rows := result.get("recall"):
        distances = [row["distance"] for row in rows]
        measured = {"model": rows} | ({"teacher": [row["teacher"] for row in rows]} if "teacher" in rows[0] else {})
        series = {name: (distances, [100 * row["accuracy"] for row in own]) for name, own in measured.items()}
        series["chance"] = (distances, [100 * row["chance"] for row in rows])
        ends = {
            name: [(100 * low, 100 * high) for low, high in (row["interval"] for row in own)]
            for name, own in measured.items()
        }
        found["Recall by distance"] = lines(
            series, "distance, tokens", "recall, %, 95 % interval", log_x=True, markers=True, intervals=ends
        )
    if rows := result.get("state"):
        tokens = [row["tokens"] for row in rows]
        rank = {"effective rank": (tokens, [row["effective_rank"] for row in rows])}
        found["Effective rank of the state"] = lines(rank, "tokens", "effective rank", log_x=True, markers=True)
        norm = {"norm": (tokens, [row["norm"] for row in rows])}
        found["Growth of the state"] = lines(norm, "tokens", "norm", log_x=True, log_y=True, markers=True)
    return found


TICKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def plots(result: Mapping[str, Any], folder: str | Path) -> list[Path]:
    """Write the figures of an analysis to a folder, as SVG files. Returns their paths."""
    check_plots()
    paths = []
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for title, svg in figures(result).items():
            path = Path(folder) / f"{'-'.join(title.lower().replace('(', '').replace(')', '').split())}.svg"
            FIGURE.write(path, svg + "\n")
            paths.append(path)
    except OSError as error:
        raise T2RError(f"{folder} cannot be written: {error}") from error
    return paths


def _range(row: Mapping[str, Any]) -> str:
    return f"{row['first']}" if row["first"] == row["last"] else f"{row['first']}-{row['last']}"


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f} %"
