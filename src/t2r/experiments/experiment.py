"""Experiments: commands with names in place of folders and files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from t2r.errors import T2RError
from t2r.experiments.data import check_names
from t2r.storage import kind_of

NAME = re.compile(r"\{(model|data|out|examples):([\w./-]+)\}")
"""A placeholder for a path in a command: a model, a text, the output folder of a step, or a file of the examples."""
COMMANDS = ("bench", "convert", "evaluate", "pretrain")
"""The commands a step may run. All produce JSON, with --json or as results.json in their output folder."""


@dataclass(frozen=True)
class Step:
    """One command of an experiment."""

    name: str
    command: tuple[str, ...]
    """The words after `t2r`, with placeholders such as {model:smollm2} or {data:wikitext/valid}."""
    optional: bool = False
    """If the step fails, the error is recorded and the experiment continues."""

    def words(self, replace: Callable[[str, str], str]) -> list[str]:
        """Return the command with every placeholder replaced."""
        return [NAME.sub(lambda found: replace(found[1], found[2]), word) for word in self.command]

    def names(self, kind: str) -> list[str]:
        return [name for word in self.command for found, name in NAME.findall(word) if found == kind]

    @property
    def label(self) -> str:
        """The command as shown in a record, with names instead of paths."""
        return shlex.join(["t2r", *self.words(lambda kind, name: f"examples/{name}" if kind == "examples" else name)])


@dataclass(frozen=True)
class Experiment:
    """Models by name, and the steps in order."""

    name: str
    title: str
    steps: tuple[Step, ...]
    models: dict[str, str] = field(default_factory=dict)
    """By name, the name on the Hugging Face hub or the folder below examples/."""
    about: str = ""

    def texts(self) -> list[str]:
        return sorted({name for step in self.steps for name in step.names("data")})


def shipped_experiments() -> list[str]:
    entries = files("t2r.experiments").iterdir()
    return sorted(Path(entry.name).stem for entry in entries if entry.name.endswith(".yaml"))


def load_experiment(name: str) -> Experiment:
    """Load a shipped experiment by name, or a YAML file by path."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if kind_of(path) != "file":
            raise T2RError(f"experiment file {path} does not exist")
        text = path.read_text(encoding="utf-8")
    elif name in shipped_experiments():
        text = files("t2r.experiments").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    else:
        raise T2RError(f"no experiment {name!r}: choose one of {', '.join(shipped_experiments())}, or give a YAML file")
    try:
        said = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise T2RError(f"experiment {name} is not valid YAML: {error}") from error
    return make_experiment(said, path.stem)


def make_experiment(said: Any, name: str) -> Experiment:
    where = f"experiment {name}"
    known = {"title", "about", "models", "steps"}
    if not isinstance(said, dict) or not set(said) <= known or not isinstance(said.get("steps"), list):
        raise T2RError(f"{where}: the fields must be {', '.join(sorted(known))}, and steps must be a list")
    models = said.get("models") or {}
    steps = tuple(_step(step, where) for step in said["steps"])
    if len({step.name for step in steps}) != len(steps):
        raise T2RError(f"{where}: two steps have the same name")
    made: set[str] = set()
    for step in steps:
        if unknown := set(step.names("model")) - set(models):
            raise T2RError(f"{where}, step {step.name}: no model {', '.join(sorted(unknown))}")
        check_names(step.names("data"), f"{where}, step {step.name}")
        if step.command[0] in ("convert", "pretrain"):
            made.add(step.name)
            if step.command[2:3] != (f"{{out:{step.name}}}",):
                raise T2RError(f"{where}, step {step.name}: its output folder must be {{out:{step.name}}}")
        if unknown := set(step.names("out")) - made:
            raise T2RError(f"{where}, step {step.name}: no earlier step makes {', '.join(sorted(unknown))}")
    return Experiment(name, str(said.get("title", name)), steps, models, str(said.get("about", "")).strip())


def _step(said: Any, where: str) -> Step:
    if not isinstance(said, dict) or not set(said) <= {"name", "command", "optional"}:
        raise T2RError(f"{where}: the fields of a step must be name, command and optional; got {said!r}")
    words = shlex.split(str(said.get("command", "")))
    if not re.fullmatch(r"[\w-]+", str(said.get("name", ""))) or len(words) < 2 or words[0] != "t2r":
        raise T2RError(f"{where}: a step requires a name, and a command that starts with t2r; got {said!r}")
    if words[1] not in COMMANDS:
        raise T2RError(f"{where}, step {said['name']}: the command must be one of {', '.join(COMMANDS)}")
    return Step(str(said["name"]), tuple(words[1:]), bool(said.get("optional", False)))
