"""Adapts the stages of a recipe to the caller's time, model and feature map."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from transformers import PreTrainedModel
from transformers.integrations import get_available_reporting_integrations

from t2r.errors import T2RError
from t2r.options import CAUSAL, SwapOptions
from t2r.training.recipes.recipe import Recipe
from t2r.training.steps.optimizers import trained_by

logger = logging.getLogger(__name__)

OF_THE_MAP = ("feature_size", "cross_feature_size", "init", "activation", "key_weights", "shared")
"""Options that a recipe sets for its own feature map. Another map uses its own defaults for these."""


def check_report_to(name: str) -> None:
    if name != "none" and name not in (there := get_available_reporting_integrations()):
        raise T2RError(f"report_to={name!r} is not installed: choose one of {', '.join(['none', *there])}")


def over(planned: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Merge options of a swap into those of a plan. A `feature_map` among them brings its own defaults. The plan's size
    of cross attention is for those who make it recurrent."""
    if "feature_map" in options:
        planned = {name: x for name, x in planned.items() if name not in OF_THE_MAP}
    if (planned | options).get("recurrent", SwapOptions.recurrent) == CAUSAL:
        planned = {name: x for name, x in planned.items() if name != "cross_feature_size"}
    return planned | options


def within(plan: Recipe, minutes: float | None) -> Recipe:
    """Return the plan with a total budget in minutes, shared in proportion to the stages' steps or minutes. None: the
    stages keep their own budgets."""
    if minutes is None:
        return plan
    if not plan.stages:
        raise T2RError(f"recipe {plan.name} trains nothing: leave out minutes")
    own = [stage.minutes for stage in plan.stages]
    if not all(own):
        own = [stage.steps or (stage.tokens or 0) / stage.batch_tokens for stage in plan.stages]
    shares = [share for share in own if share]
    if len(shares) < len(own):
        raise T2RError("minutes requires a recipe whose budgets are all in minutes, or all in steps or tokens")
    stages = tuple(
        dataclasses.replace(stage, steps=None, tokens=None, minutes=minutes * share / sum(shares))
        for stage, share in zip(plan.stages, shares, strict=True)
    )
    return dataclasses.replace(plan, stages=stages)


def trainable(plan: Recipe, model: PreTrainedModel) -> Recipe:
    """Return the plan without stages that train maps without parameters (performer, elu), with a warning."""
    stages = tuple(s for s in plan.stages if s.train != "maps" or trained_by(model, s))
    for stage in plan.stages:
        if stage not in stages:
            logger.warning("stage %s is skipped: the feature map has nothing to train", stage.name)
    if plan.stages and not stages:
        raise T2RError(f"recipe {plan.name} has nothing to train: the feature map has no parameters or is frozen")
    return dataclasses.replace(plan, stages=stages)
