"""The whole way: a transformer and some text in, an RNN with its perplexity beside the teacher's out."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.utils.data import ConcatDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from t2r.attention.recurrence import exact_attention
from t2r.config import OPTIONS, T2RConfig
from t2r.data import Blocks, TokenCorpus, tokenize_corpus, write_corpus
from t2r.data.fingerprint import of_model
from t2r.errors import T2RError
from t2r.evaluation import encode, read_text
from t2r.feature_maps import AffineMap
from t2r.hub import choose_device, load_model, load_tokenizer
from t2r.model.merge import merge, merge_cost, mergeable_sites
from t2r.model.swap import swap
from t2r.pipelines.training import (
    as_table,
    caching,
    check_options,
    check_report_to,
    fast_sums,
    finite,
    max_positions,
    measure,
    over,
    results_section,
    save_trained,
    within,
    without_denormals,
)
from t2r.storage import check_destination
from t2r.surgery.adapters import family_of
from t2r.training import processes
from t2r.training.recipe import Recipe, load_recipe
from t2r.training.run import Run, run_stage
from t2r.training.sensitivity import most_sensitive

logger = logging.getLogger(__name__)

TEACHER = "teacher"
"""Among the texts to train on: what the model itself writes."""
TEACHER_TOKENS = 10_000_000
"""How much that is."""


@without_denormals()
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
        model: a folder, a hub name, or a model (then give its `tokenizer`), which is itself converted.
        out: the folder to make. While it works, `out.run` beside it holds the unfinished run; the same call goes on.
        train: text files, globs, JSONL or `datasets:` names, or `teacher`: the model writes its own, or beside others
            continues excerpts of them, so that there is more of their kind.
        valid: a text to measure perplexity on, before and after.
        recipe: the name of a shipped recipe or a YAML file; `overrides` are `stage.field=value`.
        minutes: time for all stages together, shared in proportion to their tokens or steps.
        softmax_layers: layers to keep, or `auto:N`: the N that matter most, measured after the first stage.
        merged: fold the maps into the projections at the end. None: if it can be done and pays.
        limit: evaluate on so many windows only.
        options: of the swap, over the recipe's own. A `feature_map` comes with its own defaults of
            `feature_size`, `init`, `activation` and `key_weights`.
    """
    check_options(options)
    check_report_to(report_to)
    check_destination(Path(out), overwrite)
    plan = load_recipe(recipe, overrides)
    if minutes is not None:
        plan = within(plan, minutes)
    auto = parse_auto(softmax_layers)
    swap_options = over(plan.swap, options)
    if auto is None and softmax_layers is not None:
        swap_options["softmax_layers"] = softmax_layers
    place = processes.join(choose_device(device))
    bf16 = place.type == "cuda" if bf16 is None else bf16
    hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    base, tokens = load_base(model, tokenizer, place, hub)
    config = T2RConfig(**swap_options)
    if auto is not None:
        check_auto(auto, plan, config, base)
    plan = plan.for_positions(max_positions(base))
    text = None if valid is None else encode(tokens, read_text(valid, tokens))

    sources = [train] if isinstance(train, str) else list(train)
    run = Run(
        Path(out + ".run"),
        {
            "model": base.config.name_or_path,
            "weights": of_model(base),
            "train": sources,
            "teacher_tokens": teacher_tokens if TEACHER in sources else None,
            "valid": valid,
            "limit": limit,
            "recipe": plan.to_dict(),
            "swap": swap_options,
            "softmax_layers": softmax_layers,
            "seed": seed,
            "documents": documents,
            "bf16": bf16,
        },
    )
    teacher = copy.deepcopy(base).eval().requires_grad_(False)
    if bf16:
        halve(teacher)
    student: PreTrainedModel = swap(base, config)
    if merged:
        mergeable_sites(student)  # says now why it cannot be done, and not when all is trained
    student.config.use_cache = True
    corpora = make_corpora(run, teacher, tokens, sources, plan, teacher_tokens, seed, progress)
    for corpus in corpora:
        corpus.check_vocabulary(base.config.get_text_config().vocab_size)
    blocks: dict[int, ConcatDataset[Any]] = {
        size: ConcatDataset([Blocks(corpus, size, documents=documents) for corpus in corpora])
        for size in {stage.block_size for stage in plan.stages}
    }
    # Nothing is refused from here on: the run begins. A corpus is named by what is in it.
    names = [corpus.folder.name for corpus in corpora]
    run.remember("corpus", lambda: names)
    run.check("corpus", names)
    training: dict[str, Any] = {
        "seed": seed,
        "bf16": bf16,
        "save_steps": save_steps,
        "report_to": report_to,
        "progress": progress,
        "compiled": place.type == "cuda" if compiled is None else compiled,
    }
    with exact_attention(student):  # the teacher's own attention, in the precision in which students are measured
        results: dict[str, Any] = {"teacher": measure(student, text, limit, run, "teacher"), "stages": {}}
    results["swapped"] = measure(student, text, limit, run, "swapped", teacher)
    for index, stage in enumerate(plan.stages):
        own = blocks[stage.block_size]
        with fast_sums(place):
            student = run_stage(run, student, stage, own, teacher if stage.objective == "distill" else None, **training)
        results["stages"][stage.name] = measure(student, text, limit, run, stage.name, teacher)
        if index == 0 and auto is not None:
            student = keep_sensitive(run, student, teacher, config, auto, own, results)
    results["log"] = {stage.name: run.facts[f"{stage.name}.log"] for stage in plan.stages}
    results = finite(results)
    return finish(run, student, tokens, plan, results, out, merged, overwrite)


