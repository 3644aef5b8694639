"""The code in the documentation runs."""

import re
import tomllib
from pathlib import Path

import pytest
import torch

import t2r
from families import tiny
from repository import example
from t2r.experiments.cells import cells_of_record
from t2r.experiments.record import recorded

README = Path(__file__).parent.parent / "README.md"


BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
DEMO = [code for code in BLOCKS if "examples/teacher" in code]


@pytest.mark.parametrize("code", [code for code in BLOCKS if code not in DEMO])
def test_examples_in_the_readme_run(code, tmp_path):
    tiny("gpt2", torch.float32).save_pretrained(tmp_path)  # a folder, because the Hub may not be reachable
    exec(compile(code.replace('"gpt2"', repr(str(tmp_path))), str(README), "exec"), {})


def test_every_extra_is_listed():
    install = README.read_text().partition("## Install")[2].partition("##")[0]
    extras = tomllib.loads((README.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"`([\w-]+)` \(", install)) == set(extras)


def test_the_demo_in_a_few_lines(tmp_path, monkeypatch):
    """The example of the README with fewer steps, because the full example takes minutes."""
    (code,) = DEMO
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
    exec(compile(code, "README.md", "exec"), {"print": lambda *args: said.append(args)})
    assert given["minutes"] == 5
    assert given["feature_size"] == 32
    ((text,),) = said
    assert text.startswith("She opened the letter, and")
    assert "recall of a word mentioned once:" in (tmp_path / "novelist-rnn" / "README.md").read_text()


