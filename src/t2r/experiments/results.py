"""Markdown tables of the result of one step: an evaluation, a training, an analysis or a benchmark."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from t2r.experiments.markup import markdown


def training_table(result: Mapping[str, Any], name: str = "") -> str:
    """Return the scores of the teacher, of the swapped model, and after each stage. If a name is given, it is written
    in the rows of this model, so that tables of several models can be joined."""
    teacher = result.get("teacher")
    own = f"{name}, " if name else ""
    found = [("teacher", teacher), (f"{own}swapped, not trained", result.get("swapped"))]
    found += [(f"{own}before", result.get("untrained"))]
    found += [(f"{own}after {stage}", scores) for stage, scores in result.get("stages", {}).items()]
    rows = [(row, scores) for row, scores in found if scores]
    if result.get("task") == "translation":
        columns = (("bleu", 2), ("chrf", 2), ("loss", 3), ("kl", 3))
        cells = [[row, *(_number(scores.get(key), digits) for key, digits in columns)] for row, scores in rows]
        return markdown(("training", "BLEU", "chrF", "loss per token", "KL to the teacher"), cells) if cells else ""
    base = (teacher or {}).get("perplexity")
    cells = [
        [row, _against(scores["perplexity"], None if scores is teacher else base), _number(scores.get("kl"), 3)]
        for row, scores in rows
    ]
    return markdown(("training", "perplexity", "KL to the teacher"), cells)


def _translations(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the scores of translations: BLEU and chrF with the differences from the first model, the paper's
    tokenized BLEU, and the share of numbers and names that were copied."""
    text = f"{_short(results[0]['source'])}, {results[0]['lines']:,} lines, beam {results[0]['beams']}"
    rows = []
    for result in results:
        cells = [_name(result)]
        for key in ("bleu", "chrf"):
            difference, p = result.get(f"{key}_difference"), result.get(f"{key}_p")
            told = "" if difference is None else f" ({difference:+.2f}{'' if p is None else f', p = {p:.3f}'})"
            cells.append(f"{result[key]:.2f}{told}")
        cells.append(_number(result.get("tokenized_bleu"), 2))
        for kind in ("numbers", "names"):
            copied = (result.get("copied") or {}).get(kind) or {}
            cells.append(f"{100 * copied['accuracy']:.1f} %" if copied.get("total") else "")
        rows.append(cells)
    return markdown((text, "BLEU", "chrF", "tokenized BLEU", "numbers copied", "names copied"), rows)


def _by_length(results: Sequence[Mapping[str, Any]]) -> str:
    """Return BLEU by the length of the source."""
    header = [f"BLEU on {_short(results[0]['source'])}, by tokens of the source"]
    header += [f"{x['first']}-{x['last']}" if x["last"] else f"{x['first']}-" for x in results[0]["by_length"]]
    return markdown(header, [[_name(x), *(_number(part["bleu"], 2) for part in x["by_length"])] for x in results])


USUAL = 512
"""The window of most evaluations. Others are named."""


