"""Experiments: commands with names in place of folders and files."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from t2r.errors import T2RError
from t2r.experiments.data import TEXTS, check_names
from t2r.experiments.grid import cells_of, chosen_scale, filled, name_for, seeded
from t2r.experiments.safety import MOST_STEPS, check_command, check_folder, check_output
from t2r.storage import LARGEST_YAML, kind_of, parse_yaml, read_text

NAME = re.compile(r"\{(model|data|out|examples):([\w./-]+)\}")
"""A placeholder for a path in a command: a model, a text, the output folder of a step, or a file of the examples."""
COMMANDS = ("analyze", "bench", "convert", "evaluate", "generate", "plan", "pretrain", "swap")
"""The commands a step may run. All produce JSON, with --json or as results.json in their output folder."""
TRAINING = ("convert", "pretrain")
"""Commands that save results.json in their output folder, and resume."""
MAKING = (*TRAINING, "swap")
"""Commands whose second argument is an output folder."""
FIELDS = ("about", "figures", "folder", "models", "paper", "scales", "steps", "title", "titles")


@dataclass(frozen=True)
class Step:
    """One command of an experiment."""

    name: str
    command: tuple[str, ...]
    """The words after `t2r`, with placeholders such as {model:smollm2} or {data:wikitext/valid}."""
    optional: bool = False
    """If the step fails, the error is recorded and the experiment continues."""
    cell: dict[str, str] = field(default_factory=dict)
    """The step's label on each axis of its grid."""

    def words(self, replace: Callable[[str, str], str]) -> list[str]:
        """Return the command with every placeholder replaced."""
        return [NAME.sub(lambda found: replace(found[1], found[2]), word) for word in self.command]

    def names(self, kind: str) -> list[str]:
        return [name for word in self.command for found, name in NAME.findall(word) if found == kind]

    @property
    def makes(self) -> bool:
        """Whether the step has an output folder."""
        return self.command[0] in MAKING

    @property
    def inputs(self) -> list[str]:
        """The steps whose output folders the command uses."""
        return [name for name in dict.fromkeys(self.names("out")) if not (self.makes and name == self.name)]

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
    scale: str | None = None
    scales: tuple[str, ...] = ()
    """The scales that the experiment has."""
    folder: str = ""
    """Name of the working folder. Experiments with the same folder share the steps that they have in common."""
    paper: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The numbers of the paper, by step."""
    titles: dict[str, str] = field(default_factory=dict)
    """Labels of cells as tables and figures show them."""
    figures: tuple[dict[str, Any], ...] = ()
    """The figures drawn from the record (see `t2r.experiments.charts`)."""

    @property
    def record(self) -> str:
        """The name of its record."""
        return self.name if self.scale is None else f"{self.name}-{self.scale}"

    @property
    def place(self) -> str:
        """The name of its working folder."""
        return self.record if not self.folder or self.scale is None else f"{self.folder}-{self.scale}"

    @property
    def call(self) -> str:
        """The command that runs it."""
        return f"t2r reproduce {self.name}" + ("" if self.scale is None else f" --scale {self.scale}")

    def texts(self) -> list[str]:
        return texts_of(self.steps)

    def select(self, steps: Sequence[str] = (), where: Mapping[str, str | Sequence[str]] | None = None) -> list[Step]:
        """Return the steps with these names whose cells have these labels, of several for one axis any. Steps without
        an axis are not excluded by it."""
        wanted = {axis: [said] if isinstance(said, str) else list(said) for axis, said in (where or {}).items()}
        if unknown := sorted(set(steps) - {step.name for step in self.steps}):
            known = ", ".join(step.name for step in self.steps)
            raise T2RError(f"experiment {self.name} has no step {', '.join(unknown)}; its steps are {known}")
        for axis, chosen in wanted.items():
            axes = dict.fromkeys(name for step in self.steps for name in step.cell)
            if axis not in axes:
                its = f"its axes are {', '.join(axes)}" if axes else "it has no axes"
                raise T2RError(f"experiment {self.name} has no axis {axis}: {its}")
            labels = dict.fromkeys(step.cell[axis] for step in self.steps if axis in step.cell)
            if unknown := [label for label in chosen if label not in labels]:
                raise T2RError(
                    f"experiment {self.name} has no cell {axis}={unknown[0]}: {axis} is {' or '.join(labels)}"
                )
        return [
            step
            for step in self.steps
            if (not steps or step.name in steps)
            and all(step.cell[axis] in chosen for axis, chosen in wanted.items() if axis in step.cell)
        ]

    def required(self, wanted: Sequence[Step], given: Collection[str] = ()) -> list[Step]:
        """Return the steps and all those whose outputs they use, in order, without those whose outputs are given."""
        names = {step.name for step in wanted}
        for step in reversed(self.steps):  # a step uses earlier steps only
            names.update(step.inputs if step.name in names and step.name not in given else ())
        return [step for step in self.steps if step.name in names and step.name not in given]


def texts_of(steps: Sequence[Step]) -> list[str]:
    """Return the names of the texts that the steps require. A joined text is named by its parts."""
    names = {name for step in steps for name in step.names("data")}
    return sorted({part for name in names for part in TEXTS[name].parts or (name,)})


def shipped_experiments() -> list[str]:
    entries = files("t2r.experiments").iterdir()
    return sorted(Path(entry.name).stem for entry in entries if entry.name.endswith(".yaml"))


def scales_of(name: str) -> list[str]:
    """Return the scales of a shipped experiment or a file. Empty: it has none."""
    said = _read(name)
    scales = said.get("scales") if isinstance(said, dict) else None
    return list(scales) if isinstance(scales, dict) else []


def load_experiment(name: str, scale: str | None = None, seeds: int = 1) -> Experiment:
    """Load a shipped experiment by name, or a YAML file by path, at one of its scales."""
    return make_experiment(_read(name), Path(name).stem, scale, seeds)


def _read(name: str) -> Any:
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if kind_of(path) != "file":
            raise T2RError(f"experiment file {path} does not exist")
        text = read_text(path, LARGEST_YAML, f"experiment {name}")
    elif name in shipped_experiments():
        text = files("t2r.experiments").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    else:
        raise T2RError(f"no experiment {name!r}: choose one of {', '.join(shipped_experiments())}, or give a YAML file")
    said = _parsed(text, f"experiment {name}")
    if isinstance(said, dict) and isinstance(shared := said.get("scales"), str):  # the scales of several experiments
        folder = files("t2r.experiments").joinpath("scales")
        known = sorted(Path(entry.name).stem for entry in folder.iterdir())
        if shared not in known:
            raise T2RError(f"experiment {name}: no scales {shared!r}: give a mapping, or one of {', '.join(known)}")
        entry = folder.joinpath(f"{shared}.yaml")
        said = said | {"scales": _parsed(entry.read_text(encoding="utf-8"), f"scales {shared}")}
    return said


_parsed = functools.cache(parse_yaml)
"""Parsing takes longer than all the rest."""


def make_experiment(said: Any, name: str, scale: str | None = None, seeds: int = 1) -> Experiment:
    """Make an experiment from parsed YAML. Raises T2RError for wrong fields, and for names that are not known."""
    where = f"experiment {name}"
    if not isinstance(said, dict) or not set(said) <= set(FIELDS) or not isinstance(said.get("steps"), list):
        raise T2RError(f"{where}: the fields must be {', '.join(FIELDS)}, and steps must be a list")
    values = chosen_scale(said.get("scales"), scale, where)
    check_folder(name, f"{where}: its name")
    for each in (str(said.get("folder") or name), *(said.get("scales") or ())):
        check_folder(each, f"{where}: the name of a folder or of a scale")
    if not said["steps"]:
        raise T2RError(f"{where}: it has no steps")
    models = _mapping(said, "models", str, where)
    steps = _steps(said["steps"], values, seeds, where)
    if len({step.name for step in steps}) != len(steps):
        raise T2RError(f"{where}: two steps have the same name")
    made: set[str] = set()
    for step in steps:
        if unknown := set(step.names("model")) - set(models):
            raise T2RError(f"{where}, step {step.name}: no model {', '.join(sorted(unknown))}")
        check_names(step.names("data"), f"{where}, step {step.name}")
        given = step.words(lambda kind, name: models[name] if kind == "model" else f"{{{kind}:{name}}}")
        check_command(given, f"{where}, step {step.name}")
        if step.makes:
            made.add(step.name)
            check_output(given, step.name, f"{where}, step {step.name}")
        if unknown := set(step.names("out")) - made:
            raise T2RError(f"{where}, step {step.name}: no earlier step makes {', '.join(sorted(unknown))}")
    return Experiment(
        name,
        str(said.get("title", name)),
        steps,
        models,
        str(said.get("about", "")).strip(),
        scale,
        tuple(said.get("scales") or ()),
        str(said.get("folder", "")),
        {filled(n, {}, {}, values, where): numbers for n, numbers in _mapping(said, "paper", dict, where).items()},
        {filled(label, {}, {}, values, where): title for label, title in _mapping(said, "titles", str, where).items()},
        tuple(_figure(figure, values, where) for figure in _figures(said, where)),
    )


def _mapping(said: Mapping[str, Any], name: str, kind: type, where: str) -> dict[str, Any]:
    """Return a field that is a mapping from names to texts or to mappings. Empty: it is left out."""
    found = said.get(name) or {}
    if not isinstance(found, dict) or not all(isinstance(value, kind) for value in found.values()):
        what = "texts" if kind is str else "mappings"
        raise T2RError(f"{where}: {name} must be a mapping from names to {what}; got {found!r}")
    return {str(key): value for key, value in found.items()}


def _figures(said: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    found = said.get("figures") or []
    if not isinstance(found, list):
        raise T2RError(f"{where}: figures must be a list; got {found!r}")
    return found


def _figure(said: Any, scale: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    if not isinstance(said, dict) or "title" not in said or not isinstance(said.get("where", {}), dict):
        raise T2RError(f"{where}: a figure must be a mapping with a title, and its `where` a mapping; got {said!r}")
    chosen = {axis: filled(str(label), {}, {}, scale, where) for axis, label in said.get("where", {}).items()}
    return {**said, "where": chosen}


def _steps(said: Sequence[Any], scale: Mapping[str, Any] | None, seeds: int, where: str) -> tuple[Step, ...]:
    """Return a step for each cell and seed."""
    steps: list[Step] = []
    repeated: set[str] = set()  # the steps with several seeds
    for each in said:
        if not isinstance(each, dict) or not set(each) <= {"name", "command", "optional", "for", "seeds"}:
            raise T2RError(
                f"{where}: the fields of a step must be name, command, optional, for and seeds; got {each!r}"
            )
        for cell, words in cells_of(each.get("for"), scale, where):
            if len(steps) + seeds > MOST_STEPS:
                raise T2RError(f"{where}: it has more than {MOST_STEPS:,} steps, with all cells and seeds")
            name, command = (filled(str(each.get(key, "")), cell, words, scale, where) for key in ("name", "command"))
            optional = each.get("optional", False)
            if not isinstance(optional, bool):
                raise T2RError(f"{where}, step {name}: optional must be true or false; got {optional!r}")
            if not each.get("seeds") or seeds == 1:
                steps.append(_step(name, command, optional, cell, where))
                continue
            repeated.add(name)
            for seed in range(seeds):
                again = seeded(command, seed, repeated) if seed else command
                steps.append(_step(name_for(name, seed), again, optional, cell | {"seed": str(seed)}, where))
    return tuple(steps)


def _step(name: str, command: str, optional: bool, cell: dict[str, str], where: str) -> Step:
    try:
        words = shlex.split(command)
    except ValueError as error:  # an unclosed quote
        raise T2RError(f"{where}, step {name}: the command cannot be read ({error}): {command!r}") from error
    if not re.fullmatch(r"[\w-]{1,100}", name) or len(words) < 2 or words[0] != "t2r":
        raise T2RError(
            f"{where}: a step requires a name of at most 100 letters, and a command that starts with t2r; got "
            f"{name!r}: {command!r}"
        )
    if words[1] not in COMMANDS:
        raise T2RError(f"{where}, step {name}: the command must be one of {', '.join(COMMANDS)}")
    return Step(name, tuple(words[1:]), optional, cell)
