"""Converts a pretrained language or translation model into an RNN: swap, train, evaluate, save.

A finished conversion is continued in the same way: its own weights are trained further."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Sequence
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
from t2r.data.mixture import Sources
from t2r.errors import T2RError
from t2r.hub import choose_device, load_model, load_tokenizer
from t2r.model.merge import merge, mergeable_sites
from t2r.model.modeling import T2RModel
from t2r.model.swap import swap
from t2r.options import RunOptions, check, parse_auto, refuse_unknown
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
from t2r.reporting.inspection import state_lines
from t2r.storage import check_destination, refuse_deleting, refuse_replacing
from t2r.surgery.adapters import family_of
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


@without_denormals()
def convert(
    model: str | PreTrainedModel,
    out: str,
    *,
    train: Sources | None = None,
    valid: str | None = None,
    source: Sources | None = None,
    target: Sources | None = None,
    valid_source: str | None = None,
    valid_target: str | None = None,
    source_language: str | None = None,
    target_language: str | None = None,
    teacher_beams: int | None = None,
    join: int = 1,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    minutes: float | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    teacher: str | PreTrainedModel | None = None,
    softmax_layers: list[int] | str | None = None,
    memory: str | int | None = None,
    context: int | None = None,
    teacher_tokens: int = RunOptions.teacher_tokens,
    documents: bool = False,
    merged: bool = False,
    seed: int = 0,
    device: str = "auto",
    bf16: bool | None = None,
    compiled: bool | None = None,
    gradient_checkpointing: bool = False,
    limit: int | None = None,
    save_steps: int | None = None,
    report_to: str = "none",
    overwrite: bool = False,
    restart: bool = False,
    progress: bool = True,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Convert a language model: swap, train, evaluate, save. Returns the results, which are also saved.

    A finished conversion is continued by giving its folder as the `model`, and another one as `out`: its weights are
    trained further, in the stages of the recipe except transfers. An interrupted conversion is resumed by the same
    call.

    Args:
        model: a folder, a hub name, or a model, which is modified; a model requires `tokenizer`. A t2r model (not a
            merged one) is trained further, with its own swap.
        out: the output folder. The unfinished run is kept in `out.run`.
        train: training text: files, globs, JSONL or `datasets:` names, or `teacher` for text that the model generates;
            with other sources, it generates continuations of excerpts from them. `wiki.txt:2` reads a source twice per
            epoch, `wiki.txt:60%` makes it this share of the tokens. Also a mapping from source to weight, or a list of
            pairs. None: the recipe's sources.
        valid: text to measure perplexity on, before and after training. None: the last 2 % of the first text in `train`
            (if that is long enough), which are then not trained on.
        source: files of source sentences, one per line, for an encoder-decoder; weights as for `train`.
        target: the file of targets of each source, or `teacher`: the model translates the source (beam search).
        valid_source: source sentences to measure BLEU on, before and after training.
        valid_target: references of `valid_source`.
        source_language, target_language: for multilingual translation models, codes of the model's tokenizer. They are
            saved with the model.
        teacher_beams: beams of the search for `target="teacher"`. None: 5, as in evaluation. 1: greedy search, several
            times as fast.
        join: groups of 1, 2, ... up to this many neighboring pairs of lines, in turn, become one pair: for text with
            shorter lines than those that will be translated.
        recipe: the name of a shipped recipe or a YAML file. `overrides` are `stage.field=value`. None: `distill-lm`, or
            `distill-mt` with `source`.
        minutes: total time budget, including loading and evaluation. The stages share the rest in proportion to their
            tokens or steps. If time is short, the teacher generates less text, fewer windows are evaluated, and batches
            are smaller. None: the recipe's budget.
        teacher: if a conversion is continued, its base model. None: where it was when it was converted. A model with
            other weights is refused.
        softmax_layers: softmax layers to keep, or `auto:N` for the N most sensitive ones, measured after the first
            stage.
        memory: the bytes of a sequence, for example `8MiB`. Every head then has a window of the tokens that it needs,
            measured on the training text, and a state of what has left it; with the recipe `none`, a window only.
        context: with `memory`, the number of tokens that windows are planned for. None: the positions of the model, at
            most 2,048.
        teacher_tokens: number of tokens that the teacher generates for `train="teacher"`.
        documents: attention does not cross document boundaries inside a block.
        merged: merge the feature maps into the projections, also where that does not pay. A merged model generates
            faster, and cannot be trained.
        seed: seed of the feature maps, the data order, dropout, and the text that the teacher generates.
        bf16: train in bfloat16. None: on a GPU.
        compiled: compile layers and losses, and replay steps as CUDA graphs; with `source`, whose batches vary in
            shape, layers are not compiled. None: on a GPU.
        gradient_checkpointing: recompute activations in the backward pass, to save memory.
        limit: maximum number of windows or lines to evaluate.
        save_steps: optimizer steps between checkpoints. None: a checkpoint every three minutes.
        report_to: `none`, or an experiment tracker of transformers.
        overwrite: replace an existing model in `out`.
        restart: delete an unfinished run and start again.
        options: options of the swap, which override the recipe's. A `feature_map` uses its own defaults of
            `feature_size`, `init`, `activation`, `key_weights` and `shared`.
    """
    began = time.monotonic()
    # Check everything that can be checked before a model is loaded.
    refuse_unknown(options, OPTIONS)
    check_report_to(report_to)
    check_destination(Path(out), overwrite)
    for source_ in (model, teacher):
        refuse_replacing(source_, out)
    given = {"limit": limit, "minutes": minutes, "teacher_tokens": teacher_tokens, "save_steps": save_steps}
    check(RunOptions, given)
    texts = Texts(train, valid, documents, source, target, valid_source, valid_target)
    refuse_deleting([*texts.names(), recipe, tokenizer], out)
    budget = None if memory is None else MemoryBudget(memory, context)
    whole = load_recipe(recipe or default_recipe(texts.translates, memory=memory is not None), overrides)
    if budget is None and (context is not None or not whole.stages):
        wrong = "context belongs to a memory budget" if whole.stages else f"recipe {whole.name} trains nothing"
        raise T2RError(f"{wrong}: give memory, for example --memory 8MiB")
    plan = within(whole, minutes)
    auto = parse_auto(softmax_layers)
    swap_options = over(plan.swap, options) | {"seed": seed}
    if auto is None and softmax_layers is not None:
        swap_options["softmax_layers"] = softmax_layers
    place = processes.join(choose_device(device))
    settings = Settings.on(
        place,
        seed=seed,
        bf16=bf16,
        compiled=compiled,
        gradient_checkpointing=gradient_checkpointing,
        save_steps=save_steps,
        report_to=report_to,
        progress=progress,
    )
    hub = {"revision": revision, "trust_remote_code": trust_remote_code}
    base, tokens = load_base(model, tokenizer, place, hub)
    reference: PreTrainedModel | None = None
    """The teacher of a conversion that is continued, in float32."""
    if isinstance(base, T2RModel):
        check_continued(base, options, softmax_layers)
        refuse_replacing(base.t2r_config.base_model, out)
        reference = load_teacher(base, teacher, place, trust_remote_code)
        plan = within(continued_plan(whole, base, reference), minutes)
        swap_options = {name: getattr(base.t2r_config, name) for name in OPTIONS}
    elif teacher is not None:
        raise T2RError("a model is its own teacher: give another one only to continue a conversion of it")
    if texts.translates:
        for each in filter(None, (base, reference)):
            set_languages(each, tokens, source_language, target_language)
    elif source_language or target_language:
        raise T2RError("languages are for translation: give parallel text (--src and --tgt)")
    of_data: dict[str, Any] = {"teacher_beams": teacher_beams, "teacher_tokens": teacher_tokens, "join": join}
    of_data["hold_out"] = True
    if budget is not None:
        budget.check(base, texts, softmax_layers)
        of_data["longest"] = budget.context_of(base)
    task = texts.task(plan, tokens, limit=limit, seed=seed, progress=progress, **of_data)
    plan = texts.fitted(plan, base)
    config = T2RConfig(**swap_options)
    check_auto(auto, plan, config, base)
    task.check(base, [stage.block_size for stage in plan.stages])
    planned = None
    if budget is not None:
        planned = budget.plan(base, tokens, task, swap_options, trains=bool(plan.stages), progress=progress)
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

    how: dict[str, Any] = {"minutes": minutes, "began": began, "restart": restart}
    with undoing(base) as swapped, Session(out, plan, task, settings, place, facts, **how) as session:
        student: PreTrainedModel = base
        if reference is None:
            frozen = frozen_copy(base, settings)
            student = swap(base, config)
        else:
            frozen = frozen_copy(reference, settings) if settings.bf16 else reference
        student.config.use_cache = True
        session.plan = trainable(session.plan, student)
        if merged:
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
        results = complete(results | {"recall": session.recall(student), "merged": bool(merged)}, session)
        if (far := advice(task, results)) is not None:
            results["advice"] = far
        student.eval()
        if merged:
            merge(student, force=True)
        remember_origin(student.t2r_config, origin)  # type: ignore[arg-type]
        results |= beside.compare(session, student, frozen, tokens)
        state = [*state_lines(student), *recall_lines(results["recall"], results.get("teacher_recall", ()))]
        session.save(student, tokens, results, compared=True, overwrite=overwrite, state=state)
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
    return again.requires_grad_(True)
