"""Converts a pretrained language or translation model into an RNN: swap, train, evaluate, merge, save."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Sequence
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
from t2r.data.teacher import writing_speed
from t2r.errors import T2RError
from t2r.hub import choose_device, load_model, load_tokenizer
from t2r.model.merge import merge, merge_cost, mergeable_sites
from t2r.model.modeling import T2RModel
from t2r.model.swap import swap
from t2r.options import RunOptions, check, refuse_unknown
from t2r.pipelines.common import Texts, complete, frozen_copy
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
    softmax_layers: list[int] | str | None = None,
    teacher_tokens: int = RunOptions.teacher_tokens,
    documents: bool = False,
    merged: bool | None = None,
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
    """Convert a language model: swap, train, evaluate, merge if possible, save. Returns the results, which are also
    saved.

    An interrupted conversion is resumed by the same call.

    Args:
        model: a folder, a hub name, or a model, which is modified; a model requires `tokenizer`.
        out: the output folder. The unfinished run is kept in `out.run`.
        train: training text: files, globs, JSONL or `datasets:` names, or `teacher` for text that the model generates;
            with other sources, it generates continuations of excerpts from them. `wiki.txt:2` reads a source twice per
            epoch, `wiki.txt:60%` makes it this share of the tokens. Also a mapping from source to weight, or a list of
            pairs. None: the recipe's sources.
        valid: text to measure perplexity on, before and after training.
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
        softmax_layers: softmax layers to keep, or `auto:N` for the N most sensitive ones, measured after the first
            stage.
        teacher_tokens: number of tokens that the teacher generates for `train="teacher"`.
        documents: attention does not cross document boundaries inside a block.
        merged: merge the feature maps into the projections. None: if possible and cheaper.
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
    refuse_replacing(model, out)
    given = {"limit": limit, "minutes": minutes, "teacher_tokens": teacher_tokens, "save_steps": save_steps}
    check(RunOptions, given)
    texts = Texts(train, valid, documents, source, target, valid_source, valid_target)
    refuse_deleting([*texts.names(), recipe, tokenizer], out)
    plan = within(load_recipe(recipe or default_recipe(texts.translates), overrides), minutes)
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
    base, tokens = load_base(model, tokenizer, place, {"revision": revision, "trust_remote_code": trust_remote_code})
    if isinstance(base, T2RModel):
        raise T2RError(f"{base.config.name_or_path or 'the model'} is already a t2r model: give the base model")
    if texts.translates:
        set_languages(base, tokens, source_language, target_language)
    elif source_language or target_language:
        raise T2RError("languages are for translation: give parallel text (--src and --tgt)")
    of_data: dict[str, Any] = {"teacher_beams": teacher_beams, "teacher_tokens": teacher_tokens, "join": join}
    task = texts.task(plan, tokens, limit=limit, seed=seed, progress=progress, **of_data)
    plan = texts.fitted(plan, base)
    config = T2RConfig(**swap_options)
    check_auto(auto, plan, config, base)
    task.check(base, [stage.block_size for stage in plan.stages])
    facts = {
        "model": base.config.name_or_path,
        "weights": of_model(base),
        "swap": swap_options,
        "softmax_layers": softmax_layers,
    }

    how: dict[str, Any] = {"minutes": minutes, "began": began, "restart": restart}
    with undoing(base) as swapped, Session(out, plan, task, settings, place, facts, **how) as session:
        teacher = frozen_copy(base, settings)
        student: PreTrainedModel = swap(base, config)
        student.config.use_cache = True
        session.plan = trainable(session.plan, student)
        if merged:
            mergeable_sites(student)  # raises before training if merging is not possible
        writer = None if texts.translates else lambda length: writing_speed(teacher, tokens, length)
        session.prepare(student, teacher, writer=writer, scans=auto is not None)
        swapped.keep()

        student, results = train_stages(session, student, teacher, config, auto)
        results = complete(results | {"recall": session.recall(student)}, session)
        student.eval()
        if merged or (merged is None and merges(student)):
            merge(student, force=bool(merged))
        results["merged"] = student.t2r_config.merged  # type: ignore[union-attr]
        state = [*state_lines(student), *recall_lines(results["recall"])]
        session.save(student, tokens, results, compared=True, overwrite=overwrite, state=state)
    return results


def train_stages(
    session: Session, student: PreTrainedModel, teacher: PreTrainedModel, config: T2RConfig, auto: int | None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train all stages and measure the model before and after each. With `auto`, softmax is restored in this many
    layers after the first stage. Returns the trained model and the results."""
    results: dict[str, Any] = {"task": session.task.name, "stages": {}}
    with exact_attention(student):  # the teacher, in the precision in which students are evaluated
        results["teacher"] = session.measure("teacher", student)
    results["swapped"] = session.measure("swapped", student, teacher)
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


def parse_auto(softmax_layers: Any) -> int | None:
    """Return N for `auto:N`, and None for anything else. Raises T2RError for any other string."""
    if not isinstance(softmax_layers, str):
        return None
    word, _, count = softmax_layers.partition(":")
    if word != "auto" or not count.isdigit() or int(count) < 1:
        raise T2RError(f"softmax_layers={softmax_layers!r}: give layers, or auto:N for the N most sensitive layers")
    return int(count)


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


def merges(student: PreTrainedModel) -> bool:
    """Return whether the maps can be merged into the projections and merging saves operations."""
    try:
        return merge_cost(student).pays
    except T2RError:
        return False
