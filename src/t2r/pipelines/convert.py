"""The whole way: a transformer and some text in, an RNN with its perplexity beside the teacher's out."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from t2r.adapters import family_of
from t2r.config import OPTIONS, T2RConfig
from t2r.data import Blocks, check_block_size, tokenize_corpus, write_corpus
from t2r.errors import T2RError
from t2r.evaluation import encode, perplexity, read_text
from t2r.feature_maps import AffineMap
from t2r.loading import check_destination, choose_device, load_model, load_tokenizer, whole_folder
from t2r.merging import merge, merge_cost
from t2r.modeling import swap
from t2r.training.recipe import Recipe, Stage, load_recipe
from t2r.training.run import Run, run_stage
from t2r.training.sensitivity import most_sensitive

logger = logging.getLogger(__name__)

TEACHER_TOKENS = 10_000_000
"""How much the teacher writes when there is no text."""


def convert(
    model: str | PreTrainedModel,
    out: str,
    *,
    train: str | Sequence[str],
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
    limit: int | None = None,
    save_steps: int | None = None,
    report_to: str = "none",
    overwrite: bool = False,
    progress: bool = True,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Swap, train, evaluate, merge if possible, save. Returns what was measured, which is saved too.

    Args:
        model: a folder, a hub name, or a model (then give its `tokenizer`).
        out: the folder to make. While it works, `out.run` beside it holds the unfinished run; the same call goes on.
        train: text files, globs, JSONL or `datasets:` names, or `teacher`: the model writes its own.
        valid: a text to measure perplexity on, before and after.
        recipe: the name of a shipped recipe or a YAML file; `overrides` are `stage.field=value`.
        minutes: time for all stages together, shared in proportion to their tokens or steps.
        softmax_layers: layers to keep, or `auto:N`: the N that matter most, measured after the first stage.
        merged: fold the maps into the projections at the end. None: if it can be done and pays.
        limit: evaluate on so many windows only.
        options: of the swap, over the recipe's own.
    """
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise T2RError(f"no option {', '.join(unknown)}; there are {', '.join(OPTIONS)}")
    check_destination(Path(out), overwrite)
    plan = load_recipe(recipe, overrides)
    if minutes is not None:
        plan = within(plan, minutes)
    auto = parse_auto(softmax_layers)
    swap_options = plan.swap | options
    if auto is None and softmax_layers is not None:
        swap_options["softmax_layers"] = softmax_layers
    place = choose_device(device)
    hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    base, tokens = load_base(model, tokenizer, place, hub)
    config = T2RConfig(**swap_options)

    run = Run(
        Path(out + ".run"),
        {
            "model": base.config.name_or_path,
            "train": list(train) if not isinstance(train, str) else train,
            "recipe": plan.to_dict(),
            "swap": swap_options,
            "softmax_layers": softmax_layers,
            "seed": seed,
            "documents": documents,
        },
    )
    text_of = train
    if train == "teacher":
        text_of = str(
            write_corpus(base, tokens, run.folder / "corpus", tokens=teacher_tokens, seed=seed, progress=progress)
        )
    corpus = tokenize_corpus(text_of, tokens, progress=progress)
    blocks = {stage.block_size: make_blocks(corpus, stage, base, documents) for stage in plan.stages}

    teacher = copy.deepcopy(base).eval().requires_grad_(False)
    if place.type == "cuda":
        teacher.to(torch.bfloat16)
    student = swap(base, config)
    student.config.use_cache = True
    training: dict[str, Any] = {
        "seed": seed,
        "bf16": place.type == "cuda" if bf16 is None else bf16,
        "save_steps": save_steps,
        "report_to": report_to,
        "progress": progress,
        "compiled": place.type == "cuda" if compiled is None else compiled,
    }
    if place.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for the sums of bf16 features; evaluation sets it back
    text = None if valid is None else encode(tokens, read_text(valid, tokens))
    results: dict[str, Any] = {"teacher": measure(teacher, text, limit, run, "teacher"), "stages": {}}
    results["swapped"] = measure(student, text, limit, run, "swapped", teacher)
    for index, stage in enumerate(plan.stages):
        needs_teacher = stage.objective == "distill"
        student = run_stage(
            run, student, stage, blocks[stage.block_size], teacher if needs_teacher else None, **training
        )
        results["stages"][stage.name] = measure(student, text, limit, run, stage.name, teacher)
        if index == 0 and auto is not None:
            student = keep_sensitive(run, student, teacher, config, auto, blocks[stage.block_size], results)
    return finish(run, student, tokens, plan, results, out, merged, overwrite)


