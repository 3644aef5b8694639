"""Results as a self-contained HTML file, without scripts or network access, in light and dark mode.

The file is also well-formed XML, so that programs can read the numbers. Figures are drawn with matplotlib (the `plots`
extra) and embedded as SVG; without it, a page has no figures.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from t2r.errors import T2RError
from t2r.storage import Output, beginning
from t2r.words import extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

logger = logging.getLogger(__name__)

COLORS = ("#d9652b", "#3d85c6", "#2c9c6a", "#9a66cc", "#c2477f", "#8a8a2e")
"""Visible on white and on black."""
INK = "#010203"
"""A placeholder color for axes and labels, replaced by the text color of the page."""

HEAD = '<!DOCTYPE html>\n<html lang="en" xmlns="http://www.w3.org/1999/xhtml">\n<head>\n'
MARK = '<meta name="generator" content="t2r"/>'
STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --paper: #ffffff; --soft: #5f6873; --line: #d8dde3; --box: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ea; --paper: #14171a; --soft: #97a1ac; --line: #333a42; --box: #1c2126; }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { color: var(--ink); background: var(--paper); font: 16px/1.5 system-ui, sans-serif; max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 0.5rem; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 3rem 0 0.75rem; padding-top: 0.75rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.75rem 0 0.5rem; }
p { margin: 0.5rem 0; max-width: 44rem; }
.lead { font-size: 1.1rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: 0.92rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
.caption, figcaption { color: var(--soft); font-size: 0.9rem; }
.caption { margin: 1.5rem 0 -0.5rem; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; min-width: 4.5rem; }
th, td { text-align: right; padding: 0.3rem 0.75rem; border-bottom: 1px solid var(--line); }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; min-width: 6rem; white-space: normal;
  position: sticky; left: 0; background: var(--paper); }
th:last-child, td:last-child { padding-right: 0; }
.facts { font-size: 0.95rem; }
.facts td { text-align: left; vertical-align: top; white-space: normal; overflow-wrap: anywhere; }
.facts td:first-child { color: var(--soft); }
.side { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); gap: 1.5rem;
  margin: 1rem 0; }
.side > * { margin: 0; min-width: 0; }
pre { background: var(--box); border-radius: 6px; padding: 0.75rem 1rem; overflow-x: auto; line-height: 1.45;
  font: 0.85rem/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap; }
details > summary { cursor: pointer; color: var(--soft); margin: 0.75rem 0; }
blockquote { white-space: pre-wrap; border-left: 3px solid var(--line); padding-left: 1rem; margin: 0.5rem 0; }
svg { width: 100%; height: auto; }
@media (max-width: 30rem) {
  table { font-size: 0.85rem; }
  th, td { padding: 0.3rem; }
  th, th:first-child, td:first-child { min-width: 3.5rem; }
}
svg text { font-family: inherit !important; }
"""


def is_page(path: Path) -> bool:
    """Return whether a file is a page of t2r. Older pages have no mark, only the beginning of the style."""
    text = beginning(path)
    return text.startswith(HEAD) and (MARK in text or f"<style>{STYLE[:60]}" in text)


def is_figure(path: Path) -> bool:
    return beginning(path).startswith('<svg role="img" aria-label="')


PAGE = Output("a page", is_page)
FIGURE = Output("a figure", is_figure)


