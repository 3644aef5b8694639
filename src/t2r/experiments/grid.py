"""Scales and grids: how one step of an experiment file becomes a step for each cell.

    {for:AXIS}    the label of the cell on an axis of the step's `for`
    {with:AXIS}   the words of that label, if `for` gives the labels words; otherwise the label itself
    {scale:NAME}  a value of the scale

The words may contain placeholders too. Inner placeholders are replaced first: {scale:train-{for:pair}}.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from t2r.errors import T2RError
from t2r.experiments.safety import LONGEST, MOST_STEPS

CHOICE = re.compile(r"\{(for|with|scale):([\w-]+)\}")
DEEPEST = 5
"""Replacements inside of replacements. More are a circle."""


def cells_of(said: Any, scale: Mapping[str, Any] | None, where: str) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Yield the cells of a step's `for`: the label on each axis, and the words of each label.

    The labels of an axis are a list, a mapping to their words, or one text with spaces, which may be a value of the
    scale. A scale without labels has no such cells."""
    axes: dict[str, dict[str, str]] = {}
    if not isinstance(said or {}, dict):
        raise T2RError(f"{where}: `for` must be a mapping from axes to labels; got {said!r}")
    for axis, labels in (said or {}).items():
        if axis == "seed":
            raise T2RError(f"{where}: an axis cannot be called seed: write `seeds: true` and give --seeds")
        if isinstance(labels, str) and labels:
            axes[str(axis)] = {label: label for label in filled(labels, {}, {}, scale, where).split()}
            continue
        if not labels or not isinstance(labels, dict | list):
            raise T2RError(f"{where}: axis {axis} must have a list of labels, or a mapping to their words")
        words = labels if isinstance(labels, dict) else {str(label): label for label in labels}
        named = {filled(str(label), {}, {}, scale, where): text for label, text in words.items()}
        axes[str(axis)] = {label: "" if text is None else str(text) for label, text in named.items()}
    if math.prod(map(len, axes.values())) > MOST_STEPS:
        raise T2RError(f"{where}: a step has more than {MOST_STEPS:,} cells")
    for labels in product(*axes.values()):
        cell = dict(zip(axes, labels, strict=True))
        yield cell, {axis: axes[axis][label] for axis, label in cell.items()}


def filled(
    text: str, cell: Mapping[str, str], words: Mapping[str, str], scale: Mapping[str, Any] | None, where: str
) -> str:
    """Return the text with the placeholders of cells and scales replaced."""
    values: dict[str, Mapping[str, Any]] = {"for": cell, "with": words, "scale": scale or {}}

    def value(found: re.Match[str]) -> str:
        kind, name = found.groups()
        if name not in values[kind]:
            raise T2RError(f"{where}: {found[0]} is not known; there are {', '.join(values[kind]) or 'none'}")
        put = str(values[kind][name])
        length[0] += len(put)
        if length[0] > LONGEST:
            raise T2RError(f"{where}: a text has more than {LONGEST:,} characters, with its placeholders replaced")
        return put

    length = [len(text)]
    for _ in range(DEEPEST):
        text, count = CHOICE.subn(value, text)
        if not count:
            return text
    raise T2RError(f"{where}: placeholders contain each other: {text}")


def chosen_scale(scales: Any, name: str | None, where: str) -> dict[str, Any] | None:
    """Return the values of a scale, or None if the experiment has no scales."""
    if scales is None:
        if name is not None:
            raise T2RError(f"{where} has no scales: leave out --scale")
        return None
    if not isinstance(scales, dict) or not all(isinstance(x, str) and isinstance(y, dict) for x, y in scales.items()):
        raise T2RError(f"{where}: scales must be a mapping from names to values")
    if name not in scales:
        wrong = "requires a scale" if name is None else f"has no scale {name}"
        raise T2RError(f"{where} {wrong}: give --scale {' or '.join(scales)}")
    return {str(key): value for key, value in scales[name].items()}


def seeded(command: str, seed: int, others: set[str]) -> str:
    """Return the command of a step for a seed, which uses the outputs of other steps for the same seed."""
    command = re.sub(
        r"\{out:([\w-]+)\}",
        lambda found: f"{{out:{name_for(found[1], seed) if found[1] in others else found[1]}}}",
        command,
    )
    return f"{command} --seed {seed}" if command.split()[1] in ("convert", "pretrain", "swap") else command


def name_for(step: str, seed: int) -> str:
    return step if seed == 0 else f"{step}-seed{seed}"
