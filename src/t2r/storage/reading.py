"""Reading of files that strangers wrote: results, recipes, experiments.

They are data, and must not take the machine: texts have a largest size, and what they describe has a largest depth, a
largest number of parts (aliases of YAML count as what they stand for), and no integers that are longer than 64 bits.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from t2r.errors import T2RError
from t2r.storage.paths import kind_of, shortened

LARGEST_JSON = 256 << 20
"""Bytes of a JSON file."""
LARGEST_YAML = 1 << 20
"""Bytes of a YAML file."""
DEEPEST = 50
"""Levels of lists and mappings inside each other."""
MOST_PARTS = 100_000
"""Parts of a YAML file, where an alias has those of what it stands for."""
LARGEST_INTEGER = 2**64
"""The limit of the absolute value of integers."""


def read_text(path: str | Path, largest: int, what: str = "") -> str:
    """Return the text of a file. Raises T2RError if it cannot be read, is not UTF-8, or has more than `largest` bytes.

    `what` is its name in errors."""
    what = what or shortened(path)
    if kind_of(path) not in ("file", None):
        raise T2RError(f"{what} is not a file")
    try:
        with open(path, "rb") as file:
            raw = file.read(largest + 1)
        if len(raw) > largest:
            raise T2RError(f"{what} cannot be read: it has more than {largest:,} bytes")
        return raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise T2RError(f"{what} cannot be read: {error}") from error


def read_inside(folder: Path, name: str | Path, largest: int = LARGEST_YAML) -> str | None:
    """Return the text of a file of a folder that a stranger may have made; None if there is no such file.

    Raises T2RError for a name or a link that leads out of the folder: it could be any file of the user."""
    path = folder / name
    if kind_of(path) != "file":
        return None
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise T2RError(f"{shortened(path)} is outside of {shortened(folder)}: it is not read")
    return read_text(path, largest)


# --- JSON ---------------------------------------------------------------------------------------------------


def read_json(path: str | Path, largest: int = LARGEST_JSON) -> Any:
    """Read a JSON file. Raises T2RError if it is damaged or beyond the limits of this module."""
    return parse_json(read_text(path, largest), str(shortened(path)))


def parse_json(text: str, what: str) -> Any:
    """Parse JSON. NaN and infinities, which are not standard, become None, as t2r writes them."""
    try:
        value = json.loads(text, parse_constant=lambda _: None, parse_float=number)
    except (ValueError, RecursionError) as error:
        why = error if isinstance(error, ValueError) else "it is nested too deeply"
        raise T2RError(f"{what} cannot be read as JSON: {why}") from error
    check_limits(value, what)
    return value


def number(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def check_limits(value: Any, what: str) -> None:
    """Raise T2RError if parsed JSON or YAML is nested too deeply, or has a huge integer."""
    level = [value]
    for _ in range(DEEPEST):
        if not level:
            return
        below: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                below += part.keys()
                below += part.values()
            elif isinstance(part, list | tuple | set):
                below += part
            elif isinstance(part, int) and abs(part) >= LARGEST_INTEGER:
                raise T2RError(f"{what} has an integer of more than 64 bits")
        level = below
    raise T2RError(f"{what} has more than {DEEPEST} levels of lists and mappings")


@contextmanager
def understood(path: str | Path) -> Iterator[None]:
    """Convert the errors of code that shows a result of another form to T2RError: results are recognized by their first
    names only."""
    try:
        yield
    except T2RError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise T2RError(f"{path} is not a complete result of this version of t2r ({reason})") from error


# --- YAML ---------------------------------------------------------------------------------------------------


def parse_yaml(text: str, what: str) -> Any:
    """Parse YAML. Raises T2RError if it is not valid or beyond the limits of this module."""
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if len(text) > LARGEST_YAML:
        raise T2RError(f"{what} has more than {LARGEST_YAML:,} characters")
    try:
        check_events(yaml.parse(text, Loader=loader), what)
        value = yaml.load(text, Loader=loader)
    except T2RError:
        raise
    # Invalid dates, numbers of too many digits, lists as keys.
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, TypeError) as error:
        raise T2RError(f"{what} is not valid YAML: {error or type(error).__name__}") from error
    check_limits(value, what)
    return value


def check_events(events: Iterator[Any], what: str) -> None:
    """Raise T2RError if YAML has too many levels or parts, before anything is made of it.

    Nested aliases, a few lines of text, can stand for billions of parts. The events are read one after the other, while
    a deep tree would exhaust the stack."""
    import yaml

    sizes: dict[str, int] = {}
    """The parts of each anchor that is complete."""
    opened: list[tuple[str | None, int]] = []
    """The anchor of each collection around the current event, and the parts before it."""
    parts = 0
    for event in events:
        if isinstance(event, yaml.events.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor is not None:
                sizes[anchor] = parts - before
        elif isinstance(event, yaml.events.AliasEvent):
            if event.anchor in {anchor for anchor, _ in opened}:
                raise T2RError(f"{what} has an alias that contains itself: *{event.anchor}")
            parts += sizes.get(str(event.anchor), 1)
        elif isinstance(event, yaml.events.CollectionStartEvent):
            opened.append((event.anchor, parts))
            parts += 1
        elif isinstance(event, yaml.events.ScalarEvent):
            parts += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        if len(opened) > DEEPEST:
            raise T2RError(f"{what} has more than {DEEPEST} levels of lists and mappings")
        if parts > MOST_PARTS:
            raise T2RError(f"{what} has more than {MOST_PARTS:,} parts, with those of its aliases")
