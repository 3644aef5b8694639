"""Tables that fit the width of the terminal: numbers are never wrapped or cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def fitted(table: Table, console: Console) -> list[Table]:
    """Return the table as one that fits the width of the console, or as several with some of its columns each.

    Columns on the left, up to the last one that is justified left, say what a row is: they are in every table. Their
    cells and all headers are wrapped between words; the cells of other columns, which are numbers, never are."""
    cells = [list(map(str, column.cells)) for column in table.columns]
    justified = [column.justify for column in table.columns]
    keys = max((i for i, side in enumerate(justified) if side == "left"), default=0) + 1
    natural, least = [], []
    for i, (column, own) in enumerate(zip(table.columns, cells, strict=True)):
        header = str(column.header) if table.show_header else ""
        natural.append(max(map(_width, [header, *own])))
        words = [word for text in [header, *(own if i < keys else ())] for word in text.split()]
        least.append(max(map(_width, [*words, *(() if i < keys else own)]), default=1))
    for i in range(keys):  # a single long word, such as a path, is folded
        least[i] = min(least[i], max(1, console.width // 3))

    def widths(columns: Sequence[int]) -> list[int] | None:
        """Return the widths of columns that fit side by side. None: they do not."""
        empty = _built(table, cells, columns, [0] * len(columns))
        room = console.width - console.measure(empty, options=console.options.update(max_width=10_000)).maximum
        sizes = [least[i] for i in columns]
        if sum(sizes) > room:
            return None
        for part in (range(keys), range(keys, len(columns))):  # the rest of the room goes to the first columns first
            while wanting := [p for p in part if sizes[p] < natural[columns[p]]][: room - sum(sizes)]:
                for place in wanting:
                    sizes[place] += 1
        return sizes

    made: list[Table] = []
    rest = list(range(keys, len(cells)))
    while rest or not made:
        count = next((n for n in range(len(rest), 0, -1) if widths([*range(keys), *rest[:n]])), min(1, len(rest)))
        columns, rest = [*range(keys), *rest[:count]], rest[count:]
        sizes = widths(columns) or [least[i] for i in columns]
        made.append(_built(table, cells, columns, sizes, titled=not made))
    return made


def _built(
    table: Table, cells: Sequence[Sequence[str]], columns: Sequence[int], widths: Sequence[int], titled: bool = True
) -> Table:
    """Return a table with these columns of another. A width of 0 is that of an empty column."""
    from rich.table import Table

    made = Table(
        title=table.title if titled else None,
        title_justify=table.title_justify,
        box=table.box,
        padding=table.padding,
        show_header=table.show_header,
    )
    for i, width in zip(columns, widths, strict=True):
        header = table.columns[i].header if width else ""
        made.add_column(header, justify=table.columns[i].justify, width=width or None, overflow="fold")
    for number, row in enumerate(table.rows):
        shown = [cells[i][number] if width else "" for i, width in zip(columns, widths, strict=True)]
        made.add_row(*shown, end_section=row.end_section)
    return made


def show(part: Table | str, console: Console) -> None:
    """Print a line of text as it is, or a table that fits the console."""
    if isinstance(part, str):
        console.print(part, soft_wrap=True)
        return
    for table in fitted(part, console):
        console.print(table)


def _width(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)
