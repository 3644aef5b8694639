"""The tables of a record, and where and how it was made, as Markdown."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from t2r.experiments.cells import base_name, cells_of_record
from t2r.experiments.comparison import grid_table
from t2r.experiments.experiment import MAKING, Experiment, load_experiment, scales_of, shipped_experiments
from t2r.experiments.markup import WIDTH, wrapped
from t2r.experiments.results import (
    analysis_table,
    decoding_table,
    evaluation_tables,
    generated_table,
    memory_table,
    ops_table,
    serving_tables,
    steps_table,
    training_table,
    translation_table,
)


def of_record(name: str) -> Experiment | None:
    """Return the shipped experiment of a record: NAME, or NAME-SCALE. None: there is none."""
    known = shipped_experiments()
    if name in known:
        return None if scales_of(name) else load_experiment(name)
    base, _, scale = name.rpartition("-")
    return load_experiment(base, scale) if base in known and scale in scales_of(base) else None


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
    cells = cells_of_record(record) if "scale" in record else {}
    gridded = bool(cells)
    if gridded:
        named = of_record(f"{record['experiment']}-{record['scale']}")
        found.append(grid_table(named or Experiment(record["experiment"], record["experiment"], ()), record))
    for part in record["steps"]:
        if "result" not in part:
            continue
        command, kind = (*part["command"].split(), "")[1:3]
        told = command in ("bench", "generate") or (command == "evaluate" and _compares(part["result"], cells))
        if gridded and not told:
            continue
        if command == "evaluate":
            found += evaluation_tables(part["result"])
        elif command == "analyze":
            found.append(analysis_table(part["result"]))
        elif command == "generate":
            found.append(generated_table(part["name"], part["result"]))
        elif command == "bench" and isinstance(part["result"], list):
            found += [decoding_table(report) for report in part["result"]]
        elif command == "bench" and kind == "serve":
            found += serving_tables(part["result"])
        elif command == "bench":
            made = {"translate": translation_table, "memory": memory_table, "train": steps_table}.get(kind, ops_table)
            found.append(made(part["result"]))
        else:
            found.append(training_table(part["result"], part["name"] if several else ""))
    return [table for table in _joined(found) if table]


def _compares(rows: Iterable[Mapping[str, Any]], cells: Collection[str]) -> bool:
    """Return whether an evaluation has more than the table of a grid: models that the grid has not, or variants."""
    return any("variant" in row or base_name(row["model"]) not in cells for row in rows)


def _joined(tables: Iterable[str]) -> list[str]:
    """Join tables with the same header, such as those of two benchmarks. Equal rows appear once."""
    found: dict[str, dict[str, None]] = {}
    for table in tables:
        header, rule, rows = (*table.split("\n", 2), "", "")[:3]
        own = found.setdefault(f"{header}\n{rule}\n" if rule else table, {})
        own |= dict.fromkeys(rows.splitlines(keepends=True))
    return [header + "".join(own) for header, own in found.items()]
