"""Wording of messages and tables."""


def counted(number: float, noun: str) -> str:
    """Return a number with its noun, in the singular for one: `1 step`, `1,000 steps`."""
    shown = f"{number:,}"
    return f"{shown} {noun}" if shown == "1" else f"{shown} {noun}s"


def in_minutes(seconds: float) -> str:
    number = f"{seconds / 60:.2g}" if seconds < 600 else f"{round(seconds / 60):,}"
    return f"{number} minute{'' if number == '1' else 's'}"


def duration(seconds: float) -> str:
    """Format an approximate time."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return counted(max(1, round(seconds)), "second")
