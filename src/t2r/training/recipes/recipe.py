"""Recipes: training plans in YAML, as a list of stages."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t2r.errors import T2RError
from t2r.options import SwapOptions, options_of, refuse_unknown
from t2r.storage import LARGEST_YAML, kind_of, parse_yaml, read_text
from t2r.training.recipes.stage import BUDGETS, OBJECTIVES, OPTIMIZERS, TRAINED, Stage, make_stage
from t2r.words import counted

if TYPE_CHECKING:
    from t2r.data.mixture import WeightedSource

__all__ = ["BUDGETS", "OBJECTIVES", "OPTIMIZERS", "TRAINED", "Recipe", "Stage", "load_recipe", "shipped_recipes"]

logger = logging.getLogger(__name__)

NONE = "none"
"""The recipe that trains nothing."""


@dataclass(frozen=True)
class Recipe:
    """A training plan: options of the swap, stages in order, and default sources of training text."""

    name: str
    stages: tuple[Stage, ...]
    description: str = ""
    swap: dict[str, Any] = field(default_factory=dict)
    train: tuple[WeightedSource, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self) | {"stages": [dataclasses.asdict(stage) for stage in self.stages]}
        del values["train"]
        if self.train:
            given = (dataclasses.asdict(source) for source in self.train)
            values["train"] = [{name: x for name, x in source.items() if x is not None} for source in given]
        return values

    def told(self) -> list[str]:
        """Describe the stages, one line each."""
        lines = [f"recipe {self.name}:"]
        for stage in self.stages:
            name = next(name for name in BUDGETS if getattr(stage, name) is not None)
            budget = counted(getattr(stage, name), name.removesuffix("s"))
            lines.append(
                f"{stage.name}: {stage.objective}, trains {stage.train}, {budget} in batches of "
                f"{stage.batch_tokens:,} tokens, learning rate {stage.learning_rate:g} ({stage.optimizer})"
            )
        return lines

    def a_block_at_a_time(self) -> Recipe:
        """Return the recipe with one block per forward pass, for tasks whose blocks have different widths.

        Padded to one width, several blocks may take several times the memory. The transfer would weigh their rows in
        another way."""
        for stage in self.stages:
            if (stage.device_tokens or 0) > stage.block_size:
                logger.warning(
                    "stage %s: device_tokens %d has no effect, because a forward pass reads one block of %d tokens: "
                    "set block_size",
                    stage.name,
                    stage.device_tokens,
                    stage.block_size,
                )
        stages = (dataclasses.replace(stage, device_tokens=stage.block_size) for stage in self.stages)
        return dataclasses.replace(self, stages=tuple(stages))

    def for_positions(self, positions: int | None) -> Recipe:
        """Limit the block size to a number of positions, with a warning. None: no limit."""
        if positions is None:
            return self
        stages = []
        for stage in self.stages:
            if stage.block_size > positions >= 2:
                logger.warning(
                    "stage %s: block_size %d is reduced to the model's %d positions",
                    stage.name,
                    stage.block_size,
                    positions,
                )
                stage = stage.with_block_size(positions)
            stages.append(stage)
        return dataclasses.replace(self, stages=tuple(stages))


def shipped_recipes() -> list[str]:
    return shipped("recipe")


def shipped(kind: str) -> list[str]:
    """Return the names of the shipped YAML files of a kind: `recipe` or `preset`."""
    return sorted(Path(entry.name).stem for entry in shipped_in(kind).iterdir() if entry.name.endswith(".yaml"))


def shipped_in(kind: str) -> Traversable:
    """Return the folder of the shipped YAML files of a kind."""
    folder = files("t2r.training.recipes")
    return folder if kind == "recipe" else folder.joinpath(f"{kind}s")


def read_yaml(kind: str, name: str | Path) -> Any:
    """Parse a shipped file by name, or a YAML file by path."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or kind_of(path) == "file":
        if kind_of(path) != "file":
            raise T2RError(f"{kind} file {path} does not exist")
        text = read_text(path, LARGEST_YAML, f"{kind} {name}")
    elif str(name) in shipped(kind):
        text = shipped_in(kind).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    else:
        raise T2RError(f"no {kind} {str(name)!r}: choose one of {', '.join(shipped(kind))}, or give a YAML file")
    return parse_yaml(text, f"{kind} {name}")


