"""The paths of an experiment's models, texts and folders on this machine."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from t2r.errors import T2RError
from t2r.experiments import data
from t2r.experiments.experiment import Experiment, Step, texts_of
from t2r.storage import kind_of

EXAMPLES = Path(__file__).parents[3] / "examples"
SAMPLE = 1 << 20
"""Bytes in the middle of each file of weights by which models are told apart."""


def identity(model: str) -> str:
    """Return what a model is, the same on every machine: its folder's name and a digest of parts of its files, or its
    name on the Hub."""
    folder = Path(model)
    if not folder.is_dir():
        return model
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        with suppress(OSError), path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(f"{path.name} {size} ".encode())
            file.seek(max(0, size - SAMPLE) // 2)  # weights, not their header
            digest.update(file.read(SAMPLE))
    return f"{folder.resolve().name} ({digest.hexdigest()[:12]})"


class Places:
    """Finds the paths that the placeholders of a command stand for.

    Args:
        experiment: the experiment.
        folder: the user's folder of texts.
        models: folders or hub names, by the name of a model, or of a step whose output they replace.
        out: the working folder.
    """

    def __init__(self, experiment: Experiment, folder: Path | None, models: Mapping[str, str], out: Path) -> None:
        self.experiment, self.folder, self.out = experiment, folder, out
        models = {name: os.path.expanduser(path) for name, path in models.items()}
        made = [step.name for step in experiment.steps if step.makes]
        if unknown := sorted(set(models) - set(experiment.models) - set(made)):
            known = ", ".join([*experiment.models, *made]) or "none"
            raise T2RError(f"experiment {experiment.name} has no model {', '.join(unknown)}; its models are {known}")
        self.models = {name: models.get(name, source) for name, source in experiment.models.items()}
        for name, source in experiment.models.items():
            if name not in models and source.startswith("examples/"):
                self.models[name] = str(EXAMPLES / source.removeprefix("examples/"))
        self.given = set(models)
        self.replaced = {name: path for name, path in models.items() if name in made}
        """Folders that replace the outputs of steps."""
        self.names: dict[str, str] = {}
        """Names by path."""

    def check(self, steps: Sequence[Step]) -> None:
        """Raise T2RError if texts, models or examples of the steps are missing."""
        if self.folder is not None and kind_of(self.folder) != "folder":
            raise T2RError(f"--data: folder {self.folder} does not exist")
        if lacks := data.missing(texts_of(steps), self.folder):
            raise T2RError(
                f"experiment {self.experiment.name} requires {', '.join(lacks)} (or .xz, .gz) in "
                f"{'the --data folder' if self.folder is None else self.folder}; t2r reproduce --list shows "
                "the sources of these texts"
            )
        for name, path in (self.models | self.replaced).items():
            local = name in self.given and (path.startswith((".", "/", "~")) or path.count("/") > 1)
            if name not in self.given and path.startswith(str(EXAMPLES)) and not EXAMPLES.is_dir():
                raise T2RError(f"model {name} is in the examples of the repository: run it in a checkout of t2r")
            if (local or Path(path).is_absolute()) and kind_of(path) != "folder":
                raise T2RError(f"model {name}: folder {path} does not exist; set it with --model {name}=FOLDER")
        for step in steps:
            for example in step.names("examples"):
                if not step.optional and not (EXAMPLES / example).exists():
                    raise T2RError(f"step {step.name} requires examples/{example}: run it in a checkout of t2r")

    def path(self, kind: str, name: str) -> str:
        if kind == "model":
            found = self.models[name]
        elif kind == "out":
            found = self.replaced.get(name, str(self.out / name))
        elif kind == "examples":
            found, name = str(EXAMPLES / name), f"examples/{name}"
        else:
            assert self.folder is not None
            found = str(data.prepared(name, self.folder, self.out / "data"))
        self.names[found] = name
        return found

    def has(self, step: str) -> bool:
        """Return whether the output folder of a step is there, or another was given."""
        return step in self.replaced or (self.out / step / "config.json").is_file()
