"""Flags for the stage options that are set most often."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from typer.core import TyperCommand

from t2r.errors import T2RError
from t2r.options import options_of
from t2r.training.recipes.stage import Stage

HELP = {
    "steps": "Optimizer steps of each stage, instead of the recipe's budget.",
    "learning_rate": "Peak learning rate of stages that train more than the feature maps.",
}
NAMES = ("steps", "learning_rate", "batch_tokens", "block_size")
STAGE = [
    dataclasses.replace(option, default=None, unset="the recipe's", help=HELP.get(option.name, option.help))
    for option in map(options_of(Stage).__getitem__, NAMES)
]
"""Each sets one value for every stage: shorthand for --set."""


class ShowsRecipe(TyperCommand):
    """A command whose help shows the defaults of its default recipe. The recipe is read only for the help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        params: dict[str, Any] = {param.name: param for param in self.params if param.name is not None}
        for name, words in recipe_defaults(params["recipe"].default or "distill-lm").items():
            if name in params:
                params[name].help = re.sub(r"\[default: [^\]]*\]$", f"[default: {words}]", params[name].help)
        super().format_help(ctx, formatter)


def recipe_defaults(name: str) -> dict[str, str]:
    """Return the options that a recipe sets, formatted for the help."""
    from t2r.training.recipes.recipe import load_recipe

    recipe = load_recipe(name)
    shown = in_words(recipe.swap)
    for option in STAGE:
        stages = [stage for stage in recipe.stages if option.name != "learning_rate" or stage.train != "maps"]
        values = {stage.name: getattr(stage, option.name) for stage in stages}
        if len(set(values.values())) > 1:
            shown[option.name] = ", ".join(f"{stage} {value:,}" for stage, value in values.items())
        else:
            shown |= {} if None in values.values() else in_words({option.name: next(iter(values.values()))})
    return shown


def in_words(values: Mapping[str, Any]) -> dict[str, str]:
    """Format values as flags, such as no-shared for False."""
    return {
        name: f"{'' if value else 'no-'}{name.replace('_', '-')}" if isinstance(value, bool) else str(value)
        for name, value in values.items()
    }


def stage_overrides(given: Mapping[str, Any], options: Mapping[str, Any], recipe: str | None = None) -> list[str]:
    """Return the flags as overrides, followed by those of --set among the options, which take precedence.

    With a `recipe`, the learning rate applies only to its stages that train more than the maps: stages that train maps
    alone use learning rates a hundred times as high."""
    overrides: Sequence[str] = options.get("overrides", ())
    if "steps" in given and "minutes" in options:
        raise T2RError("--steps and --minutes both set the budget: give one of them")
    made = [f"{name}={str(value).lower()}" for name, value in given.items() if name != "learning_rate"]
    if "learning_rate" in given:
        stages = [""]
        if recipe is not None:
            from t2r.training.recipes.recipe import load_recipe

            plan = load_recipe(recipe, [*made, *overrides])
            stages = [f"{stage.name}." for stage in plan.stages if stage.train != "maps"] or stages
        made += [f"{stage}learning_rate={given['learning_rate']}" for stage in stages]
    return [*made, *overrides]