def evaluation_tables(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return tables of translations, perplexity, recall and tasks, with a row for each model and variant."""
    found = []
    if "bleu" in results[0]:
        found.append(_translations(results))
        if len(results[0].get("by_length") or ()) > 1:
            found.append(_by_length(results))
    if "perplexity" in results[0]:
        found.append(_quality(results))
    if results[0].get("recall"):
        found.append(_recall(results))
    if "tasks" in results[0]:
        found.append(_tasks(results))
    return found


def _quality(results: Sequence[Mapping[str, Any]]) -> str:
    measured = [result.get("measured") or [result] for result in results]
    windows = {part["window"] for part in measured[0]} != {USUAL}
    header = ["model"]
    for part in measured[0]:
        place = f"{_short(part['text'])}, {part['tokens']:,} tokens" + (
            f", windows of {part['window']:,}" if windows else ""
        )
        header.append(place)
    # With variants of one model and no teacher, KL is that to the model itself.
    alone = len({result["model"] for result in results}) == 1 and all(part.get("kl") is None for part in measured[0])
    header += ["KL to the first model" if alone else "KL to the teacher", "cache"]
    rows = []
    for result, parts in zip(results, measured, strict=True):
        cells = [_name(result)]
        for part in parts:
            ratio = part.get("ratio")
            cells.append(_against(part["perplexity"], None if ratio is None else part["perplexity"] / ratio))
        kl = [_number(part.get("kl"), 3) for part in parts]
        kept = [f"{part['kept_bytes'] / 2**20:.1f} MiB" for part in parts if part.get("kept_bytes")]
        rows.append([*cells, ", ".join(filter(None, kl)), ", ".join(dict.fromkeys(kept))])
    return markdown(header, rows)


def _recall(results: Sequence[Mapping[str, Any]]) -> str:
    first = results[0]["recall"]
    header = [f"recall of {first[0]['trials']} (chance {first[0]['chance']:.1%}) after"]
    header += [f"{row['distance']:,} tokens" for row in first]
    rows = []
    for result in results:
        cells = []
        for row in result["recall"]:
            interval = row.get("interval")
            known = f" ({100 * interval[0]:.0f}-{100 * interval[1]:.0f})" if interval else ""
            cells.append(f"{100 * row['accuracy']:.1f} %{known}")
        rows.append([_name(result), *cells])
    return markdown(header, rows)


def _tasks(results: Sequence[Mapping[str, Any]]) -> str:
    chosen = [
        (task, next(key for key in ("acc_norm,none", "acc,none") if key in scores))
        for task, scores in results[0]["tasks"].items()
        if "acc,none" in scores
    ]
    rows = []
    for result in results:
        if "tasks" not in result:
            continue
        cells = []
        for task, key in chosen:
            name, _, kind = key.partition(",")
            scores = result["tasks"][task]
            cells.append(f"{scores[key]:.3f} ± {scores[f'{name}_stderr,{kind}']:.3f}")
        rows.append([_name(result), *cells])
    return markdown(["accuracy", *(task for task, _ in chosen)], rows)


def analysis_table(result: Mapping[str, Any]) -> str:
    """Return the means of an analysis over all layers and heads."""
    columns = ("euclidean", "jensen_shannon", "entropy", "teacher_entropy")
    mean = result.get("mean") or {}
    header = ("analysis", "Euclidean distance", "Jensen-Shannon divergence", "entropy", "entropy of the teacher")
    return markdown(header, [(result["model"], *(_number(mean.get(name), 3) for name in columns))])


def generated_table(name: str, result: Sequence[Mapping[str, Any]]) -> str:
    """Return what a model generated after each prompt."""
    cells = [(_quoted(each["prompt"]), name, _quoted(each["text"])) for each in result]
    return markdown(("prompt", "generated by", "text"), cells)


MARKED = {"&": "&amp;", "<": "&lt;", "\n": "<br>"} | {character: f"&#{ord(character)};" for character in "|`*_["}
"""Characters that Markdown would read as something else, and what is written instead."""


def _quoted(text: str) -> str:
    """Return a text in one line of Markdown, as it is."""
    return "".join(MARKED.get(character, character) for character in "\n".join(text.strip().splitlines()))


def ops_table(result: Mapping[str, Any]) -> str:
    """Return a table of linear and softmax attention. The backward pass of softmax is measured on a GPU only."""
    settings = result["settings"]
    shape = f"{settings['heads']}, {settings['feature_size']}{' with decay' if settings['decay'] else ''}, "
    shape += f"{settings['head_dim']}"
    header = ["heads, feature size, head size", "batch × length", "softmax forward", "linear forward", "ratio"]
    gpu = any(row.get("softmax_training") is not None for row in result["rows"])
    header += (
        ["softmax forward + backward", "linear forward + backward", "ratio"]
        if gpu
        else ["linear forward + backward", "peak memory"]
    )
    rows = []
    several = len(settings["backends"]) > 1
    for row in result["rows"]:
        cells = [f"{shape}: {row['backend']}" if several else shape, f"{settings['batch']} × {row['length']:,}"]
        cells += _pair(row["softmax_forward"], row["linear_forward"])
        if gpu:
            cells += _pair(row["softmax_training"], row["linear_training"])
        else:
            ms, memory = row["linear_training"], row["memory_multiple"]
            cells += ["-", "-"] if ms is None else [_milliseconds(ms), f"{memory:.2f}"]
        rows.append(cells)
    return markdown(header, rows)


def decoding_table(report: Mapping[str, Any]) -> str:
    """Return a table with a row for each model and way to decode: time per step, and bytes of its cache."""
    points = report["points"]
    lengths = list(dict.fromkeys(point["length"] for point in points))
    header = [f"ms per step, batch {report['settings']['batch']}", *(f"after {length:,}" for length in lengths)]
    rows = []
    for model in dict.fromkeys(point["model"] for point in points):
        own = [point for point in points if point["model"] == model]
        held = [_mebibytes(point["cache_bytes"]) for point in own]
        name = ", ".join([_short(Path(model.split(", ")[0]).name), *model.split(", ")[1:]])
        times = {point["length"]: f"{point['milliseconds']:.2f}" for point in own}
        cells = [times.get(length, "does not fit") for length in lengths]
        rows.append([name, *cells, ", ".join(dict.fromkeys(held))])
    return markdown([*header, "cache, MiB"], rows)


def translation_table(report: Mapping[str, Any]) -> str:
    """Return a table with a row for each model: tokens per second and bytes of its cache, by length."""
    points = report["points"]
    lengths = list(dict.fromkeys(point["length"] for point in points))
    header = [f"translation, batch {report['settings']['batch']}"]
    header += [f"tokens/s, {length:,}" for length in lengths] + [f"MiB, {length:,}" for length in lengths]
    rows = []
    for model in dict.fromkeys(point["model"] for point in points):
        own = [point for point in points if point["model"] == model]
        speeds = [f"{point['tokens_per_second']:,.0f}" for point in own]
        rows.append([model, *speeds, *(_mebibytes(point["cache_bytes"]) for point in own)])
    return markdown(header, rows)


def steps_table(report: Mapping[str, Any]) -> str:
    """Return a table of optimizer steps, and their times relative to that of the softmax model."""
    settings, rows = report["settings"], report["rows"]
    title = f"steps of {settings['batch_tokens'] // settings['block_size']} × {settings['block_size']:,} tokens"
    cells = []
    for row in rows:
        ratio = row["milliseconds"] / rows[0]["milliseconds"]
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f}"
        speed = f"{row['tokens_per_second']:,.0f}"
        cells.append((row["step"], f"{row['milliseconds']:.1f}", speed, f"{ratio:.2f}", peak))
    return markdown((title, "ms", "tokens/s", "against softmax", "peak, GiB"), cells)


def memory_table(report: Mapping[str, Any]) -> str:
    """Return a table of the largest batch of each model, and its speed."""
    header = ("model", "largest batch", "cache of a sequence, MiB", "ms per step", "tokens/s")
    rows = []
    for row in report["rows"]:
        speed = row["tokens_per_second"]
        cells = [row["model"], f"{row['batch']:,}", _mebibytes(row["sequence_bytes"])]
        rows.append([*cells, _number(row["milliseconds"], 2), "" if speed is None else f"{speed:,.0f}"])
    return markdown(header, rows)


def serving_tables(report: Mapping[str, Any]) -> list[str]:
    """Return a table with a row for each model and number of users, and one of the turns of a conversation."""
    header = ("model", "users", "tokens/s", "first token, ms (p99)", "between tokens, ms (p99)", "MiB of a user")
    rows = []
    for row in report["rows"]:
        times = [f"{middle:,.0f} ({last:,.0f})" for middle, last in (row["first_token"], row["between_tokens"])]
        cells = (row["model"], f"{row['users']:,}", f"{row['tokens_per_second']:,.1f}")
        rows.append([*cells, *times, _mebibytes(row["bytes_per_user"])])
    columns = ("a turn after", "model", "first token, ms", "the turn, ms", "reading everything, ms", "MiB of the state")
    turns = []
    for turn in report["turns"]:
        reading = "" if turn["reading"] is None else f"{turn['reading']:,.0f}"
        own = [f"{turn['tokens']:,} tokens", turn["model"], f"{turn['first_token']:,.0f}", f"{turn['whole']:,.0f}"]
        turns.append([*own, reading, _mebibytes(turn["state_bytes"])])
    return [markdown(header, rows), markdown(columns, turns)]


def _pair(softmax: float, ours: float | None) -> list[str]:
    if ours is None:
        return [_milliseconds(softmax), "-", "-"]
    ratio = softmax / ours
    return [_milliseconds(softmax), _milliseconds(ours), f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"]


def _mebibytes(count: float) -> str:
    size = count / 2**20
    return f"{size:.3g}" if size < 1000 else f"{size:,.0f}"


def _milliseconds(value: float) -> str:
    return f"{value:.3f} ms" if value < 1 else f"{value:.3g} ms" if value < 1000 else f"{value:,.0f} ms"


def _name(result: Mapping[str, Any]) -> str:
    return result["model"] + (f", {result['variant']}" if "variant" in result else "")


def _short(text: str) -> str:
    return re.sub(r"(\.txt)?(\.xz|\.gz)?$", "", text)


def _against(value: float | None, base: float | None) -> str:
    """Format a perplexity, and its relative difference from another."""
    if value is None:
        return "not finite"
    digits = f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"
    return digits if base is None else f"{digits} ({100 * (value / base - 1):+.1f} %)"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
