"""What a conversion begins with: the model, its teacher, the task and the plan, checked before anything is trained."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from t2r.budgets.planning import Planned
from t2r.config import OPTIONS, T2RConfig
from t2r.data.fingerprint import of_model
from t2r.data.languages import set_languages
from t2r.data.mixture import parse_sources
from t2r.data.teacher_logits import TeacherLogits
from t2r.errors import T2RError
from t2r.hub import choose_device, load_tokenizer
from t2r.model.modeling import T2RModel
from t2r.model.swap import swap
from t2r.options import Conversion, SwapOptions, parse_auto
from t2r.pipelines import sharded, taught
from t2r.pipelines.budget import MemoryBudget, check_kind
from t2r.pipelines.common import Texts, base_model, frozen_copy
from t2r.pipelines.continuation import check_continued, continued_plan, load_teacher, origin_of
from t2r.pipelines.sharded import by_main
from t2r.reporting.inspection_tables import EXACT_CROSS
from t2r.storage import check_destination, refuse_deleting, refuse_replacing
from t2r.surgery.adapters import family_of
from t2r.tasks import Task
from t2r.training.loop import processes
from t2r.training.planning.plan import check_report_to, over, within
from t2r.training.recipes.recipe import Recipe, default_recipe, load_recipe
from t2r.training.sessions.run import run_folder
from t2r.training.steps.job import Settings

logger = logging.getLogger(__name__)

OF_MAPS = (
    "feature_map", "feature_size", "shared", "grouped", "decay", "init", "activation", "key_weights",
    "freeze_feature_map",
)  # fmt: skip
"""Options of a swap that have no effect on windows."""


class Asked:
    """What was asked for, checked as far as that is possible before a model is loaded."""

    def __init__(self, given: Conversion) -> None:
        self.given = given
        self.swap: dict[str, Any] = given.swap(without=("seed", "softmax_layers"))
        """The options of the swap that were given, which override the recipe's."""
        check_report_to(given.report_to)
        check_destination(given.out, given.overwrite)
        for source in (given.model, given.teacher):
            refuse_replacing(source, given.out)
            refuse_replacing(source, run_folder(given.out))
        self.texts = Texts(**given.part(Texts))
        refuse_deleting([*self.texts.names(), given.recipe, given.tokenizer], given.out, run_folder(given.out))
        self.budget = (
            None
            if given.memory is None
            else MemoryBudget(given.memory, given.context, given.source_tokens, given.nbits)
        )
        default = default_recipe(self.texts.translates, memory=self.budget is not None)
        self.recipe = load_recipe(default if given.recipe is None else given.recipe, given.overrides)
        if self.budget is None:
            self.check_without_budget()
        if not self.recipe.stages and (unused := sorted(set(self.swap) & set(OF_MAPS))):
            raise T2RError(
                f"recipe {self.recipe.name} makes windows only, without feature maps: do not give {', '.join(unused)}"
            )
        sources = [entry.source for entry in parse_sources(self.texts.sources(self.recipe))]
        sharded.check(given, self.recipe, [*self.texts.names(), *sources])
        self.divided = given.fsdp_size is not None
        self.logits = taught.find(given, self.recipe, self.texts, sources)
        self.plan = within(self.recipe, given.minutes)
        self.auto = parse_auto(given.softmax_layers)
        self.place = processes.join(choose_device(given.device))
        self.settings = Settings.on(self.place, **given.part(Settings))
        if self.divided:
            sharded.check_place(self.place)
            self.settings = dataclasses.replace(self.settings, compiled=False)

    def check_without_budget(self) -> None:
        """Raise T2RError for options of a memory budget without one."""
        wrong = next(
            (name for name in ("context", "source_tokens", "nbits") if getattr(self.given, name) is not None), None
        )
        if wrong is not None or not self.recipe.stages:
            told = (
                f"recipe {self.recipe.name} trains nothing" if wrong is None else f"{wrong} belongs to a memory budget"
            )
            raise T2RError(f"{told}: give memory, for example --memory 8MiB")

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load the model in float32, for training, and its tokenizer. If it will be divided among processes, only the
        main one loads its weights."""
        model, tokenizer = self.given.model, self.given.tokenizer
        hub: dict[str, Any] = {"revision": self.given.revision, "trust_remote_code": self.given.trust_remote_code}
        # The model first: a wrong name then fails at the first request, not after one for each tokenizer file.
        base = base_model(model, self.place, divided=self.divided, **hub)
        if isinstance(model, str | Path):
            tokenizer = tokenizer or load_tokenizer(str(model), **hub)
        if tokenizer is None:
            raise T2RError("the model has no tokenizer: give one")
        return base, tokenizer

    def options(self, base: PreTrainedModel) -> dict[str, Any]:
        """Return the options of the swap: those of a converted model, or the recipe's and those given."""
        if isinstance(base, T2RModel):
            return {name: getattr(base.t2r_config, name) for name in OPTIONS}
        options = over(self.plan.swap, self.swap) | {"seed": self.given.seed}
        if self.auto is None and self.given.softmax_layers is not None:
            options["softmax_layers"] = self.given.softmax_layers
        return {"recurrent": SwapOptions.recurrent} | options if self.texts.translates else options

    def teacher(self, base: PreTrainedModel) -> PreTrainedModel | None:
        """Return the teacher of a conversion that is continued, in float32. None: the model is its own teacher."""
        given = self.given
        if isinstance(base, T2RModel):
            check_continued(base, self.swap, given.softmax_layers)
            refuse_replacing(base.t2r_config.base_model, given.out)
            return load_teacher(base, given.teacher, self.place, given.trust_remote_code, divided=self.divided)
        if given.teacher is not None:
            raise T2RError("a model is its own teacher: give another one only to continue a conversion of it")
        return None

    def set_languages(self, models: list[PreTrainedModel], tokenizer: PreTrainedTokenizerBase) -> None:
        source, target = self.given.source_language, self.given.target_language
        if self.texts.translates:
            for model in models:
                set_languages(model, tokenizer, source, target)
        elif source or target:
            raise T2RError("languages are for translation: give parallel text (--src and --tgt)")


