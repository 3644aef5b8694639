"""Pairs of files, or of columns of a dataset: what was asked for, and its lines.

Files that do not fit together are refused: one is missing, or has another number of lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from t2r.data.mixture import WeightedSource, check_shares, parse_source
from t2r.data.text import DatasetSource, FileSource, check_unicode, find_sources
from t2r.errors import T2RError
from t2r.options import Sources
from t2r.words import counted


@dataclass(frozen=True)
class PairedSource:
    """A file of sources with its weight, and the file of its targets."""

    weighted: WeightedSource
    target: str

    @property
    def source(self) -> str:
        return self.weighted.source

    def __str__(self) -> str:
        return f"{self.weighted} -> {self.target}"


def parse_pairs(source: Sources | None, target: Sources | None, for_all: Sequence[str] = ()) -> list[PairedSource]:
    """Pair source files with target files, in order. Sources may have weights. A single target that is in `for_all`
    applies to every source."""
    sources = [parse_source(entry) for entry in as_list(source)]
    targets = [str(entry) for entry in as_list(target)]
    if len(targets) == 1 and targets[0] in for_all:
        targets *= len(sources)
    if len(sources) != len(targets):
        raise T2RError(
            f"{counted(len(sources), 'file')} of sources and {len(targets)} of targets were given: give each source "
            "its target"
        )
    check_shares(sources)
    return [PairedSource(*pair) for pair in zip(sources, targets, strict=True)]


def as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    if isinstance(given, dict):
        return list(given.items())
    return [given] if isinstance(given, str | Path) else list(given)


class LineSource(Protocol):
    """One side of parallel text: lines in order."""

    @property
    def path(self) -> Path | str:
        """The name in messages."""

    @property
    def size(self) -> int:
        """The number of bytes to read, in the same units as reported by `read_lines`."""

    def fingerprint(self) -> Any:
        """Return a value that changes when the text changes."""

    def read_lines(self, report: Any = lambda _: None) -> Iterator[str]:
        """Yield every line, also empty ones."""


@dataclass(frozen=True)
class DatasetColumn:
    """`datasets:NAME[:CONFIG[:SPLIT]]@LANGUAGE`: one language of a dataset whose rows have a `translation`, such as
    `{"translation": {"en": ..., "de": ...}}`, or a column with this name."""

    name: str

    @cached_property
    def dataset(self) -> DatasetSource:
        return DatasetSource(self.name.rpartition("@")[0])

    @property
    def path(self) -> str:
        return self.name

    @property
    def size(self) -> int:
        return self.dataset.size

    def fingerprint(self) -> Any:
        return [self.name, self.dataset.fingerprint()]

    def read_lines(self, report: Any = lambda _: None) -> Iterator[str]:
        language = self.name.rpartition("@")[2]
        size, count = self.size, len(self.dataset.rows)
        for index, row in enumerate(self.dataset.rows):
            report(size * index // count)
            text = (row.get("translation") or row).get(language)
            if not isinstance(text, str):
                raise T2RError(f"{self.name}, row {index}: there is no text in {language!r}")
            check_unicode(text, f"{self.name}, row {index}")
            yield " ".join(text.split())  # a sentence is one line


@dataclass(frozen=True)
class SomeLines:
    """Evenly spaced lines of a source: `count` of its `total`. Line numbers in notices are those among them."""

    lines: LineSource
    count: int
    total: int

    @property
    def path(self) -> str:
        return f"{self.count:,} of the {self.total:,} lines of {self.lines.path}"

    @property
    def size(self) -> int:
        return self.lines.size

    def fingerprint(self) -> Any:
        return [self.lines.fingerprint(), self.count, self.total]

    def read_lines(self, report: Any = lambda _: None) -> Iterator[str]:
        for index, line in enumerate(self.lines.read_lines(report)):
            if (index + 1) * self.count // self.total > index * self.count // self.total:
                yield line


def find_file(name: str) -> LineSource:
    """Return the file or the column of a dataset with this name. Globs are refused."""
    if name.startswith("datasets:"):
        if not re.fullmatch(r"datasets:.+@[\w-]+", name):
            raise T2RError(f"{name}: name the language of this side, such as {name}@en")
        return DatasetColumn(name)
    found = find_sources(name)
    if len(found) != 1 or not isinstance(found[0], FileSource):
        raise T2RError(f"{name}: parallel text is read from pairs of files: name one file for each side")
    return found[0]


def read_pairs(source: LineSource, target: LineSource, report: Any = lambda _: None) -> Iterator[tuple[str, str]]:
    """Yield the lines of both files in pairs. Raises T2RError if the numbers of lines differ."""
    lines = zip_longest(source.read_lines(report), target.read_lines())
    for number, (ours, theirs) in enumerate(lines, 1):
        if ours is None or theirs is None:
            short, other = (source, target) if ours is None else (target, source)
            count = counted(number + sum(1 for _ in lines), "line")
            raise T2RError(
                f"{short.path} ends after line {number - 1}, and {other.path} has {count}: "
                "line by line, one is the translation of the other"
            )
        yield ours, theirs