def default_recipe(translates: bool, *, memory: bool = False) -> str:
    """Return the name of the recipe that converts a model, if no other is given. `memory`: to a memory budget."""
    return f"{'memory' if memory else 'distill'}-{'mt' if translates else 'lm'}"


def load_recipe(name: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Load a shipped recipe by name, or a YAML file by path, with `stage.field=value` overrides."""
    return make_recipe(read_yaml("recipe", name), name, overrides)


def make_recipe(plan: Any, name: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Make a recipe from parsed YAML. `name` is used in errors, and as its name if it has none."""
    stages = plan.get("stages") if isinstance(plan, dict) else None
    if not isinstance(stages, list):
        raise T2RError(f"recipe {name} has no list of stages")
    for stage in stages:
        if not isinstance(stage, dict) or "name" not in stage or "objective" not in stage:
            raise T2RError(f"recipe {name}: a stage requires a name and an objective; got {stage!r}")
    plan = plan | {"stages": [dict(stage) for stage in stages]}
    for override in overrides:
        apply_override(plan, override)
    if unknown := sorted(str(key) for key in plan if key not in {f.name for f in fields(Recipe)}):
        raise T2RError(f"recipe {name}: no field {', '.join(unknown)}")
    swap = check_swap(plan.get("swap"), f"recipe {name}")
    made = tuple(make_stage(stage) for stage in plan["stages"])
    if not made and plan.get("name") != NONE:
        raise T2RError(f"recipe {name} has no list of stages")
    if len({stage.name for stage in made}) != len(made):
        raise T2RError(f"recipe {name}: two stages have the same name")
    train = read_train(plan["train"], f"recipe {name}") if plan.get("train") is not None else ()
    return Recipe(str(plan.get("name", Path(name).stem)), made, str(plan.get("description", "")), swap, train)


def read_train(train: Any, where: str) -> tuple[WeightedSource, ...]:
    """Parse the sources of training text in a recipe."""
    from t2r.data.mixture import parse_sources  # imports torch, which the command-line help must not

    if not isinstance(train, list):
        raise T2RError(f"{where}: train must be a list of sources; got {train!r}")
    try:
        return tuple(parse_sources(train))
    except T2RError as error:
        raise T2RError(f"{where}: {error}") from error


def check_swap(swap: Any, where: str) -> dict[str, Any]:
    """Return the swap options of parsed YAML. Raises T2RError for unknown or wrong ones."""
    swap, known = swap or {}, options_of(SwapOptions)
    if not isinstance(swap, dict):
        raise T2RError(f"{where}: swap must be a mapping of the options {', '.join(known)}; got {swap!r}")
    refuse_unknown(swap, known, f"{where}: swap: ")
    read = {name: known[name].read(value) for name, value in swap.items()}
    for name, value in read.items():
        known[name].check(value, f"{where}: swap: ")
    return read


def apply_override(plan: dict[str, Any], override: str) -> None:
    """Apply `stage.field=value`, or `field=value` for every stage. A budget replaces the existing one."""
    key, equals, value = override.partition("=")
    stage_name, dot, name = key.strip().rpartition(".")
    stages = [s for s in plan["stages"] if not dot or str(s["name"]) == stage_name]
    if not equals or not name:
        raise T2RError(f"override {override!r}: write stage.field=value")
    if not plan["stages"]:
        raise T2RError(f"override {override!r}: the recipe has no stages")
    if not stages:
        known = ", ".join(str(s["name"]) for s in plan["stages"])
        raise T2RError(f"override {override!r}: no stage {stage_name!r}; the stages are {known}")
    refuse_unknown({name: value}, options_of(Stage), f"override {override!r}: ")
    read = parse_yaml(value, f"override {override!r}: the value")
    for stage in stages:
        if name in BUDGETS:
            for other in BUDGETS:
                stage.pop(other, None)
        stage[name] = read
