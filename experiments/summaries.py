"""The one table of each page in docs, made from the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from claims import in_a_word, verdicts
from t2r.errors import T2RError
from t2r.experiments.markup import markdown, wrapped
from t2r.experiments.record import recorded

Result = Mapping[str, Any]
LONG, BATCH = 2048, 16
"""Tokens of the longest texts whose quality is measured, and the batch of decoding steps."""


def summary(name: str) -> str:
    """Return a table of this module by its name."""
    if name not in TABLES:
        raise T2RError(f"there is no summary {name!r}; there are {', '.join(TABLES)}")
    return str(TABLES[name]())


def steps_of(name: str) -> dict[str, Any]:
    """Return the results of a record by the names of its steps. Steps that could not be run have none."""
    record = recorded(name)
    if record is None:
        raise T2RError(f"{name} is not recorded: run t2r reproduce {name}")
    return {part["name"]: part["result"] for part in record["steps"] if "result" in part}


def chosen(rows: Sequence[Result], model: str, variant: str | None = None) -> Result | None:
    """Return the row of a model in an evaluation, or None if it was not measured there."""
    return next((row for row in rows if row["model"] == model and row.get("variant") == variant), None)


def mebibytes(count: float) -> str:
    size = count / 2**20
    return f"{size:.2f} MiB" if size < 1 else f"{size:.1f} MiB" if size < 100 else f"{size:.0f} MiB"


def against(part: Result) -> str:
    """Return a perplexity, and how far it is above the teacher's."""
    ratio = part.get("ratio")
    return f"{part['perplexity']:.2f}" + ("" if ratio is None else f" ({100 * (ratio - 1):+.1f} %)")


# --- Conversion -------------------------------------------------------------------------------------------

CONVERTED = (
    ("SmolLM2-135M", "smollm2-pure", "smollm2", None),
    ("**converted, 7 of 30 layers kept**", "smollm2-kept", "kept", None),
    ("**converted: an RNN**", "smollm2-pure", "pure", None),
    ("the RNN, trained without WikiText", "smollm2-pure-no-wikitext", "pure", None),
    ("SmolLM2-135M, finetuned on the same text", "smollm2-finetuned", "finetuned", None),
    ("SmolLM2-135M, window of 772 tokens and 4 sinks", "smollm2-kept", "smollm2", "window 772 + 4 sinks"),
    ("SmolLM2-135M, window of 386 tokens and 4 sinks", "smollm2-pure", "smollm2", "window 386 + 4 sinks"),
)
"""Rows of the table of conversions: title, record, model and variant."""
DISTANCES = (64, 256, 1024)


def conversion() -> str:
    """Return what conversions of SmolLM2-135M lose, beside windows of as many bytes."""
    rows = []
    for title, name, model, variant in CONVERTED:
        done = steps_of(name)
        whole = chosen(done["texts"], model, variant)
        control = chosen(done.get("controls", ()), model, variant)
        texts = [""] * 3 if whole is None else [against(part) for part in whole["measured"]]
        memory, far, recall = "", "", [""] * len(DISTANCES)
        if control is not None:
            (longest,) = [part for part in control["measured"] if part["window"] == LONG]
            accuracy = {row["distance"]: f"{100 * row['accuracy']:.0f} %" for row in control["recall"]}
            memory, far = mebibytes(longest["kept_bytes"]), against(longest)
            recall = [accuracy[distance] for distance in DISTANCES]
        rows.append([title, memory, *texts, far, *recall])
    header = ["", f"memory, {LONG:,} tokens", "WikiText", "novels", "speeches", f"WikiText, {LONG:,} tokens"]
    return markdown([*header, *(f"recall after {distance:,}" for distance in DISTANCES)], rows)


# --- Translation ------------------------------------------------------------------------------------------

TRANSLATED = {
    "opus": "OPUS-MT zh-en",
    "causal": "**recurrent causal attention**, the default (`causal`)",
    "best": "**both recurrent**, as in the paper, 32 and 4 features (`best`)",
    "joined-larger": "both recurrent, 64 and 16 features (`joined-larger`)",
    "finetuned": "OPUS-MT zh-en, finetuned on the text of `best` (`finetuned`)",
}
TESTS = {"newstest2017": "newstest2017", "newstest2018": "newstest2018", "tatoeba": "Tatoeba"}