def within(plan: Recipe, minutes: float) -> Recipe:
    """The same stages in so many minutes, shared as their steps are."""
    steps = [stage.steps or (stage.tokens or 0) / stage.batch_tokens for stage in plan.stages]
    if not all(steps):
        raise T2RError("minutes can be shared only among stages whose budgets are steps or tokens")
    stages = tuple(
        dataclasses.replace(stage, steps=None, tokens=None, minutes=minutes * own / sum(steps))
        for stage, own in zip(plan.stages, steps, strict=True)
    )
    return dataclasses.replace(plan, stages=stages)


def summary(results: dict[str, Any]) -> Table:
    """The perplexities, in the order in which they came about."""
    table = Table("model", "perplexity", "against the teacher", "KL to the teacher")
    rows = [("teacher", results["teacher"]), ("swapped, not trained", results["swapped"])]
    rows += [(f"after {name}", measured) for name, measured in results["stages"].items()]
    for name, measured in rows:
        if measured is not None:
            ratio = measured["perplexity"] / results["teacher"]["perplexity"] - 1
            kl = "" if measured["kl"] is None else f"{measured['kl']:.4f}"
            table.add_row(name, f"{measured['perplexity']:.2f}", f"{ratio:+.1%}", kl)
    return table


def load_base(
    model: str | PreTrainedModel, tokenizer: Any, place: torch.device, hub: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32, to be trained, and its tokenizer."""
    if isinstance(model, str):
        tokenizer = tokenizer or load_tokenizer(model, **hub)
        model = load_model(model, dtype="float32", device=str(place), **hub)
    else:
        model = model.float().to(place)
    if tokenizer is None:
        raise T2RError("there is no tokenizer for this model: give one")
    if model.config.is_encoder_decoder:
        raise T2RError(f"convert trains language models; {model.config.model_type} is an encoder-decoder")
    return model, tokenizer


def make_blocks(corpus: Any, stage: Stage, model: PreTrainedModel, documents: bool) -> Blocks:
    positions = getattr(model.config, "max_position_embeddings", None)
    check_block_size(stage.block_size, family_of(model).max_positions(model) or positions)
    return Blocks(corpus, stage.block_size, documents=documents)


def measure(
    model: PreTrainedModel, text: Any, limit: int | None, run: Run, name: str, teacher: PreTrainedModel | None = None
) -> dict[str, Any] | None:
    """Perplexity now, once: on resuming it is what it was."""
    if text is None:
        return None

    def score() -> dict[str, Any]:
        training = model.training
        result = perplexity(model.eval(), text, limit=limit, teacher=teacher)
        model.train(training)
        kl = None if result.kl is None else result.kl.mean().item()
        return {"perplexity": result.perplexity, "kl": kl, "tokens": result.tokens}

    measured: dict[str, Any] = run.remember(f"measured.{name}", score)
    logger.info("%s: perplexity %.3f", name, measured["perplexity"])
    return measured


def parse_auto(softmax_layers: Any) -> int | None:
    """`auto:3` is 3; anything else is not automatic."""
    if not isinstance(softmax_layers, str):
        return None
    word, _, count = softmax_layers.partition(":")
    if word != "auto" or not count.isdigit() or int(count) < 1:
        raise T2RError(f"softmax_layers={softmax_layers!r}: give layers, or auto:N to keep the N that matter most")
    return int(count)


def keep_sensitive(
    run: Run,
    student: Any,
    teacher: PreTrainedModel,
    config: T2RConfig,
    count: int,
    blocks: Blocks,
    results: dict[str, Any],
) -> PreTrainedModel:
    """After the first stage: measure each layer alone, and give the ones that matter most their softmax back."""
    scan = run.remember("sensitivity", lambda: most_sensitive(student, blocks))
    results["sensitivity"] = scan
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


def finish(
    run: Run,
    student: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    plan: Recipe,
    results: dict[str, Any],
    out: str,
    merged: bool | None,
    overwrite: bool,
) -> dict[str, Any]:
    """Merge where it pays, save all of it, and clear the workshop away."""
    student.eval()
    sites = family_of(student).merges and all(
        isinstance(m.feature_map, AffineMap) for m in student.modules() if hasattr(m, "feature_map")
    )
    if merged or (merged is None and sites and merge_cost(student).pays):
        merge(student, force=bool(merged))
    results["merged"] = student.t2r_config.merged  # type: ignore[attr-defined]
    results["log"] = {stage.name: run.facts.get(f"{stage.name}.log") for stage in plan.stages}
    with whole_folder(out, overwrite=overwrite) as folder:
        student.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(plan.to_dict(), sort_keys=False), encoding="utf-8")
        (folder / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    shutil.rmtree(run.folder, ignore_errors=True)
    return results
