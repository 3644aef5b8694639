"""The verdicts on the pages of docs say what the records say."""

import re
from pathlib import Path

import pytest

import budgets
import quality
from t2r.errors import T2RError
from t2r.experiments.cells import cells_of_record
from t2r.experiments.record import recorded

DOCS = Path(__file__).parent.parent / "docs"
QUESTIONS = ("conversion", "memory", "translation", "paper", "performance")


def text(name):
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def words(name):
    return " ".join(text(name).split())


def step(name, of):
    return next(part["result"] for part in recorded(name)["steps"] if part["name"] == of)


def controls(name):
    return {(row["model"], row.get("variant")): row for row in step(name, "controls")}


PURE, KEPT = controls("smollm2-pure"), controls("smollm2-kept")


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_page_has_the_question_one_table_a_verdict_and_what_qualifies_it(name):
    head, _, rest = text(name).partition("## What qualifies it")
    assert rest
    assert re.match(r"# .+\n\n\*\*[^*]+\?\*\*", re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", head)), "begins with a question"
    assert len(re.findall(r"^\| ---", head, re.MULTILINE)) == 1
    assert re.search(r"^\*\*[^*?]+\.\*\*$", head, re.MULTILINE), "a verdict in one bold sentence"
    assert name in re.findall(r"\((\w+)\.md\)", text("results"))


MEMORY, EARLIER, WIDE = (f"smollm2-memory-{scale}" for scale in ("gentle", "eight", "full"))


def test_the_verdict_on_memory_budgets():
    kinds = [
        (kind, row) for kind, row in budgets.rows_of(recorded(MEMORY)) if round(row["kept_bytes"] / 2**20, 2) == 8.57
    ]
    own, rnn, one = (
        next(100 * (row["ratio"] - 1) for kind, row in kinds if kind == name) for name in ("trained", "pure", "variant")
    )
    assert f"a window and a state for each head lose {own:.1f} %, where the RNN loses {rnn:.1f} % and one " in words(
        "memory"
    )
    assert f"window for all heads {one:.1f} %." in words("memory")


def numbers(name, of, models, **wanted):
    """Return what an evaluation measured for these models, where the text and the window are as wanted."""
    rows = {row.get("variant") or row["model"]: row for row in step(name, of)}
    parts = [next(p for p in rows[m].get("measured") or [rows[m]] if wanted.items() <= p.items()) for m in models]
    assert parts
    return parts


TRAINED = [f"trained-{n}" for n in (8, 4, 2, 1)]


def listed(values):
    *first, last = (f"{value:.3f}" for value in values)
    return f"{', '.join(first)} and {last}"


def short_texts(name):
    short = numbers(name, "short", TRAINED)
    perplexities = ", ".join(f"{p['perplexity']:.2f}" for p in short[:3]) + f" and {short[3]['perplexity']:.2f}"
    return f"plans have perplexities of {perplexities}, and KL of {listed(p['kl'] for p in short)}"


FAR = {n: (f"trained-{n}", f"windows-{n}", f"window {size} + 4 sinks") for n, size in ((8, 386), (2, 93))}


def far(name, text, budget=8):
    return [p["kl"] for p in numbers(name, "far", FAR[budget], text=f"{text}/valid")]


SAID = "of 8.57 MiB has a KL of {:.3f}, the windows of the same bytes without training {:.3f}, and one window {:.3f}"


@pytest.mark.parametrize("name", [EARLIER, WIDE])
def test_what_qualifies_memory_budgets(name):
    page = words("memory")
    assert SAID.format(*far(name, "wikitext")) in page
    assert f"with novels {listed(far(name, 'novels'))}" in page
    assert short_texts(name) in page


def test_windows_in_eight_bits():
    page, (untrained,) = words("memory"), numbers(EARLIER, "short", ["windows-8"])
    assert f"Not trained, the windows of 8.57 MiB have {untrained['kl']:.3f}." in page
    assert f"With 2.14 MiB it is {listed(far(EARLIER, 'wikitext', 2))}, and with novels" in page
    assert f"novels {listed(far(EARLIER, 'novels', 2))}." in page
    plans = next(part["seconds"] for part in recorded(MEMORY)["steps"] if part["name"] == "plans")
    assert f"plans for all four budgets took {plans / 60:.1f} minutes" in page


def test_the_rates_of_learning_within_a_budget():
    page = words("memory")
    slow, fast = (
        next(row for row in step(name, "budget-8") if row["model"] == "trained-8") for name in (MEMORY, EARLIER)
    )
    said = f"KL is {fast['kl']:.3f} instead of {slow['kl']:.3f}, and perplexity {fast['perplexity']:.2f}, below"
    assert said in page
    (half,) = numbers(EARLIER, "budget-4", ["trained-4"])
    assert f"With 4.28 MiB, KL was {half['kl']:.3f}." in page
    low, maps = (
        [numbers("smollm2-rates-full", "measured-8", [name], window=window)[0]["kl"] for window in (512, 2048)]
        for name in ("low-8", "maps-8")
    )
    assert f"at 512 and at 2,048 tokens, KL is {listed(low)}, and {listed(maps)}." in page


def test_windows_in_sixteen_bits():
    page = words("memory")
    novels, speeches = (numbers(WIDE, "others", TRAINED, text=text) for text in ("novels/valid", "speeches"))
    assert f"On novels, KL is {listed(p['kl'] for p in novels)}" in page
    assert f"Parliament {listed(p['kl'] for p in speeches)}" in page
    (report,) = (each for each in step(WIDE, "decode") if each["settings"]["batch"] == 16)
    at = {p["model"].removesuffix(", engine"): p["milliseconds"] for p in report["points"]
        if p["length"] == 8192 and p["model"].endswith(", engine")}  # fmt: skip
    one = next(time for name, time in at.items() if "window of" in name)
    assert (
        f"takes {at['trained-8']:.2f} ms with windows and states of 8.57 MiB, {at['windows-8']:.2f} with windows "
        f"alone, {one:.2f} with one window, {at['pure']:.2f} with the RNN and {at['smollm2']:.2f} with the teacher"
    ) in page


def test_a_page_without_the_table_is_refused():
    with pytest.raises(T2RError, match="no table with the columns memory, perplexity"):
        quality.rows("| a | b |\n| --- | --- |\n")


def test_the_verdict_on_conversion():
    losses = {}
    for name, model in (("pure", "pure"), ("kept", "kept")):
        (row,) = [row for row in step(f"smollm2-{name}", "texts") if row["model"] == model]
        ratios = [100 * (part["ratio"] - 1) for part in row["measured"]]
        losses[name] = f"{min(ratios):.1f} to {max(ratios):.1f} %"
    long = [100 * (rows[name, None]["measured"][1]["ratio"] - 1) for rows, name in ((PURE, "pure"), (KEPT, "kept"))]
    page = words("conversion")
    assert f"it loses {losses['pure']} at 512 tokens and {long[0]:.1f} % at 2,048, and forgets words" in page
    assert f"kept it loses {losses['kept']} and {long[1]:.1f} %" in page
    rnn, window = PURE["pure", None]["measured"], PURE["smollm2", "window 386 + 4 sinks"]["measured"]
    assert f"KL {window[0]['kl']:.3f} instead of {rnn[0]['kl']:.3f}" in page
    assert f"it has {window[1]['kl']:.3f} instead of {rnn[1]['kl']:.3f}" in page
    minutes = [recorded(f"smollm2-{name}")["steps"][0]["seconds"] / 60 for name in ("pure", "kept")]
    assert f"took {minutes[0]:.1f} minutes and the model with 7 layers {minutes[1]:.1f}" in page


def test_the_verdict_on_translation():
    causal, best = (step("opus-zh-en", f"newstest2017-{name}")[1] for name in ("causal", "best"))
    other = step("opus-zh-en", "newstest2018-best")[1]
    assert causal["bleu_difference"] > 0
    lost = {f"{-row['bleu_difference']:.2f}" for row in (best, other)}
    assert f"newstest2017 loses no BLEU; with recurrent cross attention as well, the news loses {lost.pop()}." in words(
        "translation"
    )
    assert not lost


def test_the_verdict_on_performance():
    report = next(each for each in step("smollm2-decode-gpu", "decode") if each["settings"]["batch"] == 16)
    points = {(point["model"], point["length"]): point for point in report["points"]}
    (short, other), (own, teacher) = (
        [points[f"{model}, engine", n] for model in ("pure", "smollm2")] for n in (512, 8192)
    )
    assert short["milliseconds"] == pytest.approx(other["milliseconds"], rel=0.03)
    less = 100 * (1 - own["milliseconds"] / teacher["milliseconds"])
    share = 100 * own["cache_bytes"] / teacher["cache_bytes"]
    assert f"{less:.0f} % less time after 8,192, where its state takes {share:.0f} % of the teacher" in words(
        "performance"
    )


LONGER = ("30_000_000", "60_000_000")
"""Tokens of longer conversions: half of the teacher's, and all."""


def test_the_numbers_on_language_modeling_in_the_paper():
    cells = cells_of_record(recorded("table1-small")) | cells_of_record(recorded("ablations-small"))
    names = ("teacher", "pretrained-t2r-32", "random-t2r-32", "pretrained-distill", *(f"tokens-{n}" for n in LONGER))
    teacher, paper, scratch, ours, half, whole = (f"{cells[name]['test']:.1f}" for name in names)
    page = words("paper")
    assert f"perplexity {paper} from the transformer, with a sixth of its tokens, against {scratch} from random" in page
    assert f"it reaches {half} and {whole}, where the transformer has {teacher}" in page
    assert f"the same state it reaches {ours}." in page
