"""Results laid out for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def tables(results: Sequence[dict[str, Any]]) -> "list[Table | str]":
    """For people: the models, perplexity by position, and what generation showed."""
    first = results[0]
    parts: list[Table | str] = [_models(results), _positions(results)]
    if "recall" in first:
        parts += [_written(results), _recalled(results)] if first["recall"] else [_written(results)]
    return parts


def _models(results: Sequence[dict[str, Any]]) -> "Table":
    first = results[0]
    table = _table(
        f"{first['text']}: {first['tokens']:,} tokens, windows of {first['window']} advanced by {first['stride']}",
        ("perplexity", "95 %", "ratio", "95 %", "per word", "bits/byte", "KL", "agreement"),
    )
    for r in results:
        table.add_row(
            r["model"],
            _number(r["perplexity"]),
            _range(r["interval"]),
            _number(r.get("ratio"), 3),
            _range(r.get("ratio_interval"), 3),
            _number(r["word_perplexity"]),
            _number(r["bits_per_byte"], 4),
            _number(r["kl"], 4),
            _percent(r["agreement"]),
        )
    return table


def _positions(results: Sequence[dict[str, Any]]) -> "Table":
    buckets = results[0]["by_position"]
    table = _table("Perplexity by tokens of context", [f"{b['first']}-{b['last']}" for b in buckets])
    for r in results:
        table.add_row(r["model"], *(_number(b["perplexity"]) for b in r["by_position"]))
    return table


def _written(results: Sequence[dict[str, Any]]) -> "Table":
    table = _table("4-grams repeated in what a model writes", ("greedy", "sampled", "the text itself"))
    for r in results:
        table.add_row(r["model"], *(_percent(r["repetition"][key]) for key in ("greedy", "sampled", "text")))
    return table


def _recalled(results: Sequence[dict[str, Any]]) -> "Table":
    rows = results[0]["recall"]
    table = _table(
        f"Recall of a word after so many tokens: chosen (chance {_percent(rows[0]['chance'])}) / written",
        [str(row["distance"]) for row in rows],
    )
    for r in results:
        cells = (f"{_percent(row['accuracy'])} / {_percent(row['greedy'])}" for row in r["recall"])
        table.add_row(r["model"], *cells)
    return table


def _table(title: str, headings: Sequence[str]) -> "Table":
    from rich.table import Table

    table = Table(title=title)
    table.add_column("model", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _range(interval: Sequence[float] | None, digits: int = 2) -> str:
    return "" if interval is None else "-".join(_number(end, digits) for end in interval)
