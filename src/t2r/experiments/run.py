"""Run an experiment step by step. A step's result is written as soon as there is one; a repeated call goes on."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from t2r.errors import T2RError
from t2r.experiments import data, record
from t2r.experiments.experiment import Experiment, Step, load_experiment
from t2r.storage import json_text, kind_of, write_text

BEAT = 5.0
"""Seconds between two notes of how long a step has run, so that a step that was killed still counts."""
TELL = 60.0
"""Seconds between two lines that say that a step still runs."""
EXAMPLES = Path(__file__).parents[3] / "examples"


def reproduce(
    name: str,
    *,
    data_folder: str | Path | None = None,
    models: Mapping[str, str] | None = None,
    out: str | Path | None = None,
    steps: Sequence[str] = (),
) -> dict[str, Any]:
    """Run an experiment and return its record, which is `record.json` in the folder `out`.

    The equivalent typed command of each step is printed to stderr before it runs, and its messages as they come. A step
    that is finished is not run again; one that was interrupted is repeated, and a training goes on where it was.

    Args:
        name: a shipped experiment, or a YAML file.
        data_folder: holds the texts that the experiment names.
        models: folders, or names on the hub, for the experiment's models. Others come from where it says.
        out: the folder to work in. None: `runs/NAME`.
        steps: run only these; the record then has them and what was finished before. Empty: all.
    """
    experiment = load_experiment(name)
    if unknown := sorted(set(steps) - {step.name for step in experiment.steps}):
        known = ", ".join(step.name for step in experiment.steps)
        raise T2RError(f"experiment {experiment.name} has no step {', '.join(unknown)}; it has {known}")
    folder = Path("runs", experiment.name) if out is None else Path(out)
    places = Places(experiment, None if data_folder is None else Path(data_folder), models or {}, folder)
    places.check()
    (folder / "steps").mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"experiment": experiment.name, "complete": False, "date": None, **record.machine()}
    result["steps"] = []
    for step in experiment.steps:
        if steps and step.name not in steps and not (folder / "steps" / f"{step.name}.json").is_file():
            continue
        result["steps"].append(_run_step(step, places, folder / "steps"))
        result["date"] = time.strftime("%Y-%m-%d")
        result["complete"] = len(result["steps"]) == len(experiment.steps)
        record.write_record(folder / "record.json", result)
    return result


class Places:
    """Where the names of an experiment are on this machine."""

    def __init__(self, experiment: Experiment, folder: Path | None, models: Mapping[str, str], out: Path) -> None:
        self.experiment, self.folder, self.out = experiment, folder, out
        if unknown := sorted(set(models) - set(experiment.models)):
            known = ", ".join(experiment.models) or "none"
            raise T2RError(f"experiment {experiment.name} has no model {', '.join(unknown)}; it has {known}")
        self.models = {name: models.get(name, source) for name, source in experiment.models.items()}
        for name, source in experiment.models.items():
            if name not in models and source.startswith("examples/"):
                self.models[name] = str(EXAMPLES / source.removeprefix("examples/"))
        self.given = set(models)
        self.names: dict[str, str] = {}
        """From a path to its name."""

    def check(self) -> None:
        """One error for all that is missing."""
        if self.folder is not None and kind_of(self.folder) != "folder":
            raise T2RError(f"--data: there is no folder {self.folder}")
        if lacks := data.missing(self.experiment.texts(), self.folder):
            raise T2RError(
                f"experiment {self.experiment.name} needs {', '.join(lacks)} (or .xz, .gz) in "
                f"{'a folder that --data names' if self.folder is None else self.folder}; t2r reproduce --list says "
                "where these texts come from"
            )
        for name, path in self.models.items():
            local = name in self.given and (path.startswith((".", "/", "~")) or path.count("/") > 1)
            if (local or Path(path).is_absolute()) and kind_of(Path(path).expanduser()) != "folder":
                raise T2RError(f"model {name}: there is no folder {path}; name it with --model {name}=FOLDER")
        for step in self.experiment.steps:
            for example in step.names("examples"):
                if not step.optional and not (EXAMPLES / example).exists():
                    raise T2RError(f"step {step.name} needs examples/{example} of the repository: run it in a checkout")

    def path(self, kind: str, name: str) -> str:
        if kind == "model":
            found = self.models[name]
        elif kind == "out":
            found = str(self.out / name)
        elif kind == "examples":
            found, name = str(EXAMPLES / name), f"examples/{name}"
        else:
            assert self.folder is not None
            found = str(data.prepared(name, self.folder, self.out / "data"))
        self.names[found] = name
        return found


def _run_step(step: Step, places: Places, folder: Path) -> dict[str, Any]:
    """The step's part of the record: run now, or before by the same command."""
    file, clock = folder / f"{step.name}.json", folder / f"{step.name}.seconds"
    words = step.words(places.path)
    done = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    if done is not None and done["command"] != step.label:
        raise T2RError(
            f"{file} is of another command ({done['command']}): the experiment was changed since. Give another --out"
        )
    _say(f"{step.name}: {shlex.join(['t2r', *words])}")
    if done is not None and "failed" not in done:
        _say(f"{step.name}: done before, in {done['seconds']:.0f} s")
        return done
    before = float(clock.read_text()) if clock.is_file() else 0.0
    if _made(step, places):  # all but the note that it is
        code, seconds, output, last = 0, before, "", ""
    else:
        code, seconds, output, last = _call(step.name, words, before, clock)
    part: dict[str, Any] = {"name": step.name, "command": step.label, "seconds": round(seconds, 1)}
    if code:
        why = last.removeprefix("t2r: ") or f"exit code {code}"
        if not step.optional:
            raise T2RError(f"step {step.name} failed: {why}")
        _say(f"{step.name}: left out: {why}")
        part["failed"] = record.compact(why, places.names)
    else:
        text = output if (made := _made(step, places)) is None else made.read_text(encoding="utf-8")
        part["result"] = record.compact(json.loads(text), places.names)
        _say(f"{step.name}: {seconds:.0f} s")
    write_text(file, json_text(part, 1))
    return part


