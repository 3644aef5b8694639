"""The record of an experiment: results, commands, machine, versions, date, and the time of each step."""

from __future__ import annotations

import json
import platform
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from t2r.errors import T2RError
from t2r.experiments.experiment import Experiment
from t2r.storage import Output, beginning, json_text

REPOSITORY = Path(__file__).parents[3] / "experiments"
"""The records and the claims of the paper in a checkout. An installed package does not have them."""
DROPPED = ("log", "by_position", "nll")
"""Long parts of results that no table shows. They are left out of records."""

OF_ANALYSIS = ("model", "teacher", "text", "window", "words", "samples", "mean", "by_distance", "notes")
"""What a record keeps of an analysis: means, but not the values of each layer and head."""
PROVENANCE = ("date", "machine", "versions", "commit")
"""Facts of a step that a record states once if all its steps have them in common."""


def is_record(path: Path) -> bool:
    return beginning(path).startswith('{\n "experiment": ')


RECORD = Output("a record", is_record)


def recorded(name: str) -> dict[str, Any] | None:
    """Return the published record of an experiment, or None if there is none or this is not a checkout."""
    entry = REPOSITORY / "records" / f"{name}.json"
    return json.loads(entry.read_text(encoding="utf-8")) if entry.is_file() else None


def claims_of(record: Mapping[str, Any]) -> list[str]:
    """Return the claims of the paper that a record is about, as lines of text. Without a checkout there are none."""
    file = REPOSITORY / "claims.py"
    return runpy.run_path(str(file))["claims_of"](record) if file.is_file() else []


def joined(experiment: Experiment, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the record of finished steps.

    Its date is that of the newest step, and its machine that of most of the steps of this date. Other steps say so
    themselves."""
    nowhere: dict[str, Any] = {"date": None, "machine": {}, "versions": {}, "commit": None}
    date = max((str(part.get("date") or "") for part in parts), default="")
    newest = [part for part in parts if str(part.get("date") or "") == date]
    sources = [{key: part[key] for key in PROVENANCE if key in part} for part in newest]
    common = nowhere | max(reversed(sources), key=sources.count, default={})
    head: dict[str, Any] = {"experiment": experiment.name}
    if experiment.scale is not None:
        head["scale"] = experiment.scale
    head |= {"complete": len(parts) == len(experiment.steps), **common}
    head["steps"] = [
        {key: value for key, value in part.items() if key not in PROVENANCE or value != common[key]} for part in parts
    ]
    return head


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    RECORD.write(path, json_text(record, 1) + "\n")


def summary(command: str, result: Any) -> Any:
    """Return the part of a command's result that a record keeps."""
    return {key: result[key] for key in OF_ANALYSIS if key in result} if command == "analyze" else result


def compact(value: Any, names: Mapping[str, str]) -> Any:
    """Return results for a record: with five digits, and names in place of paths of this machine."""
    if isinstance(value, dict):
        return {compact(key, names): compact(part, names) for key, part in value.items() if key not in DROPPED}
    if isinstance(value, list):
        return [compact(part, names) for part in value]
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, str):
        for path in sorted(names, key=len, reverse=True):  # one path may be a prefix of another
            value = re.sub(rf"(?<![\w./-]){re.escape(path)}(?![\w-])", names[path].replace("\\", r"\\"), value)
    return value


def machine() -> dict[str, Any]:
    """Return devices and versions, from another process: this one does not import torch."""
    asked = subprocess.run([sys.executable, "-m", "t2r", "info", "--json"], capture_output=True, text=True)
    if asked.returncode:
        raise T2RError(f"t2r info failed: {asked.stderr.strip() or asked.returncode}")
    facts = json.loads(asked.stdout)
    cpu, gpus = facts["devices"]["cpu"], facts["devices"]["cuda"]
    return {
        "machine": {
            "gpus": [gpu["name"] for gpu in gpus],
            "cpu": _processor(),
            "cores": cpu["cores"],
            "threads": cpu["threads"],
        },
        "versions": {name: version for name, version in facts["versions"].items() if version},
        "commit": commit(),
    }


def _processor() -> str | None:
    """Return the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine() or None
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return named or platform.machine()


def commit() -> str | None:
    """Return the commit of a checkout, with a + if files were changed. None outside of a checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    if head is None or git("ls-files", "--error-unmatch", Path(__file__).name) is None:  # another project's
        return None
    return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