def test_the_numbers_of_the_first_table_are_recorded():
    """Every figure of the table, and of recall below it, is in the records that the pages are generated from."""
    pure, kept = (
        next(step for step in recorded(f"smollm2-{name}")["steps"] if step["name"] == "controls")["result"]
        for name in ("pure", "kept")
    )
    rows = {(row["model"], row.get("variant")): row for row in (*kept, *pure)}
    models = [("smollm2", None), ("kept", None), ("pure", None), ("smollm2", "window 386 + 4 sinks")]
    reports = recorded("smollm2-decode-gpu")["steps"][0]["result"]
    points = {(report["settings"]["batch"], p["model"], p["length"]): p for report in reports for p in report["points"]}
    decoded = ["smollm2, engine", "kept, engine", "pure, engine", "smollm2, window of 390, engine"]
    text = " ".join(README.read_text().split())
    lines = [line for line in README.read_text().splitlines() if line.startswith("| ") and "MiB" in line]
    *lines, wide = lines
    assert len(lines) == len(models)
    for line, model, how in zip(lines, models, decoded, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for cell, part in zip(cells[1:3], rows[model]["measured"], strict=True):
            assert cell.split()[0] == f"{part['perplexity']:.2f}"
            ratio = part.get("ratio")
            digits = 0 if ratio and ratio > 1.1 else 1
            assert cell.partition("(")[2] == ("" if ratio is None else f"{100 * (ratio - 1):+.{digits}f} %)")
        held = points[1, how, 8192]["cache_bytes"] / 2**20
        assert cells[3] == (f"{held:.1f} MiB" if held < 100 else f"{held:.0f} MiB")
        assert cells[4] == " / ".join(f"{points[16, how, length]['milliseconds']:.2f}" for length in (512, 8192))
    # A window of as many bytes as the hybrid at 8,192 tokens holds the whole texts that were measured.
    hybrid, token = (
        points[1, "kept, engine", 8192]["cache_bytes"],
        points[1, "smollm2, engine", 8192]["cache_bytes"] / 8192,
    )
    assert f"window of {hybrid // token:,.0f} tokens" in wide
    assert hybrid // token > max(part["window"] for part in rows["smollm2", None]["measured"])
    whole = [f"{part['perplexity']:.2f} (+0.0 %)" for part in rows["smollm2", None]["measured"]]
    assert [cell.strip() for cell in wide.strip("|").split("|")][1:] == [
        *whole,
        f"{hybrid / 2**20:.1f} MiB",
        "not measured",
    ]
    small = points[1, "pure, engine", 512]["cache_bytes"] / 4 / 2**20
    assert f"a quarter of this state ({small:.1f} MiB)" in text
    for row in (*rows["pure", None]["recall"][:3], *rows["kept", None]["recall"][3:]):
        assert f"{100 * row['accuracy']:.0f} %" in text
    own = [points[16, "smollm2", length]["milliseconds"] for length in (512, 8192)]
    assert f"{min(own):.0f} to {max(own):.0f} ms in `generate()`; a step of the RNN" in text
    ours = [points[16, "pure", length]["milliseconds"] for length in (512, 8192)]
    fastest, slowest = f"{min(ours):.0f}", f"{max(ours):.0f}"
    span = fastest if fastest == slowest else f"{fastest} to {slowest}"
    assert f"a step of the RNN takes {span} ms" in text
    faster = [
        points[b, "smollm2", n]["milliseconds"] / points[b, "pure", n]["milliseconds"]
        for b in (1, 16)
        for n in (512, 8192)
    ]
    assert f"only {min(faster):.1f} to {max(faster):.1f} times as fast as its teacher" in text
    captured = [points[16, "smollm2, captured", length]["milliseconds"] for length in (512, 8192)]
    assert f"takes {captured[0]:.1f} and {captured[1]:.1f} ms" in text
    window, rnn = rows["smollm2", "window 386 + 4 sinks"], rows["pure", None]
    kl = [f"{x['kl']:.3f} instead of {y['kl']:.3f}" for x, y in zip(window["measured"], rnn["measured"], strict=True)]
    assert f"KL {kl[0]} at 512 tokens, {kl[1]} at 2,048" in text
    assert [row["accuracy"] for row in window["recall"] if row["distance"] <= 256] == [1.0] * 3


def test_the_minutes_of_the_conversions_are_recorded():
    text = " ".join(README.read_text().split())
    pure, kept = (recorded(f"smollm2-{name}")["steps"][0]["seconds"] / 60 for name in ("pure", "kept"))
    assert f"as a pure RNN, in {pure:.0f} minutes beside other work" in text
    assert f"(`--softmax-layers auto:7`), in {kept:.0f} minutes." in text


LONGER = ("30_000_000", "60_000_000")
"""Tokens of longer conversions: half of the teacher's, and all."""


def test_the_numbers_of_the_text_below_are_recorded():
    text = " ".join(README.read_text().split())
    without, given = (
        next(step for step in recorded(name)["steps"] if step["name"] == "texts")["result"][1]["measured"][0]["ratio"]
        for name in ("smollm2-pure-no-wikitext", "smollm2-pure")
    )
    assert f"is {100 * (without - 1):.1f} % above the teacher's instead of {100 * (given - 1):.1f} %" in text
    cells = cells_of_record(recorded("table1-small")) | cells_of_record(recorded("ablations-small"))
    names = ("teacher", "pretrained-t2r-32", "random-t2r-32", "pretrained-distill", *(f"tokens-{n}" for n in LONGER))
    teacher, paper, scratch, ours, half, whole = (f"{cells[name]['test']:.1f}" for name in names)
    assert f"(perplexity {paper} against {scratch}); our recipe reaches {ours}." in text
    assert f"the paper's method reaches {half}, and with all of them {whole}, where the teacher has {teacher}." in text


def test_the_required_versions_are_those_of_the_package():
    project = tomllib.loads((README.parent / "pyproject.toml").read_text())["project"]
    needed = dict(name.split(">=") for name in project["dependencies"] if name.startswith(("torch>", "transformers>")))
    python = project["requires-python"].removeprefix(">=")
    assert (
        f"With Python {python} or newer, torch {needed['torch']} or newer and transformers {needed['transformers']} or "
        "newer"
    ) in README.read_text()
