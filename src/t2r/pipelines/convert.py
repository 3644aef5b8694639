"""The whole way: a transformer and some text in, an RNN with its perplexity beside the teacher's out."""

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

from t2r.attention.merged import Mergeable
from t2r.attention.recurrence import exact_attention, recurrent_sites
from t2r.config import OPTIONS, T2RConfig
from t2r.data.fingerprint import of_model
from t2r.data.mixture import Sources
from t2r.data.teacher import writing_speed
from t2r.errors import T2RError
from t2r.feature_maps import AffineMap
from t2r.hub import choose_device, load_model, load_tokenizer
from t2r.model.merge import merge, merge_cost, mergeable_sites
from t2r.model.swap import swap
from t2r.reporting.inspection import state_lines
from t2r.storage import check_destination
from t2r.surgery.adapters import family_of
from t2r.tasks import LanguageModeling
from t2r.tasks.language_modeling import TEACHER_TOKENS, max_positions
from t2r.training import processes
from t2r.training.arithmetic import halve, without_denormals
from t2r.training.card import recall_lines
from t2r.training.plan import check_options, check_report_to, over, trainable, within
from t2r.training.recipe import Recipe, Stage, load_recipe
from t2r.training.session import Session, as_table, caching, finite, table_of
from t2r.training.trainer import Settings

logger = logging.getLogger(__name__)


