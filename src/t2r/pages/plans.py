"""Memory plans on a page: who got which window, layer by layer, and the quality that is expected for each budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from t2r.budgets.costs import in_mib
from t2r.budgets.planning import HEADER, source_told, table_row
from t2r.reporting.page import Page, lines

CELL = 14
"""The side of a square of a picture, in pixels."""
LEFT, BOTTOM = 44, 30
"""Room for the labels of a picture."""


def plans(page: Page, content: Mapping[str, Any], path: Path) -> None:
    """Add the output of `t2r plan --json`: a table of the budgets, a curve, and a picture of each plan."""
    found: Sequence[Mapping[str, Any]] = content["plans"]
    page.table(HEADER, [table_row(each) for each in found])
    if len(found) > 1:
        known = sorted(found, key=lambda each: each["used"])
        memory = [each["used"] / 2**20 for each in known]
        curves = {
            "a window for each head": (memory, [each["divergence"] for each in known]),
            "one window for all heads": (memory, [each["one_window_divergence"] for each in known]),
        }
        figure = lines(curves, "MiB", "KL divergence", log_x=True, markers=True)
        page.figures({"The divergence from the model on the text of the plan, not trained": figure})
    for each in found:
        plan(page, each)


def plan(page: Page, planned: Mapping[str, Any]) -> None:
    """Add the picture of one plan."""
    page.subheading(f"Memory plan: {in_mib(planned['used'])}")
    page.paragraph(
        "Each square is a key-value head, the darker the longer its window; a ring marks heads that see the whole "
        "context. " + states_told(planned) + cross_told(planned)
    )
    page.figures({"Windows in tokens, by layer and head": picture(planned)})


def states_told(planned: Mapping[str, Any]) -> str:
    if not planned["features"]:
        return "There are no states: what has left a window is forgotten."
    return f"What has left a window is in a state of {planned['features']} features."


def cross_told(planned: Mapping[str, Any]) -> str:
    """Say what the cross attention of an encoder-decoder keeps. Nothing for other models."""
    if planned.get("source_tokens") is None:
        return ""
    told = source_told(planned)
    return f" {told[0].upper()}{told[1:]}; this is a part of the memory."


def picture(planned: Mapping[str, Any]) -> str:
    """Return the plan as SVG: layers from left to right, heads from top to bottom. It needs no library."""
    windows = planned["plan"]["windows"]
    heads, longest = max(map(len, windows)), max(size for each in windows for size in each)
    width, height = LEFT + CELL * len(windows), CELL * heads + BOTTOM
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="windows by layer and head" '
        f'style="max-width:{2 * width}px" font-size="9" fill="currentColor">'
    ]
    for layer, sizes in enumerate(windows):
        for head, size in enumerate(sizes):
            shade = 0.08 + 0.92 * math.log2(1 + size) / math.log2(1 + longest) if size else 0.0
            x, y = LEFT + CELL * layer, CELL * head
            ring = ' stroke="#d55e00" stroke-width="2"' if size >= planned["context"] else ""
            parts.append(
                f'<rect x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{CELL - 2}" rx="2" fill="#0072b2" '
                f'fill-opacity="{shade**2:.2f}"{ring}><title>layer {layer}, head {head}: {size:,} tokens</title></rect>'
            )
        if layer % 5 == 0:
            parts.append(f'<text x="{LEFT + CELL * layer + 3}" y="{CELL * heads + 11}">{layer}</text>')
    parts += [f'<text x="{LEFT - 12}" y="{CELL * head + 11}">{head}</text>' for head in range(heads)]
    parts.append(f'<text x="{LEFT}" y="{height - 5}">layer</text><text x="0" y="11">head</text></svg>')
    return "".join(parts)
