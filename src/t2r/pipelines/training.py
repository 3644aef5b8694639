"""What `convert` and `pretrain` share: checks, measurements, and how what was trained is saved."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import yaml
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations import get_available_reporting_integrations

from t2r.config import OPTIONS
from t2r.errors import T2RError
from t2r.evaluation import perplexity
from t2r.evaluation.perplexity import WINDOW
from t2r.storage import whole_folder
from t2r.surgery.adapters import family_of
from t2r.training import processes
from t2r.training.recipe import Recipe
from t2r.training.run import Run

logger = logging.getLogger(__name__)


def check_options(options: dict[str, Any]) -> None:
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise T2RError(f"no option {', '.join(unknown)}; there are {', '.join(OPTIONS)}")


def check_report_to(name: str) -> None:
    if name != "none" and name not in (there := get_available_reporting_integrations()):
        raise T2RError(f"report_to={name!r} is not installed: choose one of {', '.join(['none', *there])}")


def over(planned: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Options of a swap over those of a plan. A map that is named comes with its own defaults: what the plan says of
    its own map is not meant for it."""
    if "feature_map" in options:
        of_map = "feature_size", "init", "activation", "key_weights"
        planned = {name: x for name, x in planned.items() if name not in of_map}
    return planned | options


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


def max_positions(model: PreTrainedModel) -> int | None:
    positions: int | None = getattr(model.config, "max_position_embeddings", None)
    try:
        return family_of(model).max_positions(model) or positions
    except T2RError:  # a family that we do not know
        return positions


@contextmanager
def caching() -> Iterator[None]:
    """Text becomes tokens, once: the main process goes first, and the others find what it has cached."""
    with processes.main_first():
        try:
            yield
        except OSError as error:
            raise T2RError(f"the tokens of the text cannot be cached: {error}") from error


@contextmanager
def fast_sums(place: torch.device) -> Iterator[None]:
    """On a GPU, TF32 for the float32 products of bf16 features while it trains; measurements keep full precision."""
    before = torch.get_float32_matmul_precision()
    if place.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def without_denormals() -> Iterator[None]:
    """Numbers below 1e-38 are zero. Features that forget fade into these, and a CPU takes many times as long for each:
    the transfer of some layers was five times as slow. Threads take it over when they start, so it should come first;
    those that are started stay so."""
    flushed = (torch.tensor(1e-39) * 1.0).item() == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)


# --- Measuring ----------------------------------------------------------------------------------------------


def measure(
    model: PreTrainedModel,
    text: Any,
    limit: int | None,
    run: Run,
    name: str,
    teacher: PreTrainedModel | None = None,
    *,
    longest: int = WINDOW,
) -> dict[str, Any] | None:
    """Perplexity now, once: on resuming it is what it was. Windows are the paper's, or as long as the model can read,
    or as it has ever read (`longest`)."""
    if text is None:
        return None

    def score() -> dict[str, Any]:
        window = min(WINDOW, longest, max_positions(model) or WINDOW)
        result = perplexity(model, text, window=window, stride=window // 2, limit=limit, teacher=teacher)
        return {
            "perplexity": result.perplexity,
            "word_perplexity": result.word_perplexity,
            "bits_per_byte": result.bits_per_byte,
            "kl": None if result.kl is None else result.kl.mean().item(),
            "tokens": result.tokens,
        }

    measured: dict[str, Any] = run.remember(f"measured.{name}", score)
    logger.info("%s: perplexity %.3f", name, measured["perplexity"])
    return measured


def finite(value: Any) -> Any:
    """The same without infinities and NaN, which JSON does not know."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- Telling and saving -------------------------------------------------------------------------------------


def as_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    return table


def results_section(plan: Recipe, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """For the model card: how it was trained, and what came of it."""
    lines = [
        "",
        "## Results",
        "",
        f"Trained with the recipe `{plan.name}` (recipe.yaml; all numbers: results.json).",
        "",
    ]
    if rows:
        lines += [f"| {' | '.join(cells)} |" for cells in (header, ("---",) * len(header), *rows)] + [""]
    return "\n".join(lines)


def save_trained(
    run: Run,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    plan: Recipe,
    results: dict[str, Any],
    out: str,
    section: str,
    overwrite: bool,
    files: dict[str, str] | None = None,
) -> None:
    """All of it in one folder, whole or not at all, and the workshop cleared away.

    `section` is added to the model card; `files` are more texts by name, written before the model is saved."""
    if processes.is_main():
        with whole_folder(out, overwrite=overwrite) as folder:
            for name, text in (files or {}).items():
                (folder / name).write_text(text, encoding="utf-8")
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            (folder / "recipe.yaml").write_text(as_yaml(plan.to_dict()), encoding="utf-8")
            (folder / "results.json").write_text(json.dumps(results, indent=1, allow_nan=False), encoding="utf-8")
            with (folder / "README.md").open("a", encoding="utf-8") as card:
                card.write(section)
        shutil.rmtree(run.folder, ignore_errors=True)
    processes.wait()


def as_yaml(value: dict[str, Any]) -> str:
    return yaml.safe_dump(value, sort_keys=False)
