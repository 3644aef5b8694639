"""The sections of a page, one function for each kind of result."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from t2r import evaluation
from t2r.analysis import report as analyses
from t2r.bench import decoding
from t2r.bench.figures import add_decoding
from t2r.config import OPTIONS
from t2r.errors import T2RError
from t2r.experiments import charts
from t2r.experiments.claims import claims_of
from t2r.experiments.comparison import cell_titles
from t2r.experiments.tables import commands, of_record, provenance, record_tables
from t2r.reporting.page import COLORS, Page, bars, lines
from t2r.storage import kind_of
from t2r.training.sessions.session import table_of
from t2r.words import counted

MANY_STEPS = 6
"""The commands of an experiment with more steps are folded."""
SHOWN_LINES = 8
"""Translations shown of each model."""
SIZES = (
    "model_type", "num_hidden_layers", "n_layer", "encoder_layers", "decoder_layers", "num_layers", "hidden_size",
    "n_embd", "d_model", "num_attention_heads", "n_head", "decoder_attention_heads", "num_heads", "vocab_size", "dtype",
)  # fmt: skip
"""Names of sizes in configurations of transformers."""


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
    return f"Benchmark: {path.stem}"


# --- Training -----------------------------------------------------------------------------------------------


def training(page: Page, results: Mapping[str, Any], path: Path) -> None:
    """Add a conversion or a pretraining: results, curves, configuration, data, machine."""
    if told := _outcome(results):
        page.paragraph(told, lead=True)
    compared = "teacher" in results
    if results.get("teacher" if compared else "untrained"):
        page.table(*table_of(dict(results), compared=compared))
    if drawn := _progress(results):
        page.figures(drawn)
    curves(page, {name: log for name, log in (results.get("log") or {}).items() if log})
    if results.get("recall"):
        page.subheading("Recall")
        page.show(evaluation.tables([{"model": path.resolve().name, "recall": results["recall"]}]))
    if results.get("sensitivity"):
        page.subheading("Sensitivity")
        rows = [(str(layer), f"{cost:+.4f}") for layer, cost in results["sensitivity"]]
        page.table(("layer", "increase in loss"), rows, "The loss if only this layer is recurrent")
    _data(page, results)
    if kind_of(path) == "folder":
        _configuration(page, path)
    _made(page, results.get("made"))


def _outcome(results: Mapping[str, Any]) -> str | None:
    last = list(results["stages"].values())[-1] if results["stages"] else {}
    value, teacher = (part.get("perplexity") for part in (last or {}, results.get("teacher") or {}))
    if value is None:
        return None
    against = "" if not teacher else f", {value / teacher - 1:+.1%} against the teacher's {teacher:.2f}"
    return f"Perplexity {value:.2f}{against}."


def curves(page: Page, logs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Add the loss and the learning rate of each stage by step."""
    drawn: dict[str, str] = {}
    for stage, log in logs.items():
        for key, what in (("loss", "loss"), ("learning_rate", "learning rate")):
            points = [(entry["step"], entry[key]) for entry in log if entry.get(key) is not None]
            if len(points) > 1:
                xs, ys = zip(*points, strict=True)
                log_y = key == "loss" and min(ys) > 0
                drawn[f"{stage}: {what}"] = lines({stage: (xs, ys)}, "step", what, log_y=log_y)
    if drawn:
        page.subheading("Training")
        page.figures(drawn)


def _data(page: Page, results: Mapping[str, Any]) -> None:
    rows = []
    for source in results.get("mixture") or ():
        read, share = sum(source["read"].values()), source.get("share_read")
        told = "" if share is None else f"{share:.1f} %"
        rows.append((Path(source["source"]).name, f"{source['tokens']:,}", f"{read:,}", told))
    if rows:
        page.subheading("Data")
        page.table(("source", "tokens", "tokens read", "share"), rows)


def _configuration(page: Page, folder: Path) -> None:
    page.subheading("Configuration")
    if kind_of(folder / "config.json") == "file":
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        base = config.get("base_config") or config
        facts = {name: base[name] for name in SIZES if base.get(name) is not None}
        if config.get("model_type") == "t2r":
            facts |= {name: config[name] for name in (*OPTIONS, "merged") if config.get(name) is not None}
        page.facts({name: _plain(value) for name, value in facts.items()})
    if kind_of(folder / "recipe.yaml") == "file":
        page.code((folder / "recipe.yaml").read_text(encoding="utf-8"), "recipe.yaml")


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).split("\n...")[0].strip()


