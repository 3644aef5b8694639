"""The cells of a recorded grid: what was trained, what it cost, and what was measured on it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from statistics import mean, stdev
from typing import Any

from t2r.experiments.experiment import MAKING

BESIDE = ("novels", "speeches")
"""Texts that are measured beside a main one."""
TEACHER = "teacher"
"""The name of a teacher, also of one that no step makes."""
OF_ANALYSIS = ("euclidean", "jensen_shannon", "entropy")
"""Measures of `t2r analyze`, means over layers and heads."""


@dataclass
class Cell:
    """A model of a grid, with the values of all its seeds."""

    name: str
    labels: dict[str, str]
    """Its label on each axis."""
    parent: str | None = None
    """The cell that it was converted from."""
    tokens: int = 0
    """Tokens that it was trained on."""
    batch_tokens: int = 0
    """Tokens per optimizer step, if its command says so."""
    peak: int | None = None
    """The most memory of a GPU that a stage of its training needed, in bytes."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of training, of each seed."""
    values: dict[str, list[float]] = field(default_factory=dict)
    """Measures by name, of each seed: `valid` and `test` (perplexity), `bleu`, `tatoeba` (BLEU on its sentences), a
    measure of an analysis, or `trained` (perplexity at the end of training)."""
    windows: int | None = None
    """The number of windows of `trained`."""
    parameters: int | None = None
    state: int | None = None
    """Bytes of the state, or of keys and values after a window. For translation, those of causal attention."""
    cross: int | None = None
    """For translation, the bytes of cross attention."""
    kept_tokens: int | None = None
    """For translation, the tokens of source and target for which bytes were counted, if they depend on it: the mean of
    the test set of `bleu`."""
    failed: str = ""
    machine: Any = None
    """Where it was trained, as far as its time depends on it. Times of different machines are not comparable."""

    def __getitem__(self, measure: str) -> float | None:
        """Return the mean over seeds."""
        return mean(self.values[measure]) if self.values.get(measure) else None

    def spread(self, measure: str) -> float | None:
        """Return the standard deviation over seeds, if there are several."""
        found = self.values.get(measure, [])
        return stdev(found) if len(found) > 1 else None

    def add(self, measure: str, value: float | None) -> None:
        if value is not None:
            self.values.setdefault(measure, []).append(value)


def cells_of_record(record: Mapping[str, Any]) -> dict[str, Cell]:
    """Return the cells of a record by the name of the step that made them."""
    found: dict[str, Cell] = {}
    seen: set[tuple[str, str]] = set()
    commands = [shlex.split(part["command"]) for part in record["steps"]]
    if any(words[1] == "convert" and words[2] == TEACHER for words in commands):
        found[TEACHER] = Cell(TEACHER, {})  # it is given, unless a step makes it
    for part, words in zip(record["steps"], commands, strict=True):
        if words[1] in MAKING:
            _trained(found, {"machine": record.get("machine"), **part}, words)
        elif "result" in part and words[1] == "evaluate":
            for row in part["result"]:
                if (cell := found.get(base_name(row["model"]))) is not None and "variant" not in row:
                    cell.labels = cell.labels or dict(part.get("cell", {}))
                    _evaluated(cell, row, seen)
        elif "result" in part and words[1] == "analyze":
            _analyzed(found, part["result"], words)
    return found


def base_name(name: str) -> str:
    """Return the name of a step without its seed."""
    return re.sub(r"-seed\d+$", "", name)


def _trained(found: dict[str, Cell], part: Mapping[str, Any], words: list[str]) -> None:
    labels = {axis: label for axis, label in part.get("cell", {}).items() if axis != "seed"}
    cell = found.setdefault(base_name(part["name"]), Cell(base_name(part["name"]), labels))
    cell.labels = labels
    cell.failed = cell.failed or part.get("failed", "")
    if words[1] != "pretrain" and base_name(words[2]) in found:
        cell.parent = base_name(words[2])
    if "--batch-tokens" in words:
        cell.batch_tokens = int(words[words.index("--batch-tokens") + 1])
    cell.machine = _timed_on(part["machine"])
    result = part.get("result", {})
    cell.tokens = sum(result.get("trained_tokens", {}).values())
    if words[1] != "swap" and (took := sum(result.get("seconds", {}).values()) or part.get("seconds")):
        cell.seconds.append(took)
    cell.peak = max(result.get("peak_bytes", {}).values(), default=cell.peak)
    scores: Mapping[str, Any] = next(reversed(result.get("stages", {}).values()), {}) or {}  # None: not measured
    cell.add("trained", scores.get("perplexity"))
    cell.windows = scores.get("windows", cell.windows)
    if words[1] == "pretrain":  # `swap` counts the base model's
        cell.parameters = result.get("parameters", cell.parameters)


def _timed_on(machine: Mapping[str, Any] | None) -> Any:
    """Return what the time of a training depends on: with a GPU, not the number of CPU threads."""
    if not machine or not machine.get("gpus"):
        return machine
    return {name: value for name, value in machine.items() if name != "threads"}


def _evaluated(cell: Cell, row: Mapping[str, Any], seen: set[tuple[str, str]]) -> None:
    """Add what was measured on a model.

    Args:
        seen: models with their seeds, and the names of texts they were measured on.
    """
    several = row.get("measured") or [row]
    for measured in several:
        if "perplexity" not in measured:
            continue
        name = text_name(measured["text"])
        if name in BESIDE and text_name(several[0]["text"]) in BESIDE:  # in windows of another kind
            continue
        if (row["model"], name) not in seen:  # of several texts of one name, and of several windows, the first
            seen.add((row["model"], name))
            cell.add(name, measured["perplexity"])
    cell.parameters = row.get("parameters", cell.parameters)
    if "tatoeba" in row.get("source", ""):  # its sentences are short: the memory is that of the other test set
        cell.add("tatoeba", row["bleu"])
        return
    for measure in ("bleu", "tokenized_bleu"):
        cell.add(measure, row.get(measure))
    cell.state = row.get("kept_bytes", row.get("causal_bytes", cell.state))
    cell.cross = row.get("cross_bytes", cell.cross)
    cell.kept_tokens = row.get("kept_tokens", cell.kept_tokens)


def _analyzed(found: dict[str, Cell], result: Mapping[str, Any], words: list[str]) -> None:
    means = result.get("mean", {})
    if (cell := found.get(base_name(words[2]))) is not None:
        for measure in OF_ANALYSIS:
            cell.add(measure, means.get(measure))
    teacher = words[words.index("--teacher") + 1] if "--teacher" in words else ""
    if teacher in found and not found[teacher].values.get("entropy"):
        found[teacher].add("entropy", means.get("teacher_entropy"))


def text_name(text: str) -> str:
    """Return `valid` for wikitext/valid or novels/valid.txt.xz. The novels of a table about Wikipedia are `novels`."""
    return "novels" if text == "novels/valid" else PurePosixPath(text).name.split(".")[0]
