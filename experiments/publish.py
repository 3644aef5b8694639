"""Generates docs/records, the tables of docs/*.md and the figures from the records: `python experiments/publish.py`.

docs/records has a page for each record, with its commands and all its tables, and the claims of the paper for each
scale. In the other pages, `<!-- summary: NAME -->` starts a table of summaries.py, `<!-- claims: SCALE … -->` the
claims of the paper, at further scales if they are recorded there, and `<!-- budgets: NAME … -->` the table of an
experiment about memory budgets, where later records fill in the budgets that the first does not have. All end with
`<!-- end -->`.
The text between such parts is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import budgets
import quality
import summaries
from claims import CLAIMS, claims_list
from t2r.errors import T2RError
from t2r.experiments.charts import plot
from t2r.experiments.experiment import Experiment, load_experiment, scales_of, shipped_experiments
from t2r.experiments.markup import markdown, wrapped
from t2r.experiments.record import REPOSITORY, recorded
from t2r.experiments.tables import commands, of_record, provenance, record_tables

DOCS = Path(__file__).parents[1] / "docs"
PART = re.compile(r"(<!-- (summary|claims|budgets): ([\w ._-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
SCALE = "small"
"""The scale of an experiment that is shown if it has no record; its last, if it does not have this one."""


def page(text: str) -> str:
    """Return the page with its generated parts updated."""
    return PART.sub(lambda found: f"{found[1]}{_part(found[2], found[3].split())}{found[4]}", text)


def _part(kind: str, names: Sequence[str]) -> str:
    if kind == "budgets":
        return budgets_of(*names)
    if kind == "claims":
        return summaries.claims(*names)
    return "".join(map(summaries.summary, names))


def budgets_of(*names: str) -> str:
    """Return the table of an experiment about memory budgets."""
    records = [record for name in names if (record := recorded(name))]
    return budgets.table(*records) if records else f"Not recorded yet: `t2r reproduce {names[0]}`.\n"


# --- Pages of records -------------------------------------------------------------------------------------


def record_names() -> list[str]:
    """Return the names of all records, and of the shipped experiments that have none yet."""
    scales = {name: scales_of(name) for name in shipped_experiments()}
    wanted = {f"{name}-{SCALE if SCALE in own else own[-1]}" if own else name for name, own in scales.items()}
    return sorted(wanted | {path.stem for path in (REPOSITORY / "records").glob("*.json")})


def record_pages() -> dict[str, str]:
    """Return the generated pages in docs/records, by the names of their files."""
    names = record_names()
    known = [record for name in names if (record := recorded(name)) and "scale" in record]
    scales = sorted({record["scale"] for record in known if any(c.experiment == record["experiment"] for c in CLAIMS)})
    pages = {f"{name}.md": record_page(name) for name in names}
    pages |= {f"claims-{scale}.md": claims_page(scale) for scale in scales}
    return pages | {"README.md": index(names, scales)}


def record_page(name: str) -> str:
    """Return the page of a record: what was asked, where and when, the commands, all tables, and figures."""
    record, experiment = recorded(name), of_record(name)
    head = f"# {experiment.title if experiment else name}\n\n{_source(name)}\n"
    if experiment is not None and experiment.about:
        head += f"{wrapped(experiment.about)}\n\n"
    if record is None:
        return f"{head}Not recorded yet: `{experiment.call if experiment else f't2r reproduce {name}'}`.\n"
    figures = []
    if experiment is not None and experiment.scale is not None:
        places = [(figure["title"], figure_file(experiment, figure)) for figure in experiment.figures]
        figures = [f"![{title}](../{place})\n" for title, place in places]
    parts = [provenance(record), "## Results\n", *record_tables(record), *figures, "## Commands\n", commands(record)]
    return head + "\n".join(parts)


def _source(name: str) -> str:
    return (
        f"Generated from `experiments/records/{name}.json` by `python experiments/publish.py`.\n"
        "[What the columns mean](../results.md#what-the-columns-mean) · [all records](README.md)\n"
    )


def claims_page(scale: str) -> str:
    """Return the page with all claims of the paper and the numbers that decide them."""
    return (
        f"# The claims of the paper, at the scale `{scale}`\n\nGenerated from `experiments/records` by "
        "`python experiments/publish.py`; the rules are in `experiments/claims.py`. [The page](../paper.md)\n\n"
        + claims_list(scale)
    )


def index(names: Sequence[str], scales: Sequence[str]) -> str:
    """Return the page that lists all records."""
    rows = []
    for name in names:
        record, experiment = recorded(name) or {}, of_record(name)
        machine = record.get("machine", {})
        device = ", ".join(machine.get("gpus") or []) or machine.get("cpu") or ""
        rows.append([f"[{name}]({name}.md)", experiment.title if experiment else "", record.get("date", ""), device])
    claimed = "".join(f"- [The claims of the paper, scale `{scale}`](claims-{scale}.md)\n" for scale in scales)
    return (
        "# Records\n\nThe commands and all tables of every experiment, generated from `experiments/records` by "
        "`python experiments/publish.py`.\n`t2r reproduce NAME` runs one again.\n\n"
        f"{markdown(('record', 'experiment', 'date', 'machine'), rows)}\n{claimed}"
    )


# --- Figures ----------------------------------------------------------------------------------------------


def figure_file(experiment: Experiment, figure: Mapping[str, Any]) -> str:
    """Return the name of the file of a figure, beside the page."""
    return f"{figure.get('name', experiment.name)}-{experiment.scale}.svg"


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


def draw_all(folder: Path) -> list[Path]:
    """Draw the figures of README.md, of the pages and of all shipped records. Returns their files."""
    files = [folder / "quality.svg", folder / "decoding.svg"]
    quality.draw(files[0])
    draw_decoding(files[1])
    for name in shipped_experiments():
        for scale in scales_of(name):
            if (record := recorded(f"{name}-{scale}")) is not None:
                experiment = load_experiment(name, scale)
                for figure in experiment.figures:
                    files.append(folder / figure_file(experiment, figure))
                    draw(experiment, record, figure, files[-1])
    return files


EXPERIMENT, BATCH = "smollm2-decode-gpu", 16
ROWS = {
    "smollm2, engine": "SmolLM2-135M",
    "kept, engine": "converted, 7 softmax layers",
    "pure, engine": "converted: an RNN",
    "smollm2, window of 390, engine": "SmolLM2-135M, window of 390",
}
"""The models in the figure of docs/performance.md, all decoded by the engine, and their labels."""


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


def publish(folder: Path) -> None:
    """Update the pages and figures in a folder. Pages of records that are gone are deleted."""
    for path in sorted(folder.glob("*.md")):
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
    records, pages = folder / "records", record_pages()
    records.mkdir(exist_ok=True)
    for path in records.glob("*.md"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        (records / name).write_text(text, encoding="utf-8")
    draw_all(folder)


if __name__ == "__main__":
    publish(DOCS)