def translation() -> str:
    """Return BLEU of OPUS-MT and its conversions."""
    done = steps_of("opus-zh-en")
    rows = []
    for model, title in TRANSLATED.items():
        cells, copied, memory = [title], "", ""
        for test in TESTS:
            row = chosen(done.get(f"{test}-{'best' if model == 'opus' else model}", ()), model)
            cells.append("" if row is None else _bleu(row))
            if row is not None and test == "newstest2017":
                copied = f"{100 * row['copied']['names']['accuracy']:.0f} %"
                memory = f"{mebibytes(row['causal_bytes'])} + {mebibytes(row['cross_bytes'])}"
        rows.append([*cells, copied, memory])
    return markdown(["BLEU", *TESTS.values(), "names copied", "memory, causal + cross, 28 tokens"], rows)


def _bleu(row: Result) -> str:
    difference = row.get("bleu_difference")
    return f"{row['bleu']:.2f}" + ("" if difference is None else f" ({difference:+.2f})")


# --- Performance ------------------------------------------------------------------------------------------

DECODED = {
    "smollm2": "SmolLM2-135M",
    "kept": "**converted, 7 of 30 layers kept**",
    "pure": "**converted: an RNN**",
    "smollm2, window of 390": "SmolLM2-135M, window of 390 tokens",
}
LENGTHS = (512, 8192)


def performance() -> str:
    """Return the time of decoding steps, in the engine and in `generate()`, and memory."""
    reports = steps_of("smollm2-decode-gpu")["decode"]
    report = next(each for each in reports if each["settings"]["batch"] == BATCH)
    points = {(point["model"], point["length"]): point for point in report["points"]}
    rows = []
    for model, title in DECODED.items():
        times = [
            " / ".join(f"{points[name, length]['milliseconds']:.2f}" for length in LENGTHS)
            for name in (f"{model}, engine", model)
        ]
        rows.append([title, *times, mebibytes(points[model, LENGTHS[-1]]["cache_bytes"] / BATCH)])
    lengths = " / ".join(f"{length:,}" for length in LENGTHS)
    header = [f"ms per step, batch {BATCH}, after {lengths} tokens", "in `t2r.Engine`", "in `generate()`"]
    return markdown([*header, f"memory of a sequence, {LENGTHS[-1]:,} tokens"], rows)


# --- The paper --------------------------------------------------------------------------------------------


SAID = (
    ("holds", "holds", "hold"),
    ("does not hold", "does not hold", "do not hold"),
    ("not decided", "is not decided", "are not decided"),
    ("not measured yet", "is not measured yet", "are not measured yet"),
)
"""Verdicts, and how one and several claims are said to have them."""


def claims(*scales: str) -> str:
    """Return how many claims of the paper hold at scales, and a table of all of them. A further scale is shown if
    anything is recorded at it."""
    found = {scale: verdicts(scale) for scale in scales}
    shown = [scale for scale in scales if scale == scales[0] or any(verdict is not None for _, verdict in found[scale])]
    words = {
        scale: ["not measured yet" if verdict is None else in_a_word(verdict) for _, verdict in found[scale]]
        for scale in shown
    }
    rows, told = [], []
    for i, (claim, _) in enumerate(found[scales[0]]):
        links = [
            f"[{claim.experiment if len(shown) == 1 else scale}](records/{claim.experiment}-{scale}.md)"
            for scale in shown
            if scale == scales[0] or found[scale][i][1] is not None
        ]
        rows.append([claim.text, *(words[scale][i] for scale in shown), ", ".join(links)])
    for scale in shown:
        counted = [word for word in words[scale] if scale == scales[0] or word != "not measured yet"]
        verbs = ", ".join(
            f"{count} {verb if count != 1 else one}" for word, one, verb in SAID if (count := counted.count(word))
        )
        which = "claims" if len(counted) == len(words[scale]) else "claims that are measured"
        verdict = f"**Of the paper's {len(counted)} {which}, at the scale `{scale}`: {verbs}.**"
        told.append(f"{wrapped(verdict)}\nThe numbers behind each: [claims](records/claims-{scale}.md).\n")
    header = (
        ("claim", "here", "record") if len(shown) == 1 else ("claim", *(f"`{scale}`" for scale in shown), "records")
    )
    return markdown(header, rows) + "\n" + "\n".join(told)


TABLES = {"conversion": conversion, "translation": translation, "performance": performance}
