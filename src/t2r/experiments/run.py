"""Runs an experiment. The result of each step is saved at once, so that a repeated call resumes.

Several processes may work in one folder, also on several machines that share it. A process takes the next step that is
not done, not locked by another process, and whose inputs are there.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from t2r.errors import T2RError
from t2r.experiments import record
from t2r.experiments.command import Ended, call, say
from t2r.experiments.experiment import TRAINING, Experiment, Step, load_experiment
from t2r.experiments.places import Places, identity
from t2r.experiments.safety import MOST_SEEDS, TRUST, runs_code
from t2r.storage import json_text, read_json, take_lock, write_text, writing

POLL = 2.0
"""Seconds between two looks at the steps of other processes."""


def reproduce(
    name: str,
    *,
    scale: str | None = None,
    data_folder: str | Path | None = None,
    models: Mapping[str, str] | None = None,
    out: str | Path | None = None,
    steps: Sequence[str] = (),
    where: Mapping[str, str | Sequence[str]] | None = None,
    seeds: int = 1,
    records: Sequence[str | Path] = (),
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Run an experiment and return its record, which is saved in the folder `out`: as `record.json`, or for an
    experiment with scales as `NAME-SCALE.json`.

    The command of each step is printed to stderr before it runs, followed by its messages. Finished steps are not run
    again. An interrupted step is repeated; training is resumed. Steps that do not depend on each other may be run by
    several processes that call this function with the same folder at the same time.

    Args:
        name: the name of a shipped experiment, or a YAML file.
        scale: the scale, for an experiment with scales.
        data_folder: folder with the texts that the experiment uses.
        models: folders or hub names for the experiment's models, or in place of the outputs of steps, which are then
            not run. Other models are loaded from the experiment's sources.
        out: the working folder. None: `runs/NAME`, or `runs/NAME-SCALE`; experiments that share steps also share their
            folder.
        steps: run only these steps, and those whose output folders they require. The record contains them and the steps
            finished before. Empty: all steps.
        where: run only cells with these labels, by axis: one, or several.
        seeds: the number of seeds of steps that are repeated with several.
        records: files of records, or names of shipped ones. Steps that they contain are not run again, unless their
            output folder is required and missing.
        trust_remote_code: whether steps may run code of others: `--trust-remote-code`, or tasks of lm-eval in a folder
            that is not among the examples.
    """
    if not 1 <= seeds <= MOST_SEEDS:
        raise T2RError(f"seeds must be at least 1 and at most {MOST_SEEDS:,}; got {seeds}")
    known = [read_record(name) for name in records]  # a wrong name raises before the folder is created
    experiment = load_experiment(name, scale)
    folder = Path("runs", experiment.place) if out is None else Path(out)
    # The record has all seeds that are finished, also if fewer are asked for.
    own = {step.name for step in experiment.steps}
    experiment = load_experiment(name, scale, max(seeds, finished_seeds(folder, known, own)))
    wanted = [step for step in experiment.select(steps, where) if int(step.cell.get("seed", 0)) < seeds]
    if not wanted:
        raise T2RError(f"no step of experiment {experiment.name} has these names and these labels")
    places = Places(experiment, None if data_folder is None else Path(data_folder), models or {}, folder)
    required = experiment.required(wanted, places.replaced)
    places.check(required)
    if not trust_remote_code:
        refuse_code(required)
    grid = Grid(experiment, places)
    for step in experiment.steps:
        grid.result(step)  # raises if it was made in another way, before anything is run
    for each in known:
        grid.take_over(each)
    grid.run(wanted)
    return grid.write_record()


def refuse_code(steps: Sequence[Step]) -> None:
    """Raise T2RError if a step would run code of others."""
    for step in steps:
        if (option := runs_code(step.command)) is not None:
            raise T2RError(
                f"step {step.name} runs code of others ({option}): read its command ({step.label}), and repeat yours "
                f"with {TRUST} if you trust it"
            )


