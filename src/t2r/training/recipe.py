"""Recipes: the training plan, as short YAML files with stages."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from t2r.config import OPTIONS
from t2r.errors import T2RError
from t2r.training.schedule import KINDS, Schedule

OBJECTIVES = ("task", "transfer", "distill")
TRAINED = ("maps", "attention", "all", "lora")
OPTIMIZERS = ("adamw", "adam", "muon", "nag")
NAME = re.compile(r"[\w-]+")
BUDGETS = ("steps", "tokens", "epochs", "minutes")


@dataclass(frozen=True)
class Stage:
    """One stretch of training: what is minimized, what is trained, for how long, how.

    Exactly one of `steps`, `tokens`, `epochs` and `minutes` says how long; minutes are turned into steps after a short
    calibration.
    """

    name: str
    objective: str
    train: str = "all"
    steps: int | None = None
    tokens: int | None = None
    epochs: float | None = None
    minutes: float | None = None
    batch_tokens: int = 16384  # per optimizer step, over all devices and accumulation
    device_tokens: int | None = None  # per forward on one device; None: as many as batch_tokens, at most 16,384
    block_size: int = 512
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    map_learning_rate: float | None = None  # None: the same
    betas: list[float] = field(default_factory=lambda: [0.9, 0.98])
    epsilon: float = 1e-8
    momentum: float = 0.99  # of nag
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0
    schedule: str = "cosine"
    warmup_steps: int = 0
    warmup_init: float = 0.0
    min_learning_rate: float = 0.0
    period: int | None = None
    period_mult: float = 1.0
    shrink: float = 1.0
    kl_weight: float = 1.0  # of distill
    task_weight: float = 0.0
    temperature: float = 1.0
    noise: float = 0.0  # this share of what is read, at random, is other tokens of the batch: for text seen many times
    lora_rank: int = 16

    def __post_init__(self) -> None:
        where = f"stage {self.name!r}"
        for name, known in (
            ("objective", OBJECTIVES),
            ("train", TRAINED),
            ("optimizer", OPTIMIZERS),
            ("schedule", KINDS),
        ):
            if getattr(self, name) not in known:
                raise T2RError(f"{where}: no {name} {getattr(self, name)!r}; choose one of {', '.join(known)}")
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) != 1:
            raise T2RError(f"{where}: say how long by exactly one of {', '.join(BUDGETS)}; got {given or 'none'}")
        for name in (given[0], "batch_tokens", "block_size", "learning_rate", "temperature", "lora_rank"):
            if not getattr(self, name) > 0:
                raise T2RError(f"{where}: {name} must be positive")
        if not 0 <= self.noise < 1:
            raise T2RError(f"{where}: noise is a share of the tokens, from 0 to below 1; got {self.noise}")
        if not isinstance(self.betas, list) or len(self.betas) != 2:
            raise T2RError(f"{where}: betas are two numbers, such as [0.9, 0.98]; got {self.betas!r}")
        if not NAME.fullmatch(self.name):  # it becomes the name of a folder
            raise T2RError(f"{where}: a name is made of letters, digits, - and _")
        if self.objective == "transfer" and self.train != "maps":
            raise T2RError(f"{where}: transfer compares attention outputs with the model's own, so it trains maps only")
        if self.batch_tokens % self.block_size:
            raise T2RError(
                f"{where}: batch_tokens {self.batch_tokens} is not a whole number of {self.block_size}-token blocks"
            )
        try:
            self.make_schedule(1)
        except T2RError as error:
            raise T2RError(f"{where}: {error}") from error

    def fitted(self, steps: int) -> Stage:
        """The same for a budget of so many steps. One that ends before the warm-up does would never see the rate that
        it was given, so the warm-up (and the period after it) shrinks in proportion, to a tenth where there is none."""
        if self.warmup_steps < steps:
            return self
        whole = self.warmup_steps + self.period if self.period else 10 * self.warmup_steps
        period = None if self.period is None else max(1, self.period * steps // whole)
        return dataclasses.replace(self, warmup_steps=self.warmup_steps * steps // whole, period=period)

    def make_schedule(self, steps: int) -> Schedule:
        return Schedule(
            kind=self.schedule,
            peak=self.learning_rate,
            steps=steps,
            warmup_steps=self.warmup_steps,
            warmup_init=self.warmup_init,
            floor=self.min_learning_rate,
            period=self.period,
            period_mult=self.period_mult,
            shrink=self.shrink,
        )


@dataclass(frozen=True)
class Recipe:
    """A plan: options for the swap, and stages in order."""

    name: str
    stages: tuple[Stage, ...]
    description: str = ""
    swap: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"stages": [dataclasses.asdict(stage) for stage in self.stages]}


def shipped_recipes() -> list[str]:
    return shipped("recipe")


def shipped(kind: str) -> list[str]:
    """The names of the YAML files that come with t2r, of this kind: `recipe` or `preset`."""
    folder = files("t2r.training").joinpath(f"{kind}s")
    return sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def read_yaml(kind: str, name: str | Path) -> Any:
    """What a shipped file of this name says, or a YAML file at this path."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise T2RError(f"there is no {kind} file {path}")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise T2RError(f"{kind} {name} cannot be read: {error}") from error
    elif str(name) in shipped(kind):
        text = files("t2r.training").joinpath(f"{kind}s").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    else:
        raise T2RError(f"no {kind} {str(name)!r}: choose one of {', '.join(shipped(kind))}, or give a YAML file")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise T2RError(f"{kind} {name} is not YAML: {error}") from error


