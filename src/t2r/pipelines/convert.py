"""Converts a pretrained language or translation model into an RNN: swap, train, evaluate, save.

A finished conversion is continued in the same way: its own weights are trained further."""

from __future__ import annotations

import copy
import logging
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from t2r.attention.recurrence import exact_attention
from t2r.config import OPTIONS, T2RConfig
from t2r.data.fingerprint import of_model
from t2r.data.languages import set_languages
from t2r.errors import T2RError
from t2r.hub import choose_device, load_model, load_tokenizer
from t2r.model.merge import merge, mergeable_sites
from t2r.model.modeling import T2RModel
from t2r.model.swap import swap
from t2r.options import Conversion, SwapOptions, parse_auto
from t2r.options.calls import flat
from t2r.pipelines import beside
from t2r.pipelines.budget import MemoryBudget
from t2r.pipelines.common import Texts, advice, complete, frozen_copy
from t2r.pipelines.continuation import (
    check_continued,
    continued_plan,
    load_teacher,
    origin_of,
    remember_origin,
)
from t2r.reporting.inspection import EXACT_CROSS, state_lines
from t2r.storage import check_destination, refuse_deleting, refuse_replacing
from t2r.surgery.adapters import family_of
from t2r.surgery.frozen import unfreeze
from t2r.surgery.undo import undoing
from t2r.training.loop import processes
from t2r.training.planning.plan import check_report_to, over, trainable, within
from t2r.training.recipes.recipe import Recipe, default_recipe, load_recipe
from t2r.training.sessions.card import recall_lines
from t2r.training.sessions.session import Session, as_table, table_of
from t2r.training.steps.arithmetic import without_denormals
from t2r.training.steps.job import Settings

logger = logging.getLogger(__name__)

WRONG = "is this the right text, language and tokenizer?"


@flat(Conversion)
@without_denormals()
def convert(given: Conversion) -> dict[str, Any]:
    """Convert a language model: swap, train, evaluate, save. Returns the results, which are also saved.

    A finished conversion is continued by giving its folder as the `model`, and another one as `out`: its weights are
    trained further, in the stages of the recipe except transfers. An interrupted conversion is resumed by the same
    call.

    Args:
        model: a folder, a hub name, or a model, which is modified; a model requires `tokenizer`. A t2r model (not a
            merged one) is trained further, with its own swap.
        out: the output folder. The unfinished run is kept in `out.run`.

    Options of the swap override the recipe's. A `feature_map` uses its own defaults of `feature_size`, `init`,
    `activation`, `key_weights` and `shared`. `softmax_layers="auto:N"` keeps the N most sensitive layers, measured
    after the first stage.
    """
    began = time.monotonic()
    # Check everything that can be checked before a model is loaded.
    out, minutes, seed, softmax_layers = given.out, given.minutes, given.seed, given.softmax_layers
    options = given.swap(without=("seed", "softmax_layers"))
    check_report_to(given.report_to)
    check_destination(Path(out), given.overwrite)
    for source in (given.model, given.teacher):
        refuse_replacing(source, out)
    texts = Texts(**given.part(Texts))
    refuse_deleting([*texts.names(), given.recipe, given.tokenizer], out)
    budget = None if given.memory is None else MemoryBudget(given.memory, given.context)
    whole = load_recipe(given.recipe or default_recipe(texts.translates, memory=budget is not None), given.overrides)
    if budget is None and (given.context is not None or not whole.stages):
        wrong = "context belongs to a memory budget" if whole.stages else f"recipe {whole.name} trains nothing"
        raise T2RError(f"{wrong}: give memory, for example --memory 8MiB")
    plan = within(whole, minutes)
    auto = parse_auto(softmax_layers)
    swap_options = over(plan.swap, options) | {"seed": seed}
    if auto is None and softmax_layers is not None:
        swap_options["softmax_layers"] = softmax_layers
    place = processes.join(choose_device(given.device))
    settings = Settings.on(place, **given.part(Settings))
    hub = {"revision": given.revision, "trust_remote_code": given.trust_remote_code}
    base, tokens = load_base(given.model, given.tokenizer, place, hub)
    reference: PreTrainedModel | None = None
    """The teacher of a conversion that is continued, in float32."""
    if isinstance(base, T2RModel):
        check_continued(base, options, softmax_layers)
        refuse_replacing(base.t2r_config.base_model, out)
        reference = load_teacher(base, given.teacher, place, given.trust_remote_code)
        plan = within(continued_plan(whole, base, reference), minutes)
        swap_options = {name: getattr(base.t2r_config, name) for name in OPTIONS}
    elif given.teacher is not None:
        raise T2RError("a model is its own teacher: give another one only to continue a conversion of it")
    if texts.translates:
        for each in filter(None, (base, reference)):
            set_languages(each, tokens, given.source_language, given.target_language)
    elif given.source_language or given.target_language:
        raise T2RError("languages are for translation: give parallel text (--src and --tgt)")
    longest = None
    if budget is not None:
        budget.check(base, texts, softmax_layers)
        longest = budget.context_of(base)
    task = texts.task(plan, tokens, given, teacher_tokens=given.teacher_tokens, hold_out=True, longest=longest)
    plan = texts.fitted(plan, base)
    if texts.translates and reference is None:
        swap_options = {"recurrent": SwapOptions.recurrent} | swap_options
    config = T2RConfig(**swap_options)
    if texts.translates and config.keeps(cross=True):
        logger.info(EXACT_CROSS)
    check_auto(auto, plan, config, base)
    task.check(base, [stage.block_size for stage in plan.stages])
    planned = None
    if budget is not None:
        planned = budget.plan(base, tokens, task, swap_options, trains=bool(plan.stages), progress=given.progress)
        swap_options["feature_size"] = planned.features or swap_options.get("feature_size")
        config = T2RConfig(**swap_options, plan=planned.plan.to_dict())
    facts = {
        "model": base.config.name_or_path,
        "weights": of_model(base),
        "swap": swap_options,
        "softmax_layers": softmax_layers,
    }
    if planned is not None:
        facts["memory_plan"] = planned.plan.to_dict()
    origin = origin_of(base if reference is None else reference)
    if reference is not None:
        facts["teacher"] = origin["base_weights"]

    how: dict[str, Any] = {"minutes": minutes, "began": began, "restart": given.restart}
    with undoing(base) as swapped, Session(out, plan, task, settings, place, facts, **how) as session:
        student: PreTrainedModel = base
        if reference is None:
            frozen = frozen_copy(base, settings)
            student = swap(base, config)
        else:
            frozen = frozen_copy(reference, settings) if settings.bf16 else reference
        student.config.use_cache = True
        session.plan = trainable(session.plan, student)
        if given.merged:
            mergeable_sites(student)  # raises before training if merging is not possible
        session.prepare(student, frozen, scans=auto is not None)
        swapped.keep()

        before = "swapped" if reference is None else "before"
        # Teacher and students are evaluated in float32.
        with exact_attention(student) if reference is None else nullcontext():
            measured = session.measure("teacher", reference or student)
            beside.measure_teacher(session, reference or student, frozen, tokens)
        reference = None  # frees its memory
        if measured is not None and (doubt := task.doubt(measured)) is not None:
            logger.warning("the teacher does not know the text that is measured: %s; %s", doubt, WRONG)
        results: dict[str, Any] = {"task": task.name, "teacher": measured}
        if planned is not None:
            results["planned"] = planned.to_dict()
        results[before] = session.measure(before, student, frozen)
        student, trained = train_stages(session, student, frozen, config, auto)
        results |= trained
        results = complete(results | {"recall": session.recall(student), "merged": bool(given.merged)}, session)
        if (far := advice(task, results, limited=minutes is not None)) is not None:
            results["advice"] = far
        student.eval()
        if given.merged:
            merge(student, force=True)
        remember_origin(student.t2r_config, origin)  # type: ignore[arg-type]
        results |= beside.compare(session, student, frozen, tokens)
        state = [*state_lines(student), *recall_lines(results["recall"], results.get("teacher_recall", ()))]
        session.save(student, tokens, results, compared=True, overwrite=given.overwrite, state=state)
        if far is not None:
            logger.warning("%s", far)
    return results