def finished_seeds(folder: Path, known: Sequence[Mapping[str, Any]], own: Collection[str]) -> int:
    """Return the number of seeds of an experiment's `own` steps that are finished in a working folder or in records."""
    names = [path.stem for path in (folder / "steps").glob("*.json")]
    names += [part["name"] for each in known for part in each["steps"]]
    found = [match for name in names if (match := re.fullmatch(r"(.*)-seed(\d{1,9})", name)) and match[1] in own]
    return min(MOST_SEEDS, 1 + max((int(match[2]) for match in found), default=0))


def read_record(name: str | Path) -> dict[str, Any]:
    """Read the file of a record, or a published record by name."""
    if Path(name).is_file():
        try:
            found = read_json(name)
        except T2RError as error:
            raise T2RError(f"{name} is not a record: {error}") from error
    else:
        found = record.recorded(str(name))
        if found is None:
            where = "" if record.REPOSITORY.is_dir() else " (published records are in the repository of t2r only)"
            raise T2RError(f"there is no record {name}: give its file{where}")
    steps = found.get("steps") if isinstance(found, dict) else None
    if not isinstance(steps, list) or not all(
        isinstance(part, dict) and all(isinstance(part.get(key), str) for key in ("name", "command")) for part in steps
    ):
        raise T2RError(f"{name} is not a record: give a file that t2r reproduce wrote, such as record.json")
    return found


def read_part(file: Path) -> dict[str, Any]:
    """Read the result of a step. Raises T2RError if it is damaged."""
    again = "delete it, and the step is run again"
    try:
        found = read_json(file)
    except T2RError as error:
        raise T2RError(f"{file} is damaged: {again} ({error})") from error
    types = {"name": str, "command": str, "models": dict | None, "failed": str | None, "machine": dict | None}
    if not isinstance(found, dict) or not all(isinstance(found.get(key), kind) for key, kind in types.items()):
        raise T2RError(f"{file} is not the result of a step: {again}")
    if ("result" in found) == ("failed" in found) or not isinstance(found.get("seconds"), int | float | None):
        raise T2RError(f"{file} has neither a result nor an error of a step: {again}")
    return found


