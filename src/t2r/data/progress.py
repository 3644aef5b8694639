"""Progress bars on stderr, with the time that is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(words: str, total: float, unit: str, *, done: int = 0, shown: bool = True) -> Iterator[Report]:
    """A bar for `total` units of work. The block is given a function that sets how many are done.

    A file or a pipe gets no bar, only terminals and notebooks."""
    console = Console(stderr=True)
    count = TextColumn(f"{{task.completed:,.0f}}/{{task.total:,.0f}} {unit}")
    columns = (TextColumn(words), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (shown and is_watched(console))) as bar:
        task = bar.add_task("", total=total, completed=done)
        yield lambda completed: bar.update(task, completed=completed)


def is_watched(console: Console) -> bool:
    """Whether a person can be looking: a terminal or a notebook, not a file or a pipe."""
    return console.is_terminal or console.is_jupyter


Report = Callable[[float], None]
"""Is called with the number of units that are done."""
