"""Generates the tables of docs/*.md and the figures in docs from the records: `python experiments/publish.py`.

`<!-- record: NAME -->` starts the record of an experiment, `<!-- together: STEP NAME NAME -->` one table of the same
step of several, `<!-- claims: SCALE -->` the claims of the paper, `<!-- budgets: NAME -->` the table and the figure of
an experiment about memory budgets; `<!-- end -->` ends each. The text between such parts is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import budgets
from claims import claims_list
from t2r.errors import T2RError
from t2r.experiments.charts import plot
from t2r.experiments.experiment import Experiment, load_experiment, scales_of, shipped_experiments
from t2r.experiments.record import recorded
from t2r.experiments.results import evaluation_tables
from t2r.experiments.tables import commands, of_record, provenance, record_tables

DOCS = Path(__file__).parents[1] / "docs"
PART = re.compile(r"(<!-- (record|together|claims|budgets): ([\w ._-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def page(text: str) -> str:
    """Return the page with its generated parts updated."""
    return PART.sub(lambda found: f"{found[1]}{_part(found[2], found[3].split())}{found[4]}", text)


def _part(kind: str, names: Sequence[str]) -> str:
    if kind == "claims":
        return "".join(map(claims_list, names))
    if kind == "budgets":
        return "".join(map(budgets_of, names))
    if kind == "record":
        (name,) = names
        record, experiment = recorded(name), of_record(name)
        if record is None:
            return f"Not recorded yet: `{experiment.call if experiment else f't2r reproduce {name}'}`.\n"
        if experiment is None or experiment.scale is None:
            return "\n".join([provenance(record), commands(record), *record_tables(record)])
        pictures = [f"![{figure['title']}]({figure_file(experiment, figure)})\n" for figure in experiment.figures]
        return "\n".join([provenance(record), *record_tables(record), *pictures])
    step, *experiments = names
    found = [record for name in experiments if (record := recorded(name)) is not None]
    results = [result for record in found for result in _results(record, step)]
    if not results:
        return f"Not recorded yet: {', '.join(f'`t2r reproduce {name}`' for name in experiments)}.\n"
    return "\n".join(evaluation_tables(_once(results)))


def budgets_of(name: str) -> str:
    """Return the table of an experiment about memory budgets, and the place of its figure."""
    if (record := recorded(name)) is None:
        return f"Not recorded yet: `t2r reproduce {name}`.\n"
    return f"{provenance(record)}\n{budgets.table(record)}\n![Quality against memory]({name}.svg)\n"


def figure_file(experiment: Experiment, figure: Mapping[str, Any]) -> str:
    """Return the name of the file of a figure, beside the page."""
    return f"{figure.get('name', experiment.name)}-{experiment.scale}.svg"


def _results(record: Mapping[str, Any], step: str) -> list[dict[str, Any]]:
    """Return the rows of an evaluation. A model made by the experiment gets the experiment's name."""
    rows: list[dict[str, Any]] = next(
        (part["result"] for part in record["steps"] if part["name"] == step and "result" in part), []
    )
    made = {part["name"] for part in record["steps"]}
    return [row | {"model": record["experiment"]} if row["model"] in made else row for row in rows]


def _once(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each model once. The teacher is in every record."""
    return list({(row["model"], row.get("variant")): row for row in reversed(list(rows))}.values())[::-1]


# --- Figures ----------------------------------------------------------------------------------------------


def draw(experiment: Experiment, record: Mapping[str, Any], figure: Mapping[str, Any], path: Path) -> None:
    """Draw a figure as an SVG file."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "t2r", "svg.fonttype": "none", "font.size": 9}):
        canvas = Figure(figsize=(5, 3), facecolor="white", layout="constrained")
        axes = canvas.subplots()
        axes.set_title(figure["title"])
        plot(axes, experiment, record, figure)
        canvas.savefig(path, format="svg", metadata={"Date": None})


BUDGETS = ("smollm2-memory-full",)
"""Records of experiments about memory budgets."""


def draw_all(folder: Path) -> list[Path]:
    """Draw the figures of all shipped records. Returns their files."""
    files = []
    for name in shipped_experiments():
        for scale in scales_of(name):
            if (record := recorded(f"{name}-{scale}")) is not None:
                experiment = load_experiment(name, scale)
                for figure in experiment.figures:
                    files.append(folder / figure_file(experiment, figure))
                    draw(experiment, record, figure, files[-1])
    for name in BUDGETS:
        if (record := recorded(name)) is not None:
            files.append(folder / f"{name}.svg")
            budgets.draw(record, files[-1])
    return files


EXPERIMENT, BATCH = "smollm2-decode-gpu", 16
ROWS = {
    "smollm2, engine": "SmolLM2-135M",
    "kept, engine": "converted, 7 softmax layers",
    "pure, engine": "converted: an RNN",
    "smollm2, window of 390, engine": "SmolLM2-135M, window of 390",
}
"""The models in the figure of README.md, all decoded by the engine, and their labels."""


def draw_decoding(path: Path) -> None:
    """Draw time per step and memory per sequence by context length."""
    import matplotlib
    from matplotlib.figure import Figure

    report = decoding_report()
    batch = report["settings"]["batch"]
    with matplotlib.rc_context({"svg.hashsalt": "t2r", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(8, 2.8), facecolor="white", layout="constrained")
        time, memory = figure.subplots(1, 2)
        for name, label in ROWS.items():
            own = [point for point in report["points"] if point["model"] == name]
            lengths = [point["length"] for point in own]
            style = "--" if "window" in name else "-"
            time.plot(lengths, [point["milliseconds"] for point in own], style, marker="o", label=label)
            held = [point["cache_bytes"] / batch / 2**20 for point in own]
            memory.plot(lengths, held, style, marker="o", label=label)
        time.set(title=f"ms per step, batch {batch}, one H200", xlabel="tokens before", ylim=(0, None))
        memory.set(title="MiB per sequence", xlabel="tokens before", ylim=(0, None))
        time.legend(frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})


def decoding_report() -> Mapping[str, Any]:
    record = recorded(EXPERIMENT)
    if record is None:
        raise T2RError(f"{EXPERIMENT} is not recorded: run t2r reproduce {EXPERIMENT}")
    reports: list[Mapping[str, Any]] = record["steps"][0]["result"]
    return next(report for report in reports if report["settings"]["batch"] == BATCH)


if __name__ == "__main__":
    for path in sorted(DOCS.glob("*.md")):
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
    draw_all(DOCS)
    draw_decoding(DOCS / "decoding.svg")