def train_stages(
    session: Session, student: PreTrainedModel, teacher: PreTrainedModel, config: T2RConfig, auto: int | None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train all stages and measure the model after each. With `auto`, softmax is restored in this many layers after the
    first stage. Returns the trained model and the results."""
    results: dict[str, Any] = {"stages": {}}
    for index, stage in enumerate(session.plan.stages):
        student = session.train(student, stage)
        results["stages"][stage.name] = session.measure(stage, student, teacher)
        if auto is not None and index == 0:
            results["sensitivity"] = scan = session.most_sensitive(student, stage.block_size)
            student = with_softmax(student, teacher, config, sorted(int(layer) for layer, _ in scan[:auto]))
    return student, results


def summary(results: dict[str, Any]) -> Table:
    """Return the table of the results, in the order in which they were measured."""
    return as_table(*table_of(results, compared=True))


def load_base(
    model: str | PreTrainedModel, tokenizer: Any, place: torch.device, hub: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model in float32, for training, and its tokenizer."""
    if isinstance(model, str | Path):
        model = str(model)
        # The model first: a wrong name then fails at the first request, not after one for each tokenizer file.
        base = load_model(model, dtype="float32", device=str(place), **hub)
        tokenizer = tokenizer or load_tokenizer(model, **hub)
    else:
        base = model.float().to(place)
    if tokenizer is None:
        raise T2RError("the model has no tokenizer: give one")
    return base, tokenizer


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


def with_softmax(
    student: PreTrainedModel, teacher: PreTrainedModel, config: T2RConfig, kept: list[int]
) -> PreTrainedModel:
    """Return the student after a transfer, with softmax restored in the `kept` layers."""
    logger.info("most sensitive layers, which keep softmax attention: %s", kept)
    weights = student.state_dict()
    # A transfer trains only the maps, so the student is swapped again from the teacher, with the trained maps.
    base = copy.deepcopy(teacher).float()
    chosen = T2RConfig(**{name: getattr(config, name) for name in OPTIONS})
    chosen.softmax_layers = kept
    again = swap(base, chosen)
    again.load_state_dict({name: weights[name] for name in again.state_dict()})
    again.config.use_cache = student.config.use_cache
    unfreeze(again)
    return again
