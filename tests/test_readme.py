"""The code in the documentation runs."""

import re
import tomllib
from pathlib import Path

import pytest

import quality
import t2r
from repository import example
from t2r.experiments.record import recorded

README = Path(__file__).parent.parent / "README.md"
DOCS = README.parent / "docs"
TEXT = README.read_text(encoding="utf-8")
WORDS = " ".join(TEXT.split())


def blocks(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


(DEMO,) = blocks(README)


@pytest.mark.parametrize("code", blocks(DOCS / "commands.md"))
def test_examples_of_the_operation_run(code):
    exec(compile(code, "docs/commands.md", "exec"), {})


def test_the_readme_is_two_screens():
    assert len(TEXT.splitlines()) <= 100
    assert (len(re.findall(r"^\| ---", TEXT, re.MULTILINE)), TEXT.count("![")) == (1, 1)  # one table, one picture


def test_every_extra_is_listed():
    install = WORDS.partition("## Install")[2].partition("##")[0]
    extras = tomllib.loads((README.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"`([\w-]+)` \(", install)) == set(extras)


def test_the_demo_in_a_few_lines(tmp_path, monkeypatch):
    """The example of the README with fewer steps, because the full example takes minutes."""
    example("teacher/model.safetensors")
    convert, given = t2r.convert, {}

    def shorter(*args, minutes, overrides, **options):
        given.update(options, minutes=minutes)
        steps = ["transfer.steps=2", "distill.steps=2", "batch_tokens=512"]
        return convert(*args, overrides=[*overrides, *steps], limit=2, progress=False, **options)

    monkeypatch.setattr(t2r, "convert", shorter)
    (tmp_path / "examples").symlink_to(README.parent / "examples")
    monkeypatch.chdir(tmp_path)
    said = []
    exec(compile(DEMO, "README.md", "exec"), {"print": lambda *args: said.append(args)})
    assert given["minutes"] == 5
    assert given["feature_size"] == 32
    ((text,),) = said
    assert text.startswith("She opened the letter, and")
    assert "recall of a word mentioned once:" in (tmp_path / "novelist-rnn" / "README.md").read_text()


def test_the_first_table_is_part_of_that_of_memory_budgets():
    """Whose rows are those of the records, where there are any (tests/test_questions.py)."""
    teacher, *models = quality.rows(TEXT)
    page = quality.rows((DOCS / "memory.md").read_text(encoding="utf-8"))
    assert teacher == page[0]
    assert [row in page for row in models] == [True] * len(models)
    assert len([row for row in models if row.mebibytes == 8.57]) == 4


def test_the_minutes_of_the_plans_and_trainings():
    steps = {step["name"]: step for step in recorded("smollm2-memory-gentle")["steps"]}
    trained = max(sum(steps[f"trained-{n}"]["result"]["seconds"].values()) for n in (8, 4)) / 60
    assert f"took up to {trained:.1f} minutes each, after {steps['plans']['seconds'] / 60:.1f} for all plans" in WORDS


def test_the_numbers_of_the_limits_are_recorded():
    reports = recorded("smollm2-decode-gpu")["steps"][0]["result"]
    times = {
        (report["settings"]["batch"], point["model"], point["length"]): point["milliseconds"]
        for report in reports
        for point in report["points"]
    }
    faster = [times[b, "smollm2", n] / times[b, "pure", n] for b in (1, 16) for n in (512, 8192)]
    assert f"On a GPU, in `generate()` the RNN is {min(faster):.1f} to {max(faster):.1f} times as fast" in WORDS
    gains = [times[16, m, n] / times[16, f"{m}, engine", n] for m in ("smollm2", "pure") for n in (512, 8192)]
    assert f"both are {min(gains):.0f} to {max(gains):.0f} times as fast as in `generate()`" in WORDS
    (short, other), (long, longer) = (
        [f"{times[16, f'{model}, engine', n]:.2f}" for model in ("pure", "smollm2")] for n in (512, 8192)
    )
    assert (
        f"{long} ms per step instead of {longer} after 8,192 tokens, and {short} instead of {other} after 512" in WORDS
    )
    steps = {step["name"]: step for step in recorded("smollm2-pure")["steps"]}
    (rnn,) = [row for row in steps["controls"]["result"] if row["model"] == "pure"]
    recall = {row["distance"]: row["accuracy"] for row in rnn["recall"]}
    assert f"it recalls one in {100 * recall[64]:.0f} % of trials after 64 tokens" in WORDS
    given, without = (
        100
        * (next(s for s in recorded(name)["steps"] if s["name"] == "texts")["result"][1]["measured"][0]["ratio"] - 1)
        for name in ("smollm2-pure", "smollm2-pure-no-wikitext")
    )
    assert f"loses {given:.1f} % on the whole of WikiText-2 valid, and {without:.1f} % if" in WORDS
    translated = {
        step["name"]: step["result"][1] for step in recorded("opus-zh-en")["steps"] if "newst" in step["name"]
    }
    assert f"loses {-translated['newstest2017-best']['bleu_difference']:.1f} BLEU on newstest2017" in WORDS
    assert translated["newstest2017-causal"]["bleu_p"] > 0.05


def test_the_required_versions_are_those_of_the_package():
    project = tomllib.loads((README.parent / "pyproject.toml").read_text())["project"]
    needed = dict(name.split(">=") for name in project["dependencies"] if name.startswith(("torch>", "transformers>")))
    python = project["requires-python"].removeprefix(">=")
    assert (
        f"With Python {python} or newer, torch {needed['torch']} or newer and transformers {needed['transformers']} or "
        "newer"
    ) in TEXT
