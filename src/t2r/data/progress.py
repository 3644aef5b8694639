"""Progress bars on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(words: str, total: float, unit: str, *, done: int = 0, shown: bool = True) -> Iterator[Report]:
    """Show a progress bar for `total` units of work. Yields a function that sets the number of completed units.

    The bar is shown in terminals and notebooks only, not in files and pipes."""
    console = Console(stderr=True)
    count = TextColumn(f"{{task.completed:,.0f}}/{{task.total:,.0f}} {unit}")
    columns = (TextColumn(words), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (shown and is_watched(console))) as bar:
        task = bar.add_task("", total=total, completed=done)
        yield lambda completed: bar.update(task, completed=completed)


def is_watched(console: Console) -> bool:
    """Return whether the console is a terminal or a notebook, not a file or a pipe."""
    return console.is_terminal or console.is_jupyter


Report = Callable[[float], None]
"""Called with the number of completed units."""
