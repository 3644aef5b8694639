"""Runs an experiment step by step. The result of each step is saved at once, so that a repeated call resumes."""

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
"""Seconds between updates of the saved time of a step, which also counts if the step is killed."""
TELL = 60.0
"""Seconds between two messages about a running step."""
EXAMPLES = Path(__file__).parents[3] / "examples"


def reproduce(
    name: str,
    *,
    data_folder: str | Path | None = None,
    models: Mapping[str, str] | None = None,
    out: str | Path | None = None,
    steps: Sequence[str] = (),
) -> dict[str, Any]:
    """Run an experiment and return its record, which is saved as `record.json` in the folder `out`.

    The command of each step is printed to stderr before it runs, followed by its messages. Finished steps are not run
    again. An interrupted step is repeated; training is resumed.

    Args:
        name: the name of a shipped experiment, or a YAML file.
        data_folder: folder with the texts that the experiment uses.
        models: folders or hub names for the experiment's models. Others are loaded from the experiment's sources.
        out: the working folder. None: `runs/NAME`.
        steps: run only these steps. The record contains them and the steps finished before. Empty: all steps.
    """
    experiment = load_experiment(name)
    if unknown := sorted(set(steps) - {step.name for step in experiment.steps}):
        known = ", ".join(step.name for step in experiment.steps)
        raise T2RError(f"experiment {experiment.name} has no step {', '.join(unknown)}; its steps are {known}")
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
    """The paths of an experiment's models, texts and folders on this machine."""

    def __init__(self, experiment: Experiment, folder: Path | None, models: Mapping[str, str], out: Path) -> None:
        self.experiment, self.folder, self.out = experiment, folder, out
        if unknown := sorted(set(models) - set(experiment.models)):
            known = ", ".join(experiment.models) or "none"
            raise T2RError(f"experiment {experiment.name} has no model {', '.join(unknown)}; its models are {known}")
        self.models = {name: models.get(name, source) for name, source in experiment.models.items()}
        for name, source in experiment.models.items():
            if name not in models and source.startswith("examples/"):
                self.models[name] = str(EXAMPLES / source.removeprefix("examples/"))
        self.given = set(models)
        self.names: dict[str, str] = {}
        """Names by path."""

    def check(self) -> None:
        """Raise T2RError if texts, models or examples are missing."""
        if self.folder is not None and kind_of(self.folder) != "folder":
            raise T2RError(f"--data: folder {self.folder} does not exist")
        if lacks := data.missing(self.experiment.texts(), self.folder):
            raise T2RError(
                f"experiment {self.experiment.name} requires {', '.join(lacks)} (or .xz, .gz) in "
                f"{'the --data folder' if self.folder is None else self.folder}; t2r reproduce --list shows "
                "the sources of these texts"
            )
        for name, path in self.models.items():
            local = name in self.given and (path.startswith((".", "/", "~")) or path.count("/") > 1)
            if (local or Path(path).is_absolute()) and kind_of(Path(path).expanduser()) != "folder":
                raise T2RError(f"model {name}: folder {path} does not exist; set it with --model {name}=FOLDER")
        for step in self.experiment.steps:
            for example in step.names("examples"):
                if not step.optional and not (EXAMPLES / example).exists():
                    raise T2RError(f"step {step.name} requires examples/{example}: run it in a checkout")

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
    """Run a step, unless it is finished, and return its part of the record."""
    file, clock = folder / f"{step.name}.json", folder / f"{step.name}.seconds"
    words = step.words(places.path)
    done = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    if done is not None and done["command"] != step.label:
        raise T2RError(
            f"{file} was made by another command ({done['command']}): the experiment has changed; give another --out"
        )
    _say(f"{step.name}: {shlex.join(['t2r', *words])}")
    if done is not None and "failed" not in done:
        _say(f"{step.name}: already done, in {done['seconds']:.0f} s")
        return done
    before = float(clock.read_text()) if clock.is_file() else 0.0
    if _made(step, places):  # interrupted between the command's end and the record
        code, seconds, output, last = 0, before, "", ""
    else:
        code, seconds, output, last = _call(step.name, words, before, clock)
    part: dict[str, Any] = {"name": step.name, "command": step.label, "seconds": round(seconds, 1)}
    if code:
        why = last.removeprefix("t2r: ") or f"exit code {code}"
        if not step.optional:
            raise T2RError(f"step {step.name} failed: {why}")
        _say(f"{step.name}: skipped: {why}")
        part["failed"] = record.compact(why, places.names)
    else:
        text = output if (made := _made(step, places)) is None else made.read_text(encoding="utf-8")
        part["result"] = record.compact(json.loads(text), places.names)
        _say(f"{step.name}: {seconds:.0f} s")
    write_text(file, json_text(part, 1))
    return part


def _made(step: Step, places: Places) -> Path | None:
    """Return the results file in the output folder of a finished step, or None."""
    if step.command[0] not in ("convert", "pretrain"):
        return None
    results = places.out / step.name / "results.json"
    return results if results.is_file() else None


def _call(step: str, words: list[str], before: float, clock: Path) -> tuple[int, float, str, str]:
    """Run `t2r ...`. Returns its exit code, seconds including earlier attempts, JSON output, and last message.

    Commands that train save their results in their output folder instead of printing JSON."""
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
        except BaseException:  # Ctrl-C, or SIGTERM
            process.terminate()
            process.wait()
            raise
        messages.join()
        stdout.seek(0)
        return process.returncode, before + time.monotonic() - began, stdout.read(), last[0]


def _say(line: str) -> None:
    print(f"t2r: {line}", file=sys.stderr, flush=True)
