"""Tables of evaluation results for the terminal."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from t2r.words import counted, short_names

if TYPE_CHECKING:
    from rich.table import Table


def tables(results: Sequence[dict[str, Any]]) -> "list[Table | str]":
    """Return tables of perplexity, perplexity by position, tasks, repetition and recall."""
    first = results[0]
    parts: list[Table | str] = []
    # One table for each text and window.
    for i in range(len(first.get("measured", [first])) if "perplexity" in first else 0):
        each = [r | r["measured"][i] if "measured" in r else r for r in results]
        parts += [_models(each), _positions(each)]
    if "bleu" in first:
        parts += _translated(results)
    # Variants have no task results and no repetition.
    if "tasks" in first:
        parts.append(_tasks([r for r in results if "tasks" in r]))
    if "repetition" in first:
        parts.append(_written([r for r in results if "repetition" in r]))
    if first.get("recall"):
        parts.append(_recalled(results))
    return parts


def _models(results: Sequence[dict[str, Any]]) -> "Table":
    first = results[0]
    title = f"{first['text']}: {first['tokens']:,} tokens, windows of {first['window']} advanced by {first['stride']}"
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "perplexity": lambda r: _number(r["perplexity"]),
        "  95 %": lambda r: _range(r["interval"]),
        "ratio to the first": lambda r: _number(r.get("ratio"), 3),
        "  its 95 %": lambda r: _range(r.get("ratio_interval"), 3),
        "perplexity per word": lambda r: _number(r["word_perplexity"]),
        "bits per byte": lambda r: _number(r["bits_per_byte"], 4),
        "KL to the teacher": lambda r: _number(r["kl"], 4),
        "same most likely token": lambda r: _percent(r["agreement"]),
        "cache after a window": lambda r: _mebibytes(r.get("kept_bytes")),
    }
    return _table(title, results, {label: [cell(r) for r in results] for label, cell in rows.items()})


def _translated(results: Sequence[dict[str, Any]]) -> "list[Table | str]":
    first = results[0]
    search = f"beam {first['beams']}, length penalty {first['length_penalty']:g}"
    title = f"{first['source']}: {counted(first['lines'], 'line')}, {search}"
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "BLEU": lambda r: _number(r["bleu"]),
        "  95 %": lambda r: _range(r.get("bleu_interval")),
        "  against the first": lambda r: _signed(r.get("bleu_difference")),
        "  p, paired bootstrap": lambda r: _number(r.get("bleu_p"), 3),
        "chrF": lambda r: _number(r["chrf"]),
        "  against the first ": lambda r: _signed(r.get("chrf_difference")),
        "BLEU, tokenized as in the paper": lambda r: _number(r.get("tokenized_bleu")),
        "parameters": lambda r: f"{r['parameters']:,}" if "parameters" in r else "",
        "state or cache, causal": lambda r: _mebibytes(r.get("causal_bytes")),
        "state or cache, cross": lambda r: _mebibytes(r.get("cross_bytes")),
        "  at tokens": lambda r: _number(r.get("kept_tokens"), 0),
        "numbers copied": lambda r: _copied(r, "numbers"),
        "names copied": lambda r: _copied(r, "names"),
    }
    parts: list[Table | str] = [
        _table(title, results, {label: [cell(r) for r in results] for label, cell in rows.items()})
    ]
    if len(first.get("by_length") or ()) > 1:
        lengths = {
            f"{part['first']}{_until(part['last'])} ({counted(part['lines'], 'line')})": [
                _number(r["by_length"][i]["bleu"]) for r in results
            ]
            for i, part in enumerate(first["by_length"])
        }
        parts.append(_table("BLEU by tokens of the source", results, lengths))
    signed = (("BLEU", "bleu"), ("chrF", "chrf"), ("tokenized BLEU", "tokenized_bleu"))
    return [*parts, *(f"{name}: {first[f'{key}_signature']}" for name, key in signed if f"{key}_signature" in first)]


def _copied(result: dict[str, Any], kind: str) -> str:
    found = (result.get("copied") or {}).get(kind)
    return f"{_percent(found['accuracy'])} of {found['total']:,}" if found and found["total"] else ""


def _positions(results: Sequence[dict[str, Any]]) -> "Table":
    rows = {
        f"{b['first']}-{b['last']}": [_number(r["by_position"][i]["perplexity"]) for r in results]
        for i, b in enumerate(results[0]["by_position"])
    }
    return _table("Perplexity by tokens of context", results, rows)


def _written(results: Sequence[dict[str, Any]]) -> "Table":
    names = {"greedy": "greedy", "sampled": "sampled", "text": "the text itself"}
    rows = {label: [_percent(r["repetition"][key]) for r in results] for key, label in names.items()}
    return _table("Repeated 4-grams in generated text", results, rows)


def _recalled(results: Sequence[dict[str, Any]]) -> "Table":
    first = results[0]["recall"]
    rows = {
        f"{row['distance']} tokens": [
            f"{_percent(r['recall'][i]['accuracy'])} ({_percents(r['recall'][i]['interval'])}) / "
            f"{_percent(r['recall'][i]['greedy'])}"
            for r in results
        ]
        for i, row in enumerate(first)
    }
    title = (
        f"Recall of a word by distance in tokens, {counted(first[0]['trials'], 'trial')}: multiple choice (95 %; "
        f"chance {_percent(first[0]['chance'])}) / greedy"
    )
    return _table(title, results, rows)


def _tasks(results: Sequence[dict[str, Any]]) -> "Table":
    """Each metric is one row: `acc,none` and `acc_stderr,none` of lm-eval are combined."""
    rows = {}
    for task, metrics in results[0]["tasks"].items():
        for key, value in metrics.items():
            name, _, kind = key.partition(",")
            if isinstance(value, float) and "_stderr" not in name:
                rows[f"{task}: {name}"] = [_with_error(r["tasks"][task], name, kind) for r in results]
    return _table("Tasks of lm-eval", results, rows)


def _with_error(metrics: dict[str, Any], name: str, kind: str) -> str:
    error = metrics.get(f"{name}_stderr,{kind}")
    own = _number(metrics[f"{name},{kind}"], 3)
    return f"{own} ± {_number(error, 3)}" if isinstance(error, float) else own


def _table(title: str, results: Sequence[dict[str, Any]], rows: dict[str, list[str]]) -> "Table":
    """Build a table with one column per model. Empty rows are omitted."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("", justify="left")
    for name in names_of(results):
        table.add_column(name, justify="right")
    for label, cells in rows.items():
        if any(cells):
            table.add_row(label, *cells)
    return table


def names_of(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each result: the folder of the model, and its variant. One that is evaluated several times is
    numbered."""
    named = short_names(result["model"] for result in results)
    names = [named[r["model"]] + (f", {r['variant']}" if "variant" in r else "") for r in results]
    if len(set(names)) < len(names):
        return [f"{name} ({i})" for i, name in enumerate(names, 1)]
    return names


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _signed(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:+.{digits}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _mebibytes(value: int | None) -> str:
    return "" if value is None else f"{value / 2**20:.2f} MiB"


def _range(interval: Sequence[float] | None, digits: int = 2) -> str:
    return "" if interval is None else "-".join(_number(end, digits) for end in interval)


def _percents(interval: Sequence[float]) -> str:
    return "-".join(f"{100 * end:.0f}" for end in interval)


def _until(last: int | None) -> str:
    return "+" if last is None else f"-{last}"
