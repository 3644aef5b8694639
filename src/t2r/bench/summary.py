"""Conclusions from measurements at several lengths."""

from __future__ import annotations

from collections.abc import Sequence


def crossover(lengths: Sequence[int], reference: Sequence[float], values: Sequence[float]) -> float | None:
    """Return the length from which `values` is below `reference`, by linear interpolation between measured points.

    None: it is not below at the last length. The first length: it is below at all lengths."""
    behind = [own - other for own, other in zip(values, reference, strict=True)]
    last = max((i for i, gap in enumerate(behind) if gap >= 0), default=None)
    if last is None:
        return float(lengths[0])
    if last == len(lengths) - 1:
        return None
    share = behind[last] / (behind[last] - behind[last + 1])
    return lengths[last] + share * (lengths[last + 1] - lengths[last])


def from_length(name: str, reference: str, word: str, length: float | None, lengths: Sequence[int]) -> str:
    """Say from which length on a model is `word` (faster, smaller) than the reference."""
    if length is None:
        return f"{name} is not {word} than {reference} up to {lengths[-1]:,} tokens."
    if length == lengths[0]:
        return f"{name} is {word} than {reference} at all lengths measured, from {lengths[0]:,} tokens."
    return f"{name} is {word} than {reference} from about {length:,.0f} tokens on."