@dataclass
class Start:
    """A conversion that can begin."""

    base: PreTrainedModel
    teacher: PreTrainedModel | None
    """The teacher of a conversion that is continued, in float32. None: the base model, which is then swapped."""
    tokenizer: PreTrainedTokenizerBase
    task: Task
    plan: Recipe
    config: T2RConfig
    place: torch.device
    settings: Settings
    auto: int | None
    """How many softmax layers are chosen after the first stage. None: all options of the swap are known."""
    planned: Planned | None
    facts: dict[str, Any]
    """What a run that is resumed must have in common with this one."""
    origin: dict[str, str | None]
    """What the result remembers of its base model."""
    logits: TeacherLogits | None
    """The teacher's distribution of the text, from the disk."""

    def models(self) -> tuple[PreTrainedModel, PreTrainedModel]:
        """Return the student, which is the base model with its class changed, and the teacher of its training."""
        if self.teacher is None:
            frozen = frozen_copy(self.base, self.settings)
            student: PreTrainedModel = swap(self.base, self.config)
        else:
            frozen = frozen_copy(self.teacher, self.settings) if self.settings.bf16 else self.teacher
            student = self.base
        student.config.use_cache = True
        return student, frozen


def prepare(given: Conversion) -> Start:
    """Check what was asked, load the model and its teacher, and make the task and the plan.

    Raises T2RError if the conversion cannot be done."""
    asked = Asked(given)
    base, tokenizer = asked.load()
    teacher, options, plan, texts, budget = (
        asked.teacher(base),
        asked.options(base),
        asked.plan,
        asked.texts,
        asked.budget,
    )
    if teacher is not None:
        known = teacher
        plan = within(by_main(lambda: continued_plan(asked.recipe, base, known), asked.divided), given.minutes)
    asked.set_languages([base] if teacher is None else [base, teacher], tokenizer)
    longest = None
    if budget is not None:
        check_kind(base, texts)
        budget.check(base, texts, given.softmax_layers, options, trains=bool(plan.stages))
        longest = budget.context_of(base)
    of_text: dict[str, Any] = {"teacher_tokens": given.teacher_tokens, "hold_out": True, "longest": longest}
    task = texts.task(plan, tokenizer, given, **of_text, joined=asked.logits is None)
    plan = texts.fitted(plan, base)
    config, planned = T2RConfig(**options), None
    if texts.translates and teacher is None:
        config.refuse_idle()
    if texts.translates and config.keeps(cross=True):
        logger.info(EXACT_CROSS)
    check_auto(asked.auto, plan, config, base)
    task.check(base, [stage.block_size for stage in plan.stages])
    if budget is not None:
        planned = make_plan(budget, asked, base, tokenizer, task, options)
        options["feature_size"] = planned.features or options.get("feature_size")
        if planned.cross_features:
            options["cross_feature_size"] = planned.cross_features
        config = T2RConfig(**options, plan=planned.plan.to_dict())
    followed = base if teacher is None else teacher
    origin, weights = by_main(lambda: (origin_of(followed), of_model(base)), asked.divided)
    if asked.logits is not None:
        taught.check(asked.logits, given, plan, followed, origin["base_weights"])
    facts = {
        "model": base.config.name_or_path,
        "weights": weights,
        "swap": options,
        "softmax_layers": given.softmax_layers,
    }
    if planned is not None:
        facts["memory_plan"] = planned.plan.to_dict()
    if teacher is not None:
        facts["teacher"] = origin["base_weights"]
    if asked.logits is not None:
        facts["teacher_logits"] = taught.fact(asked.logits)
    place, settings, auto = asked.place, asked.settings, asked.auto
    return Start(
        base, teacher, tokenizer, task, plan, config, place, settings, auto, planned, facts, origin, asked.logits
    )


def make_plan(
    budget: MemoryBudget,
    asked: Asked,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    options: dict[str, Any],
) -> Planned:
    """Return the plan of a memory budget. Of several processes the main one makes it, since measurements on another
    device can differ in their last bits; if they will share the model, with the whole model on its device."""
    trains, shown = bool(asked.plan.stages), asked.given.progress

    def made() -> Planned:
        with sharded.on_device(base, asked.place) if asked.divided else nullcontext():
            return budget.plan(base, tokenizer, task, options, trains=trains, progress=shown)

    task.read()  # all processes read the text: the main one first
    return by_main(made)


def check_auto(count: int | None, plan: Recipe, config: T2RConfig, model: PreTrainedModel) -> None:
    """Raise T2RError, before training, if the most sensitive layers cannot be chosen."""
    if count is None:
        return
    layers = len(family_of(model).decoder_layers(model))
    if plan.stages[0].objective != "transfer":
        raise T2RError(
            f"softmax_layers=auto:{count} requires a recipe whose first stage is a transfer; {plan.name} has none"
        )
    if config.softmax_every is not None or config.softmax_layers:
        raise T2RError(f"softmax_layers=auto:{count} cannot be combined with other softmax layers or softmax_every")
    if count >= layers:
        raise T2RError(f"softmax_layers=auto:{count} would keep all {layers} layers: nothing would be swapped")
