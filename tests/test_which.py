"""The numbers of docs/which.md are those of the records, or follow from them."""

import re
from pathlib import Path

from t2r.experiments.record import recorded

TEXT = (Path(__file__).parent.parent / "docs" / "which.md").read_text()
WORDS = " ".join(TEXT.split())
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("| ")]


def row(first):
    (found,) = [cells for cells in ROWS if cells[0].startswith(first)]
    return found


def controls(name):
    results = next(step for step in recorded(name)["steps"] if step["name"] == "controls")["result"]
    return {(result["model"], result.get("variant")): result for result in results}


PURE, KEPT = controls("smollm2-pure"), controls("smollm2-kept")
POINTS = {
    (report["settings"]["batch"], point["model"], point["length"]): point
    for report in recorded("smollm2-decode-gpu")["steps"][0]["result"]
    for point in report["points"]
}
NARROW = "window 386 + 4 sinks"
STATE = POINTS[1, "pure, engine", 512]["cache_bytes"]
TOKEN = POINTS[1, "smollm2, engine", 8192]["cache_bytes"] / 8192


def mebibytes(count):
    size = count / 2**20
    return f"{size:.1f} MiB" if size < 100 else f"{size:.0f} MiB"


def test_memory_by_length():
    each = {
        "the transformer, not": (PURE["smollm2", None], "smollm2, engine"),
        "a window:": (PURE["smollm2", NARROW], "smollm2, window of 390, engine"),
        "a hybrid:": (KEPT["kept", None], "kept, engine"),
        "an RNN:": (PURE["pure", None], "pure, engine"),
    }
    for first, (result, name) in each.items():
        held = [part["kept_bytes"] for part in result["measured"]] + [POINTS[1, name, 8192]["cache_bytes"]]
        assert row(first)[1:] == list(map(mebibytes, held))


def test_quality_at_2048_tokens():
    each = {
        "the transformer": PURE["smollm2", None],
        "window 772": KEPT["smollm2", "window 772 + 4 sinks"],
        "hybrid, 7": KEPT["kept", None],
        "window 386": PURE["smollm2", NARROW],
        "RNN": PURE["pure", None],
    }
    for first, result in each.items():
        (cells,) = [cells for cells in ROWS if cells[0].startswith(first) and len(cells) == 7]
        measured = result["measured"][1]
        ratio = f" ({100 * (measured['ratio'] - 1):+.1f} %)" if measured.get("ratio") else ""
        wanted = [mebibytes(measured["kept_bytes"]), f"{measured['perplexity']:.2f}{ratio}"]
        wanted.append(f"{measured['kl']:.3f}" if measured["kl"] else "")
        accuracy = {row["distance"]: row["accuracy"] for row in result["recall"]}
        wanted += [f"{100 * accuracy[distance]:.0f} %" for distance in (256, 1024, 2048)]
        assert cells[1:] == wanted
    forgotten = {row["distance"]: row["accuracy"] for row in PURE["pure", None]["recall"]}
    assert f"within 64 tokens ({100 * forgotten[64]:.0f} %)" in WORDS
    assert f"Chance is {100 * PURE['pure', None]['recall'][0]['chance']} %" in WORDS


def test_short_texts_and_one_user():
    rnn, teacher, window = (
        PURE[key]["measured"][0] for key in (("pure", None), ("smollm2", None), ("smollm2", NARROW))
    )
    assert f"as keys and values of {STATE / TOKEN:.0f} tokens" in WORDS
    quality = f"{rnn['perplexity']:.2f} instead of {teacher['perplexity']:.2f} ({100 * (rnn['ratio'] - 1):+.1f} %)"
    assert quality in WORDS
    assert f"the same memory {window['perplexity']:.2f} ({100 * (window['ratio'] - 1):+.1f} %)" in WORDS
    assert {row["accuracy"] for row in PURE["smollm2", NARROW]["recall"] if row["distance"] <= 256} == {1.0}
    own, other = (POINTS[1, f"{name}, engine", 8192] for name in ("pure", "smollm2"))
    assert (
        f"takes {own['milliseconds']:.2f} ms after 8,192 tokens, and one of the transformer in the same engine "
        in WORDS
    )
    assert f"engine {other['milliseconds']:.2f} ms. The memory" in WORDS
    assert f"saved, {mebibytes(other['cache_bytes'] - own['cache_bytes'])}," in WORDS


def test_long_sequences():
    names = ("smollm2", "kept", "pure", "smollm2, window of 390")
    times = [f"{POINTS[16, f'{name}, engine', 8192]['milliseconds']:.2f} ms" for name in names]
    assert f"takes {times[0]} with the transformer, {times[1]} with the hybrid, {times[2]} with the RNN" in WORDS
    assert f"and {times[3]} with a window of the RNN's memory" in WORDS
    hybrid = POINTS[1, "kept, engine", 8192]["cache_bytes"]
    assert f"The hybrid's {mebibytes(hybrid)} hold the keys and values of {hybrid // TOKEN:,.0f} tokens." in WORDS
    assert f"loses {100 * (KEPT['kept', None]['measured'][1]['ratio'] - 1):.1f} % at 2,048 tokens" in WORDS
    softmax, rnn, window = (
        f"{row['batch']:,} and {row['tokens_per_second']:,.0f} tokens/s"
        for row in recorded("memory-gpu")["steps"][0]["result"]["rows"]
    )
    assert rnn in WORDS
    assert window in WORDS
    batch, speed = softmax.split(" and ")
    assert f"fits {batch} sequences of 8,192 tokens into the GPU and generates {speed}" in WORDS


def test_translation():
    steps = {step["name"]: step for step in recorded("opus-zh-en")["steps"]}
    teacher, causal = steps["newstest2017-causal"]["result"]
    assert f"newstest2017 ({causal['bleu']:.1f})" in WORDS
    assert causal["bleu_p"] > 0.05
    held = [result["causal_bytes"] / 2**20 for result in (causal, teacher)]
    assert f"{held[0]:.2f} MiB instead of {held[1]:.2f} MiB for causal attention" in WORDS
    assert f"loses {-steps['newstest2017-best']['result'][1]['bleu_difference']:.1f} BLEU" in WORDS


def test_feature_sizes():
    """The state of the record has 128 features; its bytes follow from the sizes of the model."""
    assert STATE == 30 * 9 * 128 * (64 + 1) * 4
    for size in (32, 64, 128):
        held = STATE * size // 128
        assert row(str(size))[1:3] == [mebibytes(held), f"{held // TOKEN:.0f} tokens"]


def test_links():
    headings = {re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in TEXT.splitlines()}
    assert set(re.findall(r"\(#([^)]*)\)", TEXT)) <= headings