class Page:
    """A page, to which parts are added from top to bottom."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.parts = [f"<h1>{_plain(title)}</h1>"]
        self.complete = True
        """Whether all figures were drawn, for which matplotlib is required."""

    def heading(self, text: str) -> None:
        self.parts.append(f"<h2>{_plain(text)}</h2>")

    def subheading(self, text: str) -> None:
        self.parts.append(f"<h3>{_plain(text)}</h3>")

    def paragraph(self, text: str, *, lead: bool = False) -> None:
        start = '<p class="lead">' if lead else "<p>"
        text = text.replace(" %", "\N{NO-BREAK SPACE}%")
        self.parts.append(f"{start}{_plain(text)}</p>")

    def code(self, text: str, summary: str | None = None) -> None:
        """Add commands or a file. With a summary, it is folded under that."""
        block = f"<pre>{_plain(text.strip())}</pre>"
        if summary is not None:
            block = f"<details><summary>{_plain(summary)}</summary>{block}</details>"
        self.parts.append(block)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
        """Add a table. On a narrow screen, it scrolls in a box of its own."""
        body = "\n".join(_row(cells, "td") for cells in rows)
        # The caption is outside of the box, so that it does not scroll with a wide table.
        title = f'<p class="caption">{_plain(caption)}</p>' if caption else ""
        table = f"<table><thead>{_row(header, 'th')}</thead><tbody>\n{body}\n</tbody></table>"
        self.parts.append(f'{title}<div class="scroll" tabindex="0">{table}</div>')

    def show(self, parts: Iterable[Table | str]) -> None:
        """Add what a command prints: tables of the terminal, and lines of text as paragraphs."""
        for part in parts:
            if isinstance(part, str):
                self.paragraph(part)
            else:
                # Labels of the terminal are indented by spaces, which HTML ignores.
                columns = [[str(cell).replace("  ", "\u2003") for cell in column.cells] for column in part.columns]
                header = [str(column.header) for column in part.columns]
                self.table(header, list(zip(*columns, strict=True)), str(part.title or ""))

    def facts(self, rows: Mapping[str, str]) -> None:
        """Add names and values, without a header."""
        body = "\n".join(_row((name, value), "td") for name, value in rows.items())
        self.parts.append(f'<div class="scroll"><table class="facts"><tbody>\n{body}\n</tbody></table></div>')

    def quotes(self, texts: Mapping[str, str]) -> None:
        """Add texts side by side, each under its name."""
        each = "".join(
            f"<div><strong>{_plain(name)}</strong><blockquote>{_plain(text)}</blockquote></div>"
            for name, text in texts.items()
        )
        self.parts.append(f'<div class="side">{each}</div>')

    def figures(self, svgs: Mapping[str, str]) -> None:
        """Add figures side by side, each over its caption. Those that could not be drawn are omitted."""
        drawn = {name: svg for name, svg in svgs.items() if svg}
        self.complete = self.complete and len(drawn) == len(svgs)
        if not drawn:
            return
        each = "".join(f"<figure>{svg}<figcaption>{_plain(name)}</figcaption></figure>" for name, svg in drawn.items())
        self.parts.append(f'<div class="side">{each}</div>')

    def html(self) -> str:
        body = "\n".join(self.parts)
        return (
            f'{HEAD}<meta charset="utf-8"/>\n{MARK}\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
            f"<title>{_plain(self.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
        )

    def write(self, path: Path, *, inputs: Iterable[Any] = ()) -> None:
        """Write the page atomically, with a warning if it lacks figures.

        Raises T2RError if it cannot be written, or would replace one of the inputs or a file that is not a page."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            PAGE.write(path, self.html(), inputs=inputs)
        except OSError as error:
            raise T2RError(f"{path} cannot be written: {error}") from error
        if not self.complete:
            logger.warning("the page has no figures: they require the plots extra, %s", extra("plots"))


def _row(cells: Sequence[str], kind: str) -> str:
    return f"<tr>{''.join(f'<{kind}>{_plain(cell)}</{kind}>' for cell in cells)}</tr>"


UNPRINTABLE = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _plain(text: str) -> str:
    """Return text for a page. Characters that XML does not allow, which generated text may contain, are replaced."""
    return escape(UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text))


# --- Figures ------------------------------------------------------------------------------------------------


MANY = 3
"""A figure with more lines has its legend below."""
LONGEST = 36
"""Characters of a name in a legend."""


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x: str,
    y: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    markers: bool = False,
    ticks: Sequence[float] | None = None,
    colors: Sequence[str] = COLORS,
    intervals: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    legend: bool = False,
) -> str:
    """Draw a line for each name, given as its xs and ys, as SVG. With `log_x`, ticks are at the points, or at those of
    `ticks` that are in their range. `log_y` is ignored if a value is negative, which a logarithmic axis would hide.
    `intervals` are the lower and upper ends of error bars, by name. A single line has no legend unless `legend`. None,
    which stands for an infinite or undefined value in a file, is a gap in the line."""
    series = {name: (xs, [math.nan if y is None else y for y in ys]) for name, (xs, ys) in series.items()}
    values = [value for _, ys in series.values() for value in ys if math.isfinite(value)]
    log_y = log_y and bool(values) and min(values) >= 0

    def draw(axes: Axes) -> None:
        for i, (name, (xs, ys)) in enumerate(series.items()):
            color = colors[i % len(colors)]
            axes.plot(xs, ys, label=_short(name), color=color, marker="o" if markers else None, markersize=4)
            if intervals is not None and name in intervals:
                low, high = zip(*intervals[name], strict=True)
                axes.vlines(xs, low, high, color=color, alpha=0.6)
        if log_x:
            points = sorted({value for xs, _ in series.values() for value in xs})
            if ticks is not None:
                points = [value for value in ticks if points[0] <= value <= points[-1]]
            axes.set_xscale("log")
            axes.set_xticks(points, labels=[f"{value:,.0f}" for value in points])
            axes.set_xticks([], minor=True)
        elif all(float(value).is_integer() for xs, _ in series.values() for value in xs):
            axes.locator_params(axis="x", integer=True)
        if log_y:
            axes.set_yscale("log")
            plain_ticks(axes.yaxis, values)
        elif values and min(values) >= 0:
            axes.set_ylim(bottom=0)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(alpha=0.2)
        if (legend or len(series) > 1) and len(series) <= MANY:
            axes.legend(frameon=False)
        elif len(series) > MANY:  # below the axes, where it covers no line
            axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize="small")

    return svg(draw, f"{y} against {x}: {', '.join(series)}")