def make_corpora(
    run: Run,
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: list[str],
    plan: Recipe,
    teacher_tokens: int,
    seed: int,
    progress: bool,
) -> list[TokenCorpus]:
    """The tokens to train on: of the texts there are, and of what the teacher writes."""
    texts = [source for source in sources if source != TEACHER]
    with caching():
        corpora = [tokenize_corpus(texts, tokenizer, progress=progress)] if texts else []
        if texts == sources:
            return corpora
        length = max(stage.block_size for stage in plan.stages)
        wanted: dict[str, Any] = {"tokens": teacher_tokens, "length": length, "seed": seed}
        wanted["continues"] = corpora[0] if texts else None
        written = write_corpus(teacher, tokenizer, run.folder / "corpus", **wanted, progress=progress)
        # What the teacher wrote has its own marks between documents.
        return [*corpora, tokenize_corpus(str(written), tokenizer, add_eos=False, progress=progress)]


def summary(results: dict[str, Any]) -> Table:
    """The perplexities, in the order in which they came about."""
    return as_table(HEADER, rows(results))


HEADER = ("model", "perplexity", "against the teacher", "KL to the teacher")


def rows(results: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    measured = [("teacher", results["teacher"]), ("swapped, not trained", results["swapped"])]
    measured += [(f"after {name}", values) for name, values in results["stages"].items()]
    cells = []
    for name, values in measured:
        if values is not None:
            own, kl = values["perplexity"], values["kl"]
            ratio = "" if own is None else f"{own / results['teacher']['perplexity'] - 1:+.1%}"
            cells.append(
                (name, "not finite" if own is None else f"{own:.2f}", ratio, "" if kl is None else f"{kl:.4f}")
            )
    return cells


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
    if base.config.is_encoder_decoder:
        raise T2RError(f"convert trains language models; {base.config.model_type} is an encoder-decoder")
    if tokenizer is None:
        raise T2RError("there is no tokenizer for this model: give one")
    return base, tokenizer


def halve(model: PreTrainedModel) -> None:
    """Weights in bfloat16. Not buffers: the frequencies of rotary positions would be rounded too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)


def parse_auto(softmax_layers: Any) -> int | None:
    """`auto:3` is 3; anything else is not automatic."""
    if not isinstance(softmax_layers, str):
        return None
    word, _, count = softmax_layers.partition(":")
    if word != "auto" or not count.isdigit() or int(count) < 1:
        raise T2RError(f"softmax_layers={softmax_layers!r}: give layers, or auto:N to keep the N that matter most")
    return int(count)


def check_auto(count: int, plan: Recipe, config: T2RConfig, model: PreTrainedModel) -> None:
    """Before anything is trained: can the layers that matter most be found and kept?"""
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
    run: Run,
    student: Any,
    teacher: PreTrainedModel,
    config: T2RConfig,
    count: int,
    blocks: ConcatDataset[Any],
    results: dict[str, Any],
) -> PreTrainedModel:
    """After the first stage: measure each layer alone, and give the ones that matter most their softmax back."""
    scan = run.remember("sensitivity", lambda: [list(cost) for cost in most_sensitive(student, blocks)])
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
    results["merged"] = student.t2r_config.merged  # type: ignore[union-attr]
    save_trained(run, student, tokenizer, plan, results, out, results_section(plan, HEADER, rows(results)), overwrite)
    return results