def _made(step: Step, places: Places) -> Path | None:
    """The results in the folder that a step makes, once it is whole."""
    if step.command[0] not in ("convert", "pretrain"):
        return None
    results = places.out / step.name / "results.json"
    return results if results.is_file() else None


def _call(step: str, words: list[str], before: float, clock: Path) -> tuple[int, float, str, str]:
    """Run `t2r ...`: its exit code, seconds with those of earlier attempts, JSON, and the last line of its messages.

    A command that trains shows its messages; it writes its results into the folder that it makes."""
    makes_folder = words[0] in ("convert", "pretrain")
    command = [sys.executable, "-m", "t2r", *words, *([] if makes_folder else ["--json"])]
    last = [""]

    def forward(lines: Any) -> None:
        for line in lines:
            sys.stderr.write(line)
            sys.stderr.flush()
            last[0] = line.strip() or last[0]

    began, told = time.monotonic(), before
    with tempfile.TemporaryFile("w+", encoding="utf-8") as stdout:
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment)
        messages = threading.Thread(target=forward, args=(process.stderr,), daemon=True)
        messages.start()
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(BEAT)
                seconds = before + time.monotonic() - began
                write_text(clock, f"{seconds:.1f}")
                if seconds > told + TELL:
                    _say(f"{step}: {seconds:.0f} s so far")
                    told = seconds
                if process.returncode is not None:
                    break
        except BaseException:  # Ctrl-C, or a signal that main() turns into an exception
            process.terminate()
            process.wait()
            raise
        messages.join()
        stdout.seek(0)
        return process.returncode, before + time.monotonic() - began, stdout.read(), last[0]


def _say(line: str) -> None:
    print(f"t2r: {line}", file=sys.stderr, flush=True)
