"""Generates the tables of options in docs/recipes.md.

Run `python -m t2r.reporting.options docs/recipes.md` to update the page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from t2r.data.mixture import WeightedSource
from t2r.options import Option, SwapOptions, options_of
from t2r.training.recipes.stage import Stage

GROUPS = {"stage": Stage, "swap": SwapOptions, "train": WeightedSource}
TABLE = re.compile(r"(<!-- options: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(group: type) -> str:
    """Return a Markdown table of the options of a group."""
    rows = [("option", "default", "allowed", "meaning"), ("---",) * 4]
    rows += [
        (f"`{name}`", default(option), "" if option.choices else allowed(option), option.help)
        for name, option in options_of(group).items()
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def default(option: Option) -> str:
    if isinstance(option.default, bool):
        return f"`{str(option.default).lower()}`"
    words = option.default_words
    return words if option.default is None or option.required else f"`{words}`"


def allowed(option: Option) -> str:
    return "" if option.type in (bool, str) else option.allowed


def page(text: str) -> str:
    """Return the page with its tables updated."""
    return TABLE.sub(lambda found: f"{found[1]}{table(GROUPS[found[2]])}{found[3]}", text)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
