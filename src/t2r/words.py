"""Wording of messages and tables."""

from collections.abc import Iterable
from pathlib import Path


def counted(number: float, noun: str) -> str:
    """Return a number with its noun, in the singular for one: `1 step`, `1,000 steps`."""
    shown = f"{number:,}"
    return f"{shown} {noun}" if shown == "1" else f"{shown} {noun}s"


def extra(name: str) -> str:
    """Return how an extra is installed."""
    return f"pip install '.[{name}]' in a clone of t2r"


def in_minutes(seconds: float) -> str:
    number = f"{seconds / 60:.2g}" if seconds < 600 else f"{round(seconds / 60):,}"
    return f"{number} minute{'' if number == '1' else 's'}"


def duration(seconds: float) -> str:
    """Format an approximate time."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return counted(max(1, round(seconds)), "second")


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return models by the last part of their path, with as many parent folders as make them unique.

    What follows a comma, such as the way in which a model is decoded, is kept."""
    parted = {name: name.partition(", ") for name in names}
    paths = {path: Path(path).parts or (path,) for path, _, _ in parted.values()}  # `.` has no parts
    shown: dict[str, str] = {}
    for count in range(1, 1 + max(map(len, paths.values()), default=0)):
        shown = {path: "/".join(parts[-count:]) for path, parts in paths.items()}
        if len(set(shown.values())) == len(shown):
            break
    return {name: f"{shown[path]}{comma}{rest}" for name, (path, comma, rest) in parted.items()}
