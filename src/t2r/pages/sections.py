"""The sections of a page, one function for each kind of result. Those of training are in `t2r.pages.training`."""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from t2r import evaluation
from t2r.analysis import findings as analyses
from t2r.bench import decoding
from t2r.bench.figures import add_decoding
from t2r.errors import T2RError
from t2r.evaluation.overview import names_of
from t2r.evaluation.translation import TRANSLATIONS
from t2r.experiments import charts
from t2r.experiments.comparison import cell_titles
from t2r.experiments.record import claims_of
from t2r.experiments.tables import commands, of_record, provenance, record_tables
from t2r.pages.training import curves, made, plain
from t2r.reporting.page import COLORS, Page, bars, lines
from t2r.storage import LARGEST_JSON, kind_of, parse_json, read_inside

MANY_STEPS = 6
"""The commands of an experiment with more steps are folded."""
SHOWN_LINES = 8
"""Translations shown of each model."""
LARGEST_TRANSLATIONS = 64 << 20
"""Bytes of a file of translations."""

logger = logging.getLogger(__name__)


def title(path: Path, content: Any) -> str:
    """Return the title of a page: what was measured, and of which model."""
    if isinstance(content, Mapping) and "experiment" in content:
        return f"Experiment {content['experiment']}"
    if isinstance(content, Mapping) and "by_distance" in content:
        return f"Analysis of {Path(content['model']).name}"
    if isinstance(content, Mapping) and "stages" in content:
        name = path.resolve().name if kind_of(path) == "folder" else path.stem
        return f"{'Conversion' if 'teacher' in content else 'Training'}: {name}"
    if isinstance(content, list) and "model" in content[0]:
        return "Evaluation: " + ", ".join(dict.fromkeys(Path(result["model"]).name for result in content))
    if isinstance(content, Mapping) and "plans" in content:
        return f"Memory plans: {path.stem}"
    return f"Benchmark: {path.stem}"


# --- Experiments --------------------------------------------------------------------------------------------


def experiment(page: Page, record: Mapping[str, Any], path: Path) -> None:
    """Add the record of an experiment: where and how it was made, its tables, and its figures."""
    page.paragraph(provenance(record).replace("`", ""))
    drawn_later = [step for step in record["steps"] if _is_decoding(step.get("result"))]  # with their own tables
    for table in record_tables({**record, "steps": [step for step in record["steps"] if step not in drawn_later]}):
        page.table(*_cells(table))
    if claims := claims_of(record):
        page.subheading("Claims of the paper")
        page.show(claims)
    shipped = of_record(f"{record['experiment']}-{record['scale']}") if "scale" in record else None
    drawn = {} if shipped is None else charts.drawn(shipped, record)
    if any("cell" in step for step in record["steps"]):
        titles = {} if shipped is None else cell_titles(shipped, record)
        drawn |= _grid_figures(record["steps"], titles, drawn)
    else:
        drawn |= {f"{step['name']}: {name}": svg for step in record["steps"] for name, svg in _drawn(step).items()}
    if drawn:
        page.figures(drawn)
    for step in drawn_later:
        page.subheading(step["name"])
        for part in step["result"]:
            add_decoding(page, decoding_report(part))
    if kind_of(path) == "folder" and not any("cell" in step for step in record["steps"]):
        for step in record["steps"]:
            file = Path(step["name"], "results.json")
            if (text := read_inside(path, file, LARGEST_JSON)) is not None:
                results = parse_json(text, str(path / file))
                named = {f"{step['name']}, {stage}": log for stage, log in (results.get("log") or {}).items() if log}
                curves(page, named)
    page.subheading("Commands")
    count = len(record["steps"])
    listed = commands(record).replace("\n    ", "\n").removeprefix("    ")
    page.code(listed, f"{count} commands" if count > MANY_STEPS else None)
    page.subheading("Machine")
    facts = {name: value for name, value in record.get("machine", {}).items() if value}
    facts |= record.get("versions", {}) | {"commit": record.get("commit"), "date": record.get("date")}
    page.facts(
        {
            name: ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            for name, value in facts.items()
            if value
        }
    )


def _is_decoding(result: Any) -> bool:
    return isinstance(result, list) and bool(result) and "points" in result[0]


def _drawn(step: Mapping[str, Any]) -> dict[str, str]:
    """Return the figures of a step by title. Its tables are those of the record."""
    result = step.get("result")
    if isinstance(result, Mapping) and "by_distance" in result:
        return analyses.figures(result)
    if isinstance(result, list) and result and "model" in result[0]:
        return evaluation_figures(result)
    return {}


