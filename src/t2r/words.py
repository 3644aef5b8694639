"""Wording of messages and tables."""


def counted(number: float, noun: str) -> str:
    """Return a number with its noun, in the singular for one: `1 step`, `1,000 steps`."""
    shown = f"{number:,}"
    return f"{shown} {noun}" if shown == "1" else f"{shown} {noun}s"