def bars(values: Mapping[str, float], what: str, *, colors: Sequence[str] = COLORS) -> str:
    """Draw a bar for each name, with its value, as SVG. The axis is linear and starts at 0: bars compare lengths."""

    def draw(axes: Axes) -> None:
        own = [colors[i % len(colors)] for i in range(len(values))]
        drawn = axes.barh(list(values), list(values.values()), color=own)
        axes.bar_label(drawn, labels=[f"{value:,.2f}" for value in values.values()], padding=3)
        axes.invert_yaxis()  # the first on top
        axes.margins(x=0.2)
        axes.set_xlabel(what)

    return svg(draw, f"{what}: {', '.join(f'{name} {value:,.2f}' for name, value in values.items())}")


def heatmap(grid: Sequence[Sequence[float]], x: str, y: str, what: str) -> str:
    """Draw a matrix of numbers as colored cells, as SVG. The first row is on top."""

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        # Cells are rectangles, because an image would be embedded as a bitmap.
        drawn = axes.pcolormesh([list(row) for row in grid], cmap="viridis", vmin=0, edgecolors="none")
        axes.invert_yaxis()
        for axis, size in ((axes.xaxis, len(grid[0])), (axes.yaxis, len(grid))):
            numbers = range(0, size, max(1, -(-size // 10)))
            axis.set_ticks([i + 0.5 for i in numbers], labels=[str(i) for i in numbers])
            axis.set_tick_params(length=0)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        figure: Any = axes.figure
        figure.colorbar(drawn, ax=axes, label=what, ticks=MaxNLocator(5)).outline.set_visible(False)

    return svg(draw, f"{what} by {y} and {x}")


def _short(name: str) -> str:
    """Return a name for a legend: short enough, and without formulas, which matplotlib finds between dollar signs."""
    return (name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…").replace("$", r"\$")


def plain_ticks(axis: Any, values: Sequence[float]) -> None:
    """Label a logarithmic axis with plain numbers: 0.1, 0.2, 0.5; over many decades, only powers of 10; over a small
    part of a decade, which may not contain two of these, at equal steps."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    low, high = min(values), max(values)
    narrow = MaxNLocator(5, steps=[1, 2, 5, 10]) if high < 5 * low else None
    axis.set_major_locator(narrow or LogLocator(subs=(1.0,) if high > 1e3 * low else (1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:,g}")
    axis.set_ticks([], minor=True)


def check_plots() -> None:
    """Raise T2RError if figures cannot be drawn."""
    if not can_draw():
        raise T2RError(f"figures require the plots extra: {extra('plots')}")


def can_draw() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def svg(draw: Any, words: str) -> str:
    """Return the result of `draw` as an SVG element for a page, or nothing without matplotlib. `words` is its text
    alternative."""
    if not can_draw():
        return ""
    import matplotlib
    from matplotlib.figure import Figure

    inks = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color")
    look: Any = {name: INK for name in inks}
    look |= {"svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
    look["svg.hashsalt"] = ""  # reproducible ids
    with matplotlib.rc_context(look):
        figure = Figure(figsize=(5.6, 3.6), layout="constrained")
        axes = figure.add_subplot()
        axes.set_prop_cycle(color=COLORS)
        draw(axes)
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # the default metadata contains URLs
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    drawn = file.getvalue()
    drawn = drawn[drawn.index("<svg") :].replace(INK, "currentColor").strip()
    # Ids must be unique in the page: those that are used get the mark of the figure, others are removed.
    used, mark = set(re.findall(r"#([\w.-]+)", drawn)), hashlib.sha256(drawn.encode()).hexdigest()[:8]
    drawn = re.sub(r' id="([^"]*)"', lambda match: f' id="{match[1]}-{mark}"' if match[1] in used else "", drawn)
    drawn = re.sub(r'(url\(#|href="#)([\w.-]+)', rf"\1\2-{mark}", drawn)
    return drawn.replace("<svg ", f'<svg role="img" aria-label="{_plain(words)}" ', 1)