def _made(page: Page, made: Mapping[str, Any] | None) -> None:
    """Add the command, the machine and the versions, as far as they were recorded."""
    if not made:
        return
    if made.get("command"):
        page.subheading("Command")
        page.code(made["command"])
    page.subheading("Machine")
    devices = made.get("devices") or {}
    facts = {"date": made.get("date")}
    if cpu := devices.get("cpu"):
        facts["cpu"] = f"{counted(cpu['cores'], 'core')}, torch uses {counted(cpu['threads'], 'thread')}"
    facts |= {f"cuda:{i}": gpu["name"] for i, gpu in enumerate(devices.get("cuda") or ())}
    facts |= made.get("versions") or {}
    page.facts({name: str(value) for name, value in facts.items() if value})


def samples(page: Page, folder: Path, prompts: Sequence[str]) -> None:
    """Let the model in a folder complete prompts, greedily."""
    from t2r.generation.text import generate

    if kind_of(folder / "config.json") != "file":
        raise T2RError(f"{folder} contains no model to complete prompts with")
    page.subheading("Samples")
    for completion in generate(folder, list(prompts), max_new_tokens=64, do_sample=False):
        page.quotes({completion.prompt: completion.text})


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
            add_decoding(page, _decoding(part))
    if kind_of(path) == "folder" and not any("cell" in step for step in record["steps"]):
        for step in record["steps"]:
            if kind_of(path / step["name"] / "results.json") == "file":
                results = json.loads((path / step["name"] / "results.json").read_text(encoding="utf-8"))
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
    if isinstance(result, Mapping) and "stages" in result:
        return _progress(result)
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


def _progress(results: Mapping[str, Any]) -> dict[str, str]:
    """Return a figure of the perplexity after each stage."""
    measured = {"teacher": results.get("teacher"), "swapped": results.get("swapped")}
    measured |= {f"after {name}": scores for name, scores in results["stages"].items()}
    heights = {name: scores["perplexity"] for name, scores in measured.items() if scores and scores.get("perplexity")}
    colors = [COLORS[0] if name == "teacher" else COLORS[1] for name in heights]
    return {"From the teacher to the RNN": bars(heights, "perplexity", log=True, colors=colors)} if heights else {}


def _cells(markdown: str) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of a Markdown table."""
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in markdown.strip().splitlines()]
    return rows[0], rows[2:]


# --- Benchmarks, evaluations, analyses ----------------------------------------------------------------------


def benchmark(page: Page, content: Any, path: Path) -> None:
    """Add the JSON output of `t2r bench`."""
    if isinstance(content, list):
        for part in content:
            add_decoding(page, _decoding(part))
        return
    page.facts({name.replace("_", " "): _plain(value) for name, value in content["settings"].items()})
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


def _decoding(content: Mapping[str, Any]) -> decoding.Report:
    try:
        measured: dict[str, Any] = {"settings": decoding.Settings(**content["settings"])}
        measured |= {"points": [decoding.Point(**point) for point in content["points"]]}
        return decoding.Report(**{**content, **measured})
    except (KeyError, TypeError) as error:
        raise T2RError(f"not a result of t2r bench decode of this version: {error}") from error


def short_names(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each result: the folder of the model, with as many parent folders as make it unique."""
    names: list[str] = []
    folders = [Path(r["model"]).parts or (r["model"],) for r in results]  # that of `.` has no parts
    for parts in range(1, 1 + max(map(len, folders))):
        names = [
            "/".join(folder[-parts:]) + (f", {r['variant']}" if "variant" in r else "")
            for folder, r in zip(folders, results, strict=True)
        ]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({i})" for i, name in enumerate(names, 1)]  # one model, evaluated several times


def evaluation_figures(results: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return figures of perplexity by position, BLEU by source length, and recall by distance."""
    drawn: dict[str, str] = {}
    names = short_names(results)
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
    for name, result in zip(short_names(results), results, strict=True):
        if result.get("output") and kind_of(result["output"]) == "file":
            shown = Path(result["output"]).read_text(encoding="utf-8").splitlines()[:SHOWN_LINES]
            texts[name] = "\n".join(shown)
    if texts:
        page.subheading("Translations")
        page.quotes(texts)


def analysis(page: Page, result: Mapping[str, Any], path: Path) -> None:
    """Add the JSON output of `t2r analyze`."""
    summary, *others = analyses.listed_tables(result)
    page.table(summary.header, summary.rows, summary.title)
    page.figures(analyses.figures(result))
    for table in others:
        page.table(table.header, table.rows, table.title)
    for note in result["notes"]:
        page.paragraph(f"Note: {note}.")
    _made(page, result.get("made"))
