"""Generates the tables of docs/results.md and docs/performance.md from the records of experiments.

Run `python -m t2r.experiments.tables docs/results.md` to update the page. `<!-- record: NAME -->` starts the record of
an experiment, `<!-- together: STEP NAME NAME -->` one table of the same step of several, `<!-- claims: SCALE -->` the
claims of the paper; `<!-- end -->` ends each. The text between such parts is written by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from t2r.experiments.cells import cells_of_record
from t2r.experiments.claims import claims_list
from t2r.experiments.comparison import grid_table
from t2r.experiments.experiment import MAKING, Experiment, load_experiment, scales_of, shipped_experiments
from t2r.experiments.markup import WIDTH, wrapped
from t2r.experiments.record import recorded
from t2r.experiments.results import (
    analysis_table,
    decoding_table,
    evaluation_tables,
    memory_table,
    ops_table,
    steps_table,
    training_table,
    translation_table,
)

PART = re.compile(r"(<!-- (record|together|claims): ([\w ._-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def page(text: str) -> str:
    """Return the page with its generated parts updated."""
    return PART.sub(lambda found: f"{found[1]}{_part(found[2], found[3].split())}{found[4]}", text)


def _part(kind: str, names: Sequence[str]) -> str:
    if kind == "claims":
        return "".join(map(claims_list, names))
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


def of_record(name: str) -> Experiment | None:
    """Return the shipped experiment of a record: NAME, or NAME-SCALE. None: there is none."""
    known = shipped_experiments()
    if name in known:
        return None if scales_of(name) else load_experiment(name)
    base, _, scale = name.rpartition("-")
    return load_experiment(base, scale) if base in known and scale in scales_of(base) else None


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


# --- A record -----------------------------------------------------------------------------------------------


def provenance(record: Mapping[str, Any]) -> str:
    """Return the date, machine, versions and total time, in one line."""
    device = _device(record["machine"]) or "CPU"
    versions = ", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items())
    seconds = [part["seconds"] for part in record["steps"] if part.get("seconds") is not None]
    took = [f"{sum(seconds) / 60:.1f} minutes over all steps"] if seconds else []
    known = [record["date"], device, versions, f"commit {record['commit']}" if record.get("commit") else "", *took]
    scale = f" --scale {record['scale']}" if "scale" in record else ""
    line = f"`t2r reproduce {record['experiment']}{scale}`: " + "; ".join(word for word in known if word) + "."
    if record.get("hand_run"):
        line = f"{'; '.join(word for word in known if word)}. {record['hand_run']}"
    if not record.get("complete", True):
        line += " Not all steps are recorded."
    elsewhere = [found for part in record["steps"] if (found := _device(part.get("machine", {}))) and found != device]
    if elsewhere:
        were = "was" if len(elsewhere) == 1 else "were"
        on = " and ".join(dict.fromkeys(elsewhere))
        line += f" {len(elsewhere)} of {len(record['steps'])} steps {were} run on {on}."
    return wrapped(line) + "\n"


def _device(machine: Mapping[str, Any]) -> str:
    """Return the devices of a machine in words, or nothing if none is stated."""
    if not machine:
        return ""
    return ", ".join(machine.get("gpus") or []) or f"{machine.get('cpu') or 'CPU'}, {machine.get('cores')} cores"


def commands(record: Mapping[str, Any]) -> str:
    """Return the commands of the steps as a code block, with their times and failures."""
    lines = []
    for part in record["steps"]:
        took = "" if part.get("seconds") is None else f"    # {part['seconds']:.0f} s"
        first, *rest = _folded(part["command"])
        lines += [f"    {first}", *(f"        {line}" for line in rest)]
        lines[-1] += took
        if "failed" in part:
            lines.append(f"        # could not be run: {part['failed']}")
    return "\n".join(lines) + "\n"


def _folded(command: str) -> list[str]:
    """Fold a command before options, with a backslash at the end of each line but the last."""
    lines: list[str] = []
    for piece in re.split(r" (?=--)", command):
        if lines and len(lines[-1]) + len(piece) + 1 <= WIDTH - 16:
            lines[-1] += f" {piece}"
        else:
            lines.append(piece)
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def record_tables(record: Mapping[str, Any]) -> list[str]:
    """Return the results of every step as Markdown tables, or the table of a grid."""
    found: list[str] = []
    several = len([part for part in record["steps"] if part["command"].split()[1] in MAKING and "result" in part]) > 1
    gridded = "scale" in record and bool(cells_of_record(record))
    if gridded:
        named = of_record(f"{record['experiment']}-{record['scale']}")
        found.append(grid_table(named or Experiment(record["experiment"], record["experiment"], ()), record))
    for part in record["steps"]:
        if "result" not in part:
            continue
        command, kind = (*part["command"].split(), "")[1:3]
        if gridded and command != "bench":
            continue
        if command == "evaluate":
            found += evaluation_tables(part["result"])
        elif command == "analyze":
            found.append(analysis_table(part["result"]))
        elif command == "bench" and isinstance(part["result"], list):
            found += [decoding_table(report) for report in part["result"]]
        elif command == "bench":
            made = {"translate": translation_table, "memory": memory_table, "train": steps_table}.get(kind, ops_table)
            found.append(made(part["result"]))
        else:
            found.append(training_table(part["result"], part["name"] if several else ""))
    return [table for table in _joined(found) if table]


def _joined(tables: Iterable[str]) -> list[str]:
    """Join tables with the same header, such as those of two benchmarks. Equal rows appear once."""
    found: dict[str, dict[str, None]] = {}
    for table in tables:
        header, rule, rows = (*table.split("\n", 2), "", "")[:3]
        own = found.setdefault(f"{header}\n{rule}\n" if rule else table, {})
        own |= dict.fromkeys(rows.splitlines(keepends=True))
    return [header + "".join(own) for header, own in found.items()]


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
