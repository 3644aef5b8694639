"""Who gets which window: the most valuable tokens first."""

from __future__ import annotations

from collections.abc import Mapping

from t2r.budgets.costs import SMALLEST, Costs

Head = tuple[int, int]
"""A layer and a key-value head."""
Needs = Mapping[Head, Mapping[int, float]]
"""For each head and window, the KL divergence from the model if this head alone is limited to it."""


def allocate(needs: Needs, costs: Costs, memory: int, fixed: Mapping[Head, int] | None = None) -> list[list[int]]:
    """Return the windows of all heads within a number of bytes.

    Every head begins with its smallest window. Then the head whose divergence falls most for each further byte gets a
    larger one, until nothing fits. The effects of heads are taken as independent.

    Args:
        fixed: windows that are given in advance.
    """
    fixed = fixed or {}
    steps = {head: choices(needs[head], costs, head) for head in costs.heads if head not in fixed}
    level = dict.fromkeys(steps, 0)
    windows = dict(fixed) | {head: options[0][0] for head, options in steps.items()}
    used = sum(costs.layers[layer].of(windows[layer, head]) for layer, head in windows)
    while best := next_step(steps, level, costs, memory - used):
        head, to, price = best
        level[head], windows[head] = to, steps[head][to][0]
        used += price
    return [[windows[index, head] for head in range(layer.heads)] for index, layer in enumerate(costs.layers)]


def choices(measured: Mapping[int, float], costs: Costs, head: Head) -> list[tuple[int, float]]:
    """Return the windows that a head may have, and their divergence, which falls from each to the next. It is 0 for the
    longest. Noise of the measurement does not make a larger window worse."""
    longest = costs.layers[head[0]].longest
    found = [(longest, 0.0)]
    for window in sorted((w for w in measured if w < longest), reverse=True):
        found.append((window, max(found[-1][1], measured[window])))
    if len(found) == 1 and longest > SMALLEST:
        found.append((SMALLEST, 0.0))
    return found[::-1]


def next_step(
    steps: Mapping[Head, list[tuple[int, float]]], level: Mapping[Head, int], costs: Costs, left: int
) -> tuple[Head, int, int] | None:
    """Return the head that gains most by byte, what it gets, and the price. None: nothing that fits has a gain."""
    best, most = None, 0.0
    for head, options in steps.items():
        cost, (now, divergence) = costs.layers[head[0]], options[level[head]]
        for to in range(level[head] + 1, len(options)):
            price = cost.of(options[to][0]) - cost.of(now)
            if price > left:
                continue
            gain = (divergence - options[to][1]) / max(1, price)
            if gain > most:
                best, most = (head, to, price), gain
    return best
