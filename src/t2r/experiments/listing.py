"""The list of the shipped experiments, their models and their texts; or one experiment with its steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from t2r.experiments.data import TEXTS
from t2r.experiments.experiment import Experiment, load_experiment, scales_of, shipped_experiments
from t2r.experiments.markup import wrapped
from t2r.experiments.record import recorded
from t2r.words import duration


def as_dicts() -> list[dict[str, Any]]:
    """Return the experiments, at their first scale, with the texts of all scales."""
    return [as_dict(experiment) | {"texts": texts_of(experiment)} for experiment in experiments()]


def as_dict(experiment: Experiment) -> dict[str, Any]:
    """Return one experiment, with the texts of its scale."""
    return asdict(experiment) | {"texts": experiment.texts()}


def lines() -> Iterator[str]:
    """Yield each experiment with the options that it takes, and the files of the texts."""
    for experiment in experiments():
        yield from options(experiment, texts_of(experiment))
    yield ""
    yield from sources(name for name, text in TEXTS.items() if not text.parts)


def lines_of(experiment: Experiment) -> Iterator[str]:
    """Yield one experiment: the options that it takes, what it is about, its texts, and its steps."""
    yield from options(experiment, experiment.texts())
    if experiment.about:
        yield ""
        yield wrapped(experiment.about)
    if texts := experiment.texts():
        yield ""
        yield from sources(texts)
    yield ""
    known = {step["name"]: step for step in (recorded(experiment.record) or {"steps": ()})["steps"]}
    steps = f"{len(experiment.steps)} steps" + ("" if experiment.scale is None else f" at scale {experiment.scale}")
    yield steps + (f", {len(known)} of them recorded:" if known else ":")
    for step in experiment.steps:
        seconds = known.get(step.name, {}).get("seconds")
        yield f"    {step.name}" + ("" if seconds is None else f" ({duration(seconds)})")


def options(experiment: Experiment, texts: Iterable[str]) -> Iterator[str]:
    yield f"{experiment.name}: {experiment.title}"
    if experiment.scales:
        yield f"    --scale {'|'.join(experiment.scales)}"
    for name, source in experiment.models.items():
        yield f"    --model {name}=FOLDER [default: {source}]"
    if files := list(dict.fromkeys(TEXTS[text].files[0] for text in texts)):
        yield f"    --data FOLDER with {', '.join(files)}"


def sources(texts: Iterable[str]) -> Iterator[str]:
    yield "Texts are files in the --data folder, optionally compressed (.xz, .gz):"
    told: dict[str, str] = {}  # several texts can be parts of one file: the longest says most
    for text in map(TEXTS.__getitem__, texts):
        raw = f" (or {' or '.join(text.raw)}, which is detokenized)" if text.raw else ""
        file, line = text.files[0], f"    {text.files[0]}{raw}: {text.source}"
        told[file] = max(told.get(file, ""), line, key=len)
    yield from told.values()


def experiments() -> list[Experiment]:
    return [load_experiment(name, next(iter(scales_of(name)), None)) for name in shipped_experiments()]


def texts_of(experiment: Experiment) -> list[str]:
    """Return the texts of an experiment at any scale."""
    every = [load_experiment(experiment.name, scale) for scale in experiment.scales] or [experiment]
    return sorted({text for each in every for text in each.texts()})
