"""Continues a finished conversion: from its weights, with its own swap, and with the teacher that it was made from."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from t2r.config import T2RConfig
from t2r.data.fingerprint import config_differences, of_weights
from t2r.errors import T2RError
from t2r.options import SwapOptions, options_of
from t2r.pipelines.common import base_model, name_of
from t2r.storage import kind_of
from t2r.training.recipes.recipe import Recipe

logger = logging.getLogger(__name__)


def origin_of(base: PreTrainedModel) -> dict[str, str | None]:
    """Return what a converted model remembers of its base model: where it is, and the fingerprint of its weights."""
    name = base.config.name_or_path
    if name and kind_of(name) == "folder":
        name = str(Path(name).resolve())
    return {"base_model": name or None, "base_weights": of_weights(base)}


def remember_origin(config: T2RConfig, origin: Mapping[str, str | None]) -> None:
    """Set the base model of a swapped model's configuration."""
    for name, value in origin.items():
        setattr(config, name, value)


def check_continued(student: Any, options: Mapping[str, Any], softmax_layers: Any) -> None:
    """Raise T2RError if a converted model cannot be trained further, or if given swap options are not its own."""
    config, name = student.t2r_config, name_of(student)
    if config.merged:
        raise T2RError(
            f"{name} is merged and cannot be trained: continue from the model it was merged from (convert saves one "
            "unless --merge, merged=True, is given)"
        )
    if isinstance(softmax_layers, str):
        raise T2RError(
            f"softmax_layers={softmax_layers} chooses layers when a model is converted: {name} is converted, and keeps "
            f"softmax attention in {student.kept_layers() or 'no layer'}; leave it out, or convert the base model again"
        )
    given = dict(options) | ({} if softmax_layers is None else {"softmax_layers": softmax_layers})
    for option, value in given.items():
        if options_of(SwapOptions)[option].named(value) != (own := getattr(config, option)):
            raise T2RError(
                f"{option} is {own} in {name}, not {value}: a conversion is continued with its own swap; leave it out, "
                "or convert the base model again"
            )


def load_teacher(
    student: Any,
    given: str | Path | PreTrainedModel | None,
    place: torch.device,
    trust_remote_code: bool = False,
    *,
    divided: bool = False,
) -> PreTrainedModel:
    """Return the teacher of a converted model, in float32: its base model, or the `given` one, which must be the same.
    If it will be divided among processes, the main one loads and compares its weights.

    Raises T2RError if the base model is not known or not found, or if the teacher has other weights."""
    config, name = student.t2r_config, name_of(student)
    known = config.base_model if given is None else given
    if known is None:
        raise T2RError(f"{name} does not say which model it was converted from: give it (--teacher, teacher=)")
    try:
        teacher = base_model(known, place, divided=divided, trust_remote_code=trust_remote_code)
    except T2RError as error:
        if given is not None:
            raise
        raise T2RError(
            f"{name} was converted from {known}, which cannot be loaded ({error}): if it has moved, say where "
            "(--teacher, teacher=)"
        ) from error
    if hasattr(teacher, "t2r_config"):
        raise T2RError(f"the teacher {name_of(teacher)} is a t2r model: give the base model of {name}")
    told = name_of(teacher)
    valued = teacher.device.type != "meta"
    if valued and config.base_weights is not None and of_weights(teacher) != config.base_weights:
        raise T2RError(
            f"{told} has other weights than the model that {name} was converted from: give that as --teacher"
        )
    if different := config_differences(teacher, student):
        raise T2RError(
            f"the configuration of {told} has another {' and '.join(different)} than that of {name}: give the model "
            "that it was converted from"
        )
    own = {key: x.shape for key, x in student.named_parameters()}
    if any(own.get(key) != x.shape for key, x in teacher.named_parameters()):
        raise T2RError(f"{told} has other layers or sizes than {name}: give the model that it was converted from")
    return teacher.eval().requires_grad_(False)


def continued_plan(plan: Recipe, student: PreTrainedModel, teacher: PreTrainedModel) -> Recipe:
    """Return the plan without transfers, unless nothing but the feature maps has been trained yet.

    A transfer teaches the maps the softmax attention of the model itself. That is the teacher's only as long as all
    other weights are the teacher's."""
    transfers = [stage for stage in plan.stages if stage.objective == "transfer"]
    if not transfers or has_weights_of(student, teacher):
        return plan
    stages = tuple(stage for stage in plan.stages if stage.objective != "transfer")
    if not stages:
        raise T2RError(
            f"recipe {plan.name} has only transfers, which require the weights of the teacher; those of "
            f"{name_of(student)} were trained: choose a recipe that distills"
        )
    logger.info(
        "stage %s is left out: %s was trained, and its own softmax attention is no longer the teacher's",
        ", ".join(stage.name for stage in transfers),
        name_of(student),
    )
    return dataclasses.replace(plan, stages=stages)


def has_weights_of(student: PreTrainedModel, teacher: PreTrainedModel) -> bool:
    """Return whether all weights that the teacher has are the same in the student."""
    own = dict(student.named_parameters())
    return all(torch.equal(own[name], x.to(own[name].device)) for name, x in teacher.named_parameters())