def _grid_figures(
    steps: Sequence[Mapping[str, Any]], named: Mapping[str, str], known: Container[str] = ()
) -> dict[str, str]:
    """Return figures over all cells of a grid: perplexity or BLEU, and attention by distance unless it is known.
    `named` has titles of the cells."""
    scores: dict[str, dict[str, float]] = {"perplexity": {}, "bleu": {}}
    attention: dict[str, tuple[list[float], list[float]]] = {}
    for step in steps:
        result = step.get("result")
        for row in result if isinstance(result, list) else ():
            for measure, found in scores.items():
                if isinstance(row, Mapping) and row.get(measure) is not None:
                    model = row.get("model", step["name"])
                    found.setdefault(named.get(model, model), row[measure])
        if isinstance(result, Mapping) and result.get("by_distance"):
            for name, key in ((result["model"], "model"), (result.get("teacher"), "teacher")):
                points = [(1 + (r["first"] + r["last"]) / 2, r[key]) for r in result["by_distance"] if r.get(key)]
                if name and points and len(attention) < len(COLORS):
                    attention.setdefault(named.get(name, name), tuple(map(list, zip(*points, strict=True))))  # type: ignore[arg-type]
    titles = {"perplexity": "Perplexity of each model", "bleu": "BLEU of each model"}
    drawn = {
        titles[measure]: bars(found, measure, colors=COLORS[1:2]) for measure, found in scores.items() if len(found) > 1
    }
    if attention and "Attention by distance" not in known:
        drawn["Attention by distance"] = lines(
            attention, "distance + 1", "attention", log_x=True, log_y=True, ticks=analyses.TICKS
        )
    return drawn


def _cells(markdown: str) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of a Markdown table."""
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in markdown.strip().splitlines()]
    return rows[0], rows[2:]


# --- Benchmarks, evaluations, analyses ----------------------------------------------------------------------


def benchmark(page: Page, content: Any, path: Path) -> None:
    """Add the JSON output of `t2r bench`."""
    if isinstance(content, list):
        for part in content:
            add_decoding(page, decoding_report(part))
        return
    page.facts({name.replace("_", " "): plain(value) for name, value in content["settings"].items()})
    rows = content["rows"] if "rows" in content else content["points"]
    if all("length" in row and "model" in row and row.get("tokens_per_second") for row in rows):
        speeds: dict[str, tuple[list[float], list[float]]] = {}
        for row in rows:
            lengths, values = speeds.setdefault(row["model"], ([], []))
            lengths.append(row["length"])
            values.append(row["tokens_per_second"])
        page.figures({"Speed by length": lines(speeds, "length in tokens", "tokens/s", log_x=True, markers=True)})
    header = [name for name in rows[0] if any(row.get(name) is not None for row in rows)]
    page.table([name.replace("_", " ") for name in header], [[_cell(row.get(name)) for name in header] for row in rows])


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def decoding_report(content: Mapping[str, Any]) -> decoding.Report:
    try:
        measured: dict[str, Any] = {"settings": decoding.DecodingSettings(**content["settings"])}
        measured |= {"points": [decoding.Point(**point) for point in content["points"]]}
        return decoding.Report(**{**content, **measured})
    except (KeyError, TypeError) as error:
        raise T2RError(f"not a result of t2r bench decode of this version: {error}") from error


def evaluation_figures(results: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return figures of perplexity by position, BLEU by source length, and recall by distance."""
    drawn: dict[str, str] = {}
    names = names_of(results)
    position = {
        name: ([(b["first"] + b["last"]) / 2 for b in r["by_position"]], [b["perplexity"] for b in r["by_position"]])
        for name, r in zip(names, results, strict=True)
        if r.get("by_position")
    }
    recall = {
        name: ([row["distance"] for row in r["recall"]], [100 * row["accuracy"] for row in r["recall"]])
        for name, r in zip(names, results, strict=True)
        if r.get("recall")
    }
    if position:
        drawn["Perplexity by position"] = lines(position, "tokens of context", "perplexity", log_y=True)
    lengths = {
        name: ([float(part["first"]) for part in r["by_length"]], [part["bleu"] for part in r["by_length"]])
        for name, r in zip(names, results, strict=True)
        if len(r.get("by_length") or ()) > 1
    }
    if lengths:
        drawn["BLEU by source length"] = lines(lengths, "tokens of the source, from", "BLEU", markers=True)
    if recall:
        drawn["Recall by distance"] = lines(recall, "distance, tokens", "recall, %", log_x=True, markers=True)
    return drawn


def evaluations(page: Page, results: Sequence[dict[str, Any]], path: Path) -> None:
    """Add the JSON output of `t2r evaluate`: tables, figures, and translations that were saved."""
    page.show(evaluation.tables(results))
    if drawn := evaluation_figures(results):
        page.figures(drawn)
    texts = {}
    for name, result in zip(names_of(results), results, strict=True):
        if result.get("output") and (shown := translations(result["output"], path)) is not None:
            texts[name] = "\n".join(shown)
    if texts:
        page.subheading("Translations")
        page.quotes(texts)


def translations(output: str, path: Path) -> list[str] | None:
    """Return the first translations of a file that a result names; None if it is not there.

    The result may be a stranger's, and name any file of the user: only translations in the folder of the result are
    shown."""
    folder, file = Path(os.path.realpath(path)).parent, Path(os.path.realpath(output))
    if kind_of(file) != "file":
        return None
    if not file.is_relative_to(folder) or not TRANSLATIONS.recognizes(file):
        logger.warning("%s is not shown: it is not a file of translations in the folder of %s", output, path)
        return None
    text = read_inside(folder, file, LARGEST_TRANSLATIONS)
    return None if text is None else text.splitlines()[:SHOWN_LINES]


def analysis(page: Page, result: Mapping[str, Any], path: Path) -> None:
    """Add the JSON output of `t2r analyze`."""
    summary, *others = analyses.listed_tables(result)
    page.table(summary.header, summary.rows, summary.title)
    page.figures(analyses.figures(result))
    for table in others:
        page.table(table.header, table.rows, table.title)
    for note in result["notes"]:
        page.paragraph(f"Note: {note}.")
    made(page, result.get("made"))