class Grid:
    """The steps of an experiment in a working folder.

    `steps/NAME.json` is the result of a finished step, `NAME.seconds` the time of an unfinished one, `NAME.started` the
    command that made its output, `NAME.failed` the error of one that failed, and `NAME.lock` is locked while a process
    runs it."""

    def __init__(self, experiment: Experiment, places: Places) -> None:
        self.experiment, self.places = experiment, places
        self.folder = places.out / "steps"
        self.file = places.out / ("record.json" if experiment.scale is None else f"{experiment.record}.json")
        record.RECORD.check(self.file)
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self.steps = {step.name: step for step in experiment.steps}
        self.failed: dict[str, str] = {}
        """The errors of steps that failed since this process began."""
        self.began = time.time()

    # --- Results --------------------------------------------------------------------------------------------

    def result(self, step: Step) -> dict[str, Any] | None:
        """Return the recorded part of a finished step. Raises T2RError if it was made by another command."""
        file = self.folder / f"{step.name}.json"
        if not file.is_file():
            return None
        part: dict[str, Any] = {"cell": step.cell} if step.cell else {}
        part |= read_part(file)
        if part["command"] != step.label:
            raise T2RError(
                f"{file} was made by another command ({part['command']}): the experiment has changed; give another "
                "--out"
            )
        before, now = part.pop("models", None), self.models(step)
        if before is not None and before != now:
            told = (", ".join(f"{name}={path}" for name, path in each.items()) or "none" for each in (before, now))
            raise T2RError("{} was made with --model {}, not {}: give another --out".format(file, *told))
        return part

    def models(self, step: Step) -> dict[str, str]:
        """Return the models of a step by name: those that it loads, those given for its inputs, or for its output."""
        replaced = self.places.replaced
        found = {name: self.places.models[name] for name in step.names("model")}
        found |= {name: replaced[name] for name in step.inputs if name in replaced}
        if step.name in replaced:
            found = {step.name: replaced[step.name]}
        return {name: identity(path) for name, path in found.items()}

    def is_done(self, step: Step, *, needed: bool = False) -> bool:
        """Return whether a step is finished and, if it is `needed`, its output folder is there."""
        part = self.result(step)
        return part is not None and "failed" not in part and (not needed or self.places.has(step.name))

    def take_over(self, known: Mapping[str, Any]) -> None:
        """Use the finished steps of a record that have the same commands."""
        source = {key: known[key] for key in record.PROVENANCE if key in known}
        labels = {name: step.label for name, step in self.steps.items()}
        parts = [
            part for part in known["steps"] if part["command"] == labels.get(part["name"]) and "failed" not in part
        ]
        if not parts:
            say("no step of the record has a command of this experiment (another scale?), so that all are run")
        for part in parts:
            step = self.steps[part["name"]]
            if not self.result(step):
                self.save(step, source | {key: part[key] for key in part if key != "cell"})
                say(f"{step.name}: taken from the record")

    def write_record(self) -> dict[str, Any]:
        """Write the record of all steps that are finished."""
        parts = [part for step in self.experiment.steps if (part := self.result(step)) is not None]
        whole = record.joined(self.experiment, parts)
        with writing(self.file):
            record.write_record(self.file, whole)
        return whole

    def save(self, step: Step, part: dict[str, Any]) -> None:
        """Save the recorded part of a step."""
        file = self.folder / f"{step.name}.json"
        with writing(file):
            write_text(file, json_text(part, 1))

    # --- Order ----------------------------------------------------------------------------------------------

    def run(self, wanted: Sequence[Step]) -> None:
        """Run steps until all are finished, here or by other processes."""
        waiting = self.unfinished(wanted)
        for step in wanted:
            if step not in waiting:
                part = self.result(step) or {}
                say(f"{step.name}: already done, in {part.get('seconds') or 0:.0f} s")
        told: list[str] = []
        while waiting:
            locked = []
            for step in waiting:
                if not all(self.is_done(self.steps[name], needed=True) for name in self.inputs(step)):
                    continue
                with writing(self.folder):
                    lock = take_lock(self.folder / f"{step.name}.lock")
                if lock is None:
                    locked.append(step.name)
                    continue
                with lock:
                    needed = any(step.name in self.inputs(other) for other in waiting)
                    if not self.is_done(step, needed=needed):  # another process may have finished it meanwhile
                        if (why := self.failed_meanwhile(step)) is None:
                            self.run_step(step, lock)
                        else:
                            self.failed[step.name] = f"in another process: {why}"
                            say(f"{step.name}: failed in another process: {why}")
                        self.write_record()
                break
            else:  # no step can be run now
                if not locked:
                    self.give_up(waiting)
                elif locked != told:
                    say(f"waiting for other processes: {', '.join(locked)}")
                    told = locked
                time.sleep(POLL if locked else 0)
            waiting = [step for step in self.unfinished(waiting) if step.name not in self.failed]
        if errors := [
            f"step {name} failed: {why}" for name, why in self.failed.items() if not self.steps[name].optional
        ]:
            raise T2RError("; ".join(errors))

    def failed_meanwhile(self, step: Step) -> str | None:
        """Return the error of a step that failed in another process after this one began. A later call tries again."""
        file = self.folder / f"{step.name}.failed"
        with suppress(FileNotFoundError):
            if file.stat().st_mtime > self.began:
                return file.read_text(encoding="utf-8")
        return None

    def unfinished(self, wanted: Sequence[Step]) -> list[Step]:
        """Return the steps that are not finished, and those whose output folders they require, in order."""
        found: set[str] = set()

        def visit(step: Step, needed: bool) -> None:
            if step.name in found or self.is_done(step, needed=needed):
                return
            found.add(step.name)
            for name in self.inputs(step):
                visit(self.steps[name], needed=True)

        for step in wanted:
            visit(step, needed=False)
        return [step for step in self.experiment.steps if step.name in found]

    def inputs(self, step: Step) -> Sequence[str]:
        """Return the steps whose outputs a step uses: none if its own output was given."""
        return () if step.name in self.places.replaced else step.inputs

    def give_up(self, waiting: Sequence[Step]) -> None:
        """Mark the steps as failed that wait for a step that failed."""
        for step in waiting:
            lost = [name for name in self.inputs(step) if not self.is_done(self.steps[name], needed=True)]
            self.fail(step, f"requires {', '.join(lost)}", 0.0)

    # --- One step -------------------------------------------------------------------------------------------

    def run_step(self, step: Step, lock: IO[bytes]) -> None:
        """Run a step, and save its result or its error."""
        clock = self.folder / f"{step.name}.seconds"
        if step.name in self.places.replaced:
            ended = Ended(0, 0.0, "{}", "")
            say(f"{step.name}: given, in {self.places.replaced[step.name]}")
        else:
            words = step.words(self.places.path)
            say(f"{step.name}: {shlex.join(['t2r', *words])}")
            before = 0.0
            with suppress(FileNotFoundError, ValueError):
                before = float(clock.read_text())
            if self.made(step) is not None:  # interrupted between the command's end and the record
                self.check_started(step)
                ended = Ended(0, before, "", "")
            else:
                if step.command[0] == "swap" and self.began_before(step):  # otherwise it is a model of the user
                    words.append("--overwrite")
                with writing(self.started(step)):
                    write_text(self.started(step), step.label)
                ended = call(step.name, words, before, clock, lock)
        mark = self.folder / f"{step.name}.failed"
        why = reason(ended)
        text = ended.output if (made := self.made(step)) is None else made.read_text(encoding="utf-8")
        if why is None:
            try:
                # `t2r generate` prints an object for each prompt.
                lines = text.splitlines() if step.command[0] == "generate" else None
                result = json.loads(text) if lines is None else [json.loads(line) for line in lines]
            except ValueError:
                why = "it printed no JSON"
        if why is not None:
            self.fail(step, why, ended.seconds)
            with writing(mark):
                write_text(mark, why)
            return
        kept = record.summary(step.command[0], result)
        part = self.part(step, ended.seconds) | {"result": record.compact(kept, self.places.names)}
        part["models"] = self.models(step)
        if step.name in self.places.replaced:
            part |= {"seconds": None, "given": True}
        self.save(step, part)
        for file in (clock, mark):
            file.unlink(missing_ok=True)
        say(f"{step.name}: {ended.seconds:.0f} s")

    def started(self, step: Step) -> Path:
        return self.folder / f"{step.name}.started"

    def began_before(self, step: Step) -> bool:
        with suppress(FileNotFoundError):
            return self.started(step).read_text(encoding="utf-8", errors="replace") == step.label
        return False

    def check_started(self, step: Step) -> None:
        """Raise T2RError if the output of a step was made by another command."""
        with suppress(FileNotFoundError):
            if (command := self.started(step).read_text(encoding="utf-8")) == step.label:
                return
            raise T2RError(f"{self.places.path('out', step.name)} was made by another command ({command}): delete it")

    def fail(self, step: Step, why: str, seconds: float) -> None:
        self.failed[step.name] = why
        say(f"{step.name}: {'skipped' if step.optional else 'failed'}: {why}")
        if step.optional:
            part = self.part(step, seconds) | {"failed": record.compact(why, self.places.names)}
            self.save(step, part)

    def part(self, step: Step, seconds: float) -> dict[str, Any]:
        part = {"name": step.name, "command": step.label, "seconds": round(seconds, 1)}
        return part | {"date": time.strftime("%Y-%m-%d")} | machine()

    def made(self, step: Step) -> Path | None:
        """Return the results file in the output folder of a finished step, or None."""
        if step.command[0] not in TRAINING:
            return None
        results = Path(self.places.path("out", step.name)) / "results.json"
        return results if results.is_file() else None


def reason(ended: Ended) -> str | None:
    """Return why a command failed, or None."""
    last = ended.last.removeprefix("t2r: ")
    if ended.code < 0:  # by a signal
        with suppress(ValueError):
            name = signal.Signals(-ended.code).name
            killed = f"killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
            return f"{killed}; its last message: {last}" if last else killed
    return (last or f"exit code {ended.code}") if ended.code else None


@functools.cache
def machine() -> dict[str, Any]:
    return record.machine()
