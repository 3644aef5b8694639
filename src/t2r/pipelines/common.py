"""What `convert` and `pretrain` have in common: their texts and the task these make, and their results."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from t2r.data.mixture import parse_sources
from t2r.errors import T2RError
from t2r.hub import load_model, load_shell
from t2r.options import Sources
from t2r.options.training import Training
from t2r.reporting import environment
from t2r.storage import finite
from t2r.surgery.adapters import repaired
from t2r.tasks import LanguageModeling, Task, Translation
from t2r.tasks.base import max_positions
from t2r.training.loop import processes
from t2r.training.planning.budget import ADVISED_STEPS
from t2r.training.recipes.recipe import Recipe
from t2r.training.sessions.session import Session, caching
from t2r.training.steps.arithmetic import halve
from t2r.training.steps.job import Settings


@dataclass(frozen=True)
class Texts:
    """The texts of a training command: text for language modeling, or parallel text for translation.

    Raises T2RError if both kinds are given."""

    train: Sources | None = None
    valid: str | None = None
    documents: bool = False
    source: Sources | None = None
    target: Sources | None = None
    valid_source: str | None = None
    valid_target: str | None = None

    def __post_init__(self) -> None:
        for name in ("valid", "valid_source", "valid_target"):
            if isinstance(given := getattr(self, name), Path):
                object.__setattr__(self, name, str(given))
        if self.translates and (self.train is not None or self.valid is not None or self.documents):
            raise T2RError(
                "give a text (train, valid, documents) or parallel text (source, target: --src, --tgt), not both"
            )

    @property
    def translates(self) -> bool:
        """Whether parallel text is given."""
        pairs = (self.source, self.target, self.valid_source, self.valid_target)
        return any(given is not None for given in pairs)

    def names(self) -> list[str]:
        """Return the names of all texts that are given."""
        pairs = [parse_sources(given) for given in (self.train, self.source, self.target) if given is not None]
        valid = (self.valid, self.valid_source, self.valid_target)
        return [entry.source for entries in pairs for entry in entries] + [name for name in valid if name is not None]

    def sources(self, plan: Recipe) -> Sources:
        """Return the sources of training text: those given, or the recipe's."""
        return plan.train if self.train is None else self.train

    def fitted(self, plan: Recipe, model: PreTrainedModel) -> Recipe:
        """Return the plan with the blocks that the task and the model allow."""
        return plan.a_block_at_a_time() if self.translates else plan.for_positions(max_positions(model))

    def task(self, plan: Recipe, tokenizer: PreTrainedTokenizerBase, given: Training, **of_text: Any) -> Task:
        """Return the training task. `of_text` are further arguments of `LanguageModeling`."""
        common: dict[str, Any] = {name: getattr(given, name) for name in ("limit", "seed", "progress")}
        common["caching"] = caching
        if self.translates:
            pairs = (self.source, self.target, self.valid_source, self.valid_target)
            return Translation(tokenizer, *pairs, teacher_beams=given.teacher_beams, join=given.join, **common)
        if given.join != 1:
            raise T2RError("join is for parallel text: give --src and --tgt, or leave it out")
        return LanguageModeling(
            tokenizer, self.sources(plan), self.valid, documents=self.documents, **of_text, **common
        )


def base_model(
    given: str | Path | PreTrainedModel, place: torch.device, *, divided: bool = False, **hub: Any
) -> PreTrainedModel:
    """Return the base model of a conversion in float32: the given one, changed in place, or the one of a folder or hub
    name. If it will be divided among processes, it is whole, on the CPU of the main one.

    Raises T2RError if its weights are quantized."""
    if isinstance(given, PreTrainedModel):
        refuse_quantized(given)
        return repaired(given.float().to(place))
    if divided:
        base = load_whole(str(given), **hub)
    else:
        base = load_model(str(given), dtype="float32", device=str(place), **hub)
    refuse_quantized(base)
    return base


def refuse_quantized(model: PreTrainedModel) -> None:
    """Raise T2RError if the weights of a model were quantized when it was loaded, as its folder says."""
    if getattr(model, "is_quantized", False):
        raise T2RError(
            f"{name_of(model)} has quantized weights, which can be neither swapped nor trained: give the model without "
            "quantization"
        )


def name_of(model: PreTrainedModel) -> str:
    return model.config.name_or_path or "the model"


def load_whole(source: str, **hub: Any) -> PreTrainedModel:
    """Return a model in float32 on the CPU, in the main process. In the others its weights have no values."""
    return load_model(source, dtype="float32", **hub) if processes.is_main() else load_shell(source, **hub)


def frozen_copy(model: PreTrainedModel, settings: Settings) -> PreTrainedModel:
    """Return a copy of the model that is not trained: a teacher, in bfloat16 if the settings say so."""
    copied = copy.deepcopy(model).eval().requires_grad_(False)
    if settings.bf16:
        halve(copied)
    return copied


def advice(task: Task, results: dict[str, Any], *, limited: bool = False) -> str | None:
    """Say that a conversion is far worse than its teacher, and what to do. None: it is not.

    Of one that was not measured, say so if a stage had few steps because the time was `limited`."""
    teacher, student = results["teacher"], next(reversed(results["stages"].values()), None)
    steps = " and ".join(f"{count:,}" for count in results["steps"].values())
    if teacher is None or student is None:
        if not limited or min(results["steps"].values(), default=ADVISED_STEPS) >= ADVISED_STEPS:
            return None
        return f"probably far from the teacher, and not measured: it had {steps} steps; give more time (--minutes)"
    gap = task.gap(teacher, student)
    if gap is None:
        return None
    further = "" if results["merged"] else "; to train this result further, give its folder to t2r convert"
    return (
        f"far from the teacher: {gap}, after {steps} steps; give more time (--minutes) or steps, more text, a larger "
        f"--feature-size, or keep softmax layers (--softmax-layers auto:N){further}"
    )


def complete(results: dict[str, Any], session: Session) -> dict[str, Any]:
    """Return the results with the log, the pace and the sources of the session, and where it ran."""
    measured = {"log": session.logs(), **session.pace(), "mixture": session.mixture(), "made": environment.made()}
    done: dict[str, Any] = finite(results | measured)
    return done