@without_denormals()
def convert(
    model: str | PreTrainedModel,
    out: str,
    *,
    train: Sources | None = None,
    valid: str | None = None,
    recipe: str = "distill-lm",
    overrides: Sequence[str] = (),
    minutes: float | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    softmax_layers: list[int] | str | None = None,
    teacher_tokens: int = TEACHER_TOKENS,
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
    """Swap, train, evaluate, merge if possible, save. Returns what was measured, which is saved too.

    Args:
        model: a folder, a hub name, or a model (then give its `tokenizer`), which is itself converted.
        out: the folder to make. While it works, `out.run` beside it holds the unfinished run; the same call goes on.
        train: text files, globs, JSONL or `datasets:` names, or `teacher`: the model writes its own, or beside others
            continues excerpts of them, so that there is more of their kind. `wiki.txt:2` is read twice in an epoch,
            `wiki.txt:60%` makes up this share of what is read; also a mapping from source to weight, or a list of
            pairs. None: the texts that the recipe names.
        valid: a text to measure perplexity on, before and after.
        recipe: the name of a shipped recipe or a YAML file; `overrides` are `stage.field=value`.
        minutes: time for all of it, loading and measuring included. What is left for the stages is shared in proportion
            to their tokens or steps; where it is short, the teacher writes less, fewer windows are measured, and a step
            has fewer tokens. None: as long as it takes.
        softmax_layers: layers to keep, or `auto:N`: the N that matter most, measured after the first stage.
        merged: fold the maps into the projections at the end. None: if it can be done and pays.
        seed: of the maps, the order of the text, dropout, and what the teacher writes.
        bf16: train in bfloat16. None: on a GPU.
        compiled: compile layers and losses. None: on a GPU.
        gradient_checkpointing: less memory for activations, which are computed twice.
        limit: evaluate on so many windows only.
        save_steps: optimizer steps between checkpoints. None: a checkpoint every three minutes.
        restart: begin anew, where otherwise an unfinished run would go on.
        options: of the swap, over the recipe's own. A `feature_map` comes with its own defaults of
            `feature_size`, `init`, `activation`, `key_weights` and `shared`.
    """
    began = time.monotonic()
    # What will be done, and everything that can be refused at once.
    check_options(options)
    check_report_to(report_to)
    check_destination(Path(out), overwrite)
    plan = within(load_recipe(recipe, overrides), minutes)
    auto = parse_auto(softmax_layers)
    swap_options = over(plan.swap, options) | {"seed": seed}
    if auto is None and softmax_layers is not None:
        swap_options["softmax_layers"] = softmax_layers
    place = processes.join(choose_device(device))
    on_gpu = place.type == "cuda"
    settings = Settings(
        seed=seed,
        bf16=on_gpu if bf16 is None else bf16,
        compiled=on_gpu if compiled is None else compiled,
        gradient_checkpointing=gradient_checkpointing,
        save_steps=save_steps,
        report_to=report_to,
        progress=progress,
    )
    base, tokens = load_base(model, tokenizer, place, {"revision": revision, "trust_remote_code": trust_remote_code})
    task = LanguageModeling(
        tokens,
        plan.train if train is None else train,
        valid,
        documents=documents,
        teacher_tokens=teacher_tokens,
        limit=limit,
        seed=seed,
        progress=progress,
        caching=caching,
    )
    plan = plan.for_positions(max_positions(base))
    config = T2RConfig(**swap_options)
    check_auto(auto, plan, config, base)
    task.check(base, [stage.block_size for stage in plan.stages])
    facts = {
        "model": base.config.name_or_path,
        "weights": of_model(base),
        "swap": swap_options,
        "softmax_layers": softmax_layers,
    }

    with Session(out, plan, task, settings, place, facts, minutes=minutes, began=began, restart=restart) as session:
        teacher = copy.deepcopy(base).eval().requires_grad_(False)
        if settings.bf16:
            halve(teacher)
        student: PreTrainedModel = swap(base, config)
        student.config.use_cache = True
        session.plan = plan = trainable(plan, student)
        if merged:
            mergeable_sites(student)  # says now why it cannot be done, and not when all is trained
        session.prepare(
            student,
            teacher,
            writer=lambda length: writing_speed(teacher, tokens, length),
            scans=auto is not None,
        )

        results: dict[str, Any] = {"task": task.name, "stages": {}}
        with exact_attention(student):  # the teacher's own attention, in the precision in which students are measured
            results["teacher"] = session.measure("teacher", student)
        results["swapped"] = session.measure("swapped", student, teacher)
        for stage in plan.stages:
            student = session.train(student, stage, teacher)
            results["stages"][stage.name] = session.measure(stage.name, student, teacher)
            if auto is not None and stage is plan.stages[0]:
                student = keep_sensitive(session, student, teacher, config, auto, stage, results)
        results["recall"] = session.recall(student)
        results["log"] = session.logs()
        results |= session.pace() | {"mixture": session.mixture()}
        results = finite(results)

        student.eval()
        if merged or (merged is None and merges(student)):
            merge(student, force=bool(merged))
        results["merged"] = student.t2r_config.merged  # type: ignore[union-attr]
        session.save(
            student,
            tokens,
            results,
            compared=True,
            overwrite=overwrite,
            state=[*state_lines(student), *recall_lines(results["recall"])],
        )
    return results


def summary(results: dict[str, Any]) -> Table:
    """What was measured, in the order in which it came about."""
    return as_table(*table_of(results, compared=True))


def load_base(
    model: str | PreTrainedModel, tokenizer: Any, place: torch.device, hub: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32, to be trained, and its tokenizer."""
    if isinstance(model, str):
        # The model first: a name that is wrong is then asked for once, and not for each file that a tokenizer may have.
        base = load_model(model, dtype="float32", device=str(place), **hub)
        tokenizer = tokenizer or load_tokenizer(model, **hub)
    else:
        base = model.float().to(place)
    if tokenizer is None and base.config.is_encoder_decoder:
        raise T2RError(f"convert trains language models; {base.config.model_type} is an encoder-decoder")
    if tokenizer is None:
        raise T2RError("there is no tokenizer for this model: give one")
    return base, tokenizer


def parse_auto(softmax_layers: Any) -> int | None:
    """`auto:3` is 3; anything else is not automatic."""
    if not isinstance(softmax_layers, str):
        return None
    word, _, count = softmax_layers.partition(":")
    if word != "auto" or not count.isdigit() or int(count) < 1:
        raise T2RError(f"softmax_layers={softmax_layers!r}: give layers, or auto:N to keep the N that matter most")
    return int(count)


def check_auto(count: int | None, plan: Recipe, config: T2RConfig, model: PreTrainedModel) -> None:
    """Before anything is trained: can the layers that matter most be found and kept?"""
    if count is None:
        return
    layers = len(family_of(model).decoder_layers(model))
    if plan.stages[0].objective != "transfer":
        raise T2RError(
            f"softmax_layers=auto:{count} needs a recipe that begins with a transfer, which {plan.name} does not"
        )
    if config.softmax_every is not None or config.softmax_layers:
        raise T2RError(f"softmax_layers=auto:{count} chooses the layers: give no others, and no softmax_every")
    if count >= layers:
        raise T2RError(f"softmax_layers=auto:{count} would keep all of the {layers} layers: nothing would be swapped")


def keep_sensitive(
    session: Session,
    student: Any,
    teacher: PreTrainedModel,
    config: T2RConfig,
    count: int,
    stage: Stage,
    results: dict[str, Any],
) -> PreTrainedModel:
    """After the first stage: measure each layer alone, and give the ones that matter most their softmax back."""
    results["sensitivity"] = scan = session.most_sensitive(student, stage.block_size)
    kept = sorted(int(layer) for layer, _ in scan[:count])
    logger.info("layers that matter most, kept as softmax attention: %s", kept)
    weights = student.state_dict()
    # The trunk has not been touched by a transfer: start again from the teacher, with the trained maps.
    base = copy.deepcopy(teacher).float()
    chosen = T2RConfig(**{name: getattr(config, name) for name in OPTIONS})
    chosen.softmax_layers = kept
    again = swap(base, chosen)
    again.load_state_dict({name: weights[name] for name in again.state_dict()})
    return again.requires_grad_(True)


def merges(student: PreTrainedModel) -> bool:
    """Can the maps be folded into the projections, and does it pay?"""
    sites = recurrent_sites(student)
    possible = all(
        isinstance(site.feature_map, AffineMap) and isinstance(site, Mergeable) and site.merge_obstacle is None
        for site in sites
    )
    return possible and merge_cost(student).pays
