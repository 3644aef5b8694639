"""The list of the shipped experiments, their models and their texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from t2r.experiments.data import TEXTS
from t2r.experiments.experiment import Experiment, load_experiment, scales_of, shipped_experiments


def as_dicts() -> list[dict[str, Any]]:
    """Return the experiments, at their first scale, with the texts of all scales."""
    return [asdict(experiment) | {"texts": texts_of(experiment)} for experiment in experiments()]


def lines() -> Iterator[str]:
    """Yield each experiment with the options that it takes, and the files of the texts."""
    for experiment in experiments():
        yield f"{experiment.name}: {experiment.title}"
        if experiment.scales:
            yield f"    --scale {'|'.join(experiment.scales)}"
        for name, source in experiment.models.items():
            yield f"    --model {name}=FOLDER [default: {source}]"
        if texts := texts_of(experiment):
            yield f"    --data FOLDER with {', '.join(dict.fromkeys(TEXTS[text].files[0] for text in texts))}"
    yield ""
    yield "Texts are files in the --data folder, optionally compressed (.xz, .gz):"
    for text in (each for each in TEXTS.values() if not each.parts):
        raw = f" (or {' or '.join(text.raw)}, which is detokenized)" if text.raw else ""
        yield f"    {text.files[0]}{raw}: {text.source}"


def experiments() -> list[Experiment]:
    return [load_experiment(name, next(iter(scales_of(name)), None)) for name in shipped_experiments()]


def texts_of(experiment: Experiment) -> list[str]:
    """Return the texts of an experiment at any scale."""
    every = [load_experiment(experiment.name, scale) for scale in experiment.scales] or [experiment]
    return sorted({text for each in every for text in each.texts()})
