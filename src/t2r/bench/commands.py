"""Benchmarks of models that are given by name: load them, measure them, and write a page if asked to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from t2r.bench import decoding, memory, training, translating
from t2r.bench.figures import decoding_page, memory_page, translating_page
from t2r.bench.models import add_feature_sizes, half_dtype, load_models
from t2r.config import SWAP, T2RConfig
from t2r.errors import T2RError
from t2r.hub import choose_device, load_config
from t2r.options import RunOptions
from t2r.reporting.page import PAGE
from t2r.training.recipes.recipe import default_recipe


def load(
    names: Sequence[str],
    *,
    feature_sizes: Sequence[int] = (),
    dtype: str = RunOptions.dtype,
    device: str = RunOptions.device,
) -> dict[str, PreTrainedModel]:
    """Load models by name (see `load_models`), and add the first one with other feature sizes, untrained."""
    models = load_models(names, dtype=dtype, device=str(choose_device(device)))
    add_feature_sizes(models, feature_sizes)
    return models


def check_page(page: str | None) -> None:
    """Raise T2RError if a page cannot be written, before anything is measured."""
    if page is not None:
        PAGE.check(page)


def decode(
    models: dict[str, PreTrainedModel],
    lengths: Sequence[int] = (),
    *,
    batches: Sequence[int] = (),
    state_dtype: str | None = None,
    page: str | None = None,
    **options: Any,
) -> list[decoding.Report]:
    """Measure decoding with each batch size. `page` is an HTML file to write, `options` are those of `decoding.run`."""
    check_page(page)
    stored, lengths = half_dtype(state_dtype), lengths or decoding.LENGTHS
    reports = [decoding.run(models, lengths, batch=rows, state_dtype=stored, **options) for rows in batches or [1]]
    if page is not None:
        decoding_page(reports).write(Path(page))
    return reports


def translate(
    models: dict[str, PreTrainedModel], lengths: Sequence[int] = (), *, page: str | None = None, **options: Any
) -> translating.Report:
    """Measure translation. `page` is an HTML file to write, `options` are those of `translating.run`."""
    check_page(page)
    report = translating.run(models, lengths or translating.LENGTHS, **options)
    if page is not None:
        translating_page(report).write(Path(page))
    return report


def find_largest_batch(
    models: dict[str, PreTrainedModel], *, state_dtype: str | None = None, page: str | None = None, **options: Any
) -> memory.Report:
    """Find the largest batch. `page` is an HTML file to write, `options` are those of `memory.run`."""
    check_page(page)
    report = memory.run(models, state_dtype=half_dtype(state_dtype), **options)
    if page is not None:
        memory_page(report).write(Path(page))
    return report


def train(
    name: str,
    *,
    device: str = RunOptions.device,
    like: str | None = None,
    recipe: str | None = None,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> training.Report:
    """Measure the optimizer steps of a conversion.

    Args:
        like: a converted model, whose swap options are used: also its windows and states.
        recipe: defaults to `memory-lm` or `memory-mt` if that model has windows.
        options: swap options that override others.
        settings: those of `training.run`.
    """
    given = dict(options or {})
    config = None if like is None else load_config(like)
    if config is not None:
        if not isinstance(config, T2RConfig):
            raise T2RError(f"{like} is not a converted model")
        given = {key: getattr(config, key) for key in SWAP} | given
    (model,) = load([name], dtype="float32", device=device).values()
    if config is not None and recipe is None:
        recipe = default_recipe(bool(model.config.is_encoder_decoder), memory=config.plan is not None)
    return training.run(model, recipe=recipe, options=given, **settings)