def load_recipe(name: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """A shipped recipe by name, or a YAML file by path, with `stage.field=value` overrides."""
    return make_recipe(read_yaml("recipe", name), name, overrides)


def make_recipe(plan: Any, name: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe from what YAML says; `name` is what it goes by in errors, and unless it has one of its own."""
    stages = plan.get("stages") if isinstance(plan, dict) else None
    if not isinstance(stages, list) or not stages:
        raise T2RError(f"recipe {name} has no list of stages")
    for stage in stages:
        if not isinstance(stage, dict) or "name" not in stage or "objective" not in stage:
            raise T2RError(f"recipe {name}: a stage needs a name and an objective: {stage!r}")
    plan = plan | {"stages": [dict(stage) for stage in stages]}
    for override in overrides:
        apply_override(plan, override)
    unknown = set(plan) - {f.name for f in fields(Recipe)}
    if unknown:
        raise T2RError(f"recipe {name}: no field {', '.join(sorted(unknown))}")
    swap = check_swap(plan.get("swap"), f"recipe {name}")
    made = tuple(make_stage(stage) for stage in plan["stages"])
    if len({stage.name for stage in made}) != len(made):
        raise T2RError(f"recipe {name}: two stages have the same name")
    return Recipe(str(plan.get("name", Path(name).stem)), made, plan.get("description", ""), swap)


def check_swap(swap: Any, where: str) -> dict[str, Any]:
    swap = swap or {}
    if not isinstance(swap, dict) or not set(swap) <= set(OPTIONS):
        raise T2RError(f"{where}: swap is made of the options {', '.join(OPTIONS)}; got {swap!r}")
    return swap


def apply_override(plan: dict[str, Any], override: str) -> None:
    """`stage.field=value`, or `field=value` for every stage; a budget replaces the one that was there."""
    key, equals, value = override.partition("=")
    stage_name, dot, name = key.strip().rpartition(".")
    stages = [s for s in plan["stages"] if not dot or s.get("name") == stage_name]
    if not equals or not name:
        raise T2RError(f"override {override!r}: write stage.field=value")
    if not stages:
        known = ", ".join(str(s.get("name")) for s in plan["stages"])
        raise T2RError(f"override {override!r}: no stage {stage_name!r}; there are {known}")
    if name not in {f.name for f in fields(Stage)}:
        known = ", ".join(f.name for f in fields(Stage))
        raise T2RError(f"override {override!r}: a stage has no field {name!r}; it has {known}")
    try:
        read = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise T2RError(f"override {override!r}: the value is not YAML: {error}") from error
    for stage in stages:
        if name in BUDGETS:
            for other in BUDGETS:
                stage.pop(other, None)
        stage[name] = read


def make_stage(values: dict[str, Any]) -> Stage:
    """A stage from YAML, with numbers as numbers: YAML reads 1e-3 as a string."""
    hints = get_type_hints(Stage)
    converted = {}
    for name, value in values.items():
        if name not in hints:
            raise T2RError(f"stage {values['name']!r}: no field {name!r}")
        converted[name] = number(value, str(hints[name]), f"stage {values['name']!r}: {name}")
    return Stage(**converted)


def number(value: Any, hint: str, where: str) -> Any:
    if value is None and "None" in hint:
        return None
    if isinstance(value, list) and "list" in hint:
        return [number(part, "float", where) for part in value]
    if "str" in hint:
        return str(value)
    try:
        if isinstance(value, bool) or ("int" in hint and float(value) != int(float(value))):
            raise ValueError
        return int(float(value)) if "int" in hint else float(value)
    except (TypeError, ValueError, OverflowError):
        raise T2RError(f"{where}: {value!r} is not a {'whole ' if 'int' in hint else ''}number") from None
