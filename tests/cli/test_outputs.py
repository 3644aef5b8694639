"""A file that a command writes replaces only one of its own kind, and never an input."""

import json
import os
from pathlib import Path

import pytest
import torch

import t2r
from commands import TEXT, is_one_line, runner, words
from families import tiny
from t2r.errors import T2RError
from t2r.evaluation.translation import TRANSLATIONS
from t2r.reporting.page import FIGURE, PAGE, Page

BENCHMARK = {"settings": {"batch": 1}, "rows": [{"length": 8, "ms": 1.5}]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("outputs")
    t2r.swap(tiny("gpt2", torch.float32), feature_size=6).save_pretrained(root / "rnn")
    words().save_pretrained(root / "rnn")
    tiny("marian", torch.float32).save_pretrained(root / "marian")
    words().save_pretrained(root / "marian")
    (root / "text.txt").write_text(TEXT)
    (root / "few.txt").write_text("the old man\nthe sea\n")
    (root / "own.html").write_text("<!DOCTYPE html>\n<html><body>mine</body></html>\n")
    (root / "1-marian.txt").write_text("the sea\nthe old man\n")
    for name in ("x.json", "named.html", "rnn/results.json"):
        (root / name).write_text(json.dumps(BENCHMARK))
    (root / "link.html").symlink_to(root / "x.json")
    os.link(root / "x.json", root / "hard.html")
    (root / "figures").mkdir()
    (root / "figures" / "attention-by-distance.svg").write_text("<svg>mine</svg>")
    (root / "experiment.yaml").write_text("steps: [{name: ops, command: t2r bench ops --length 8}]\n")
    (root / "work").mkdir()
    (root / "work" / "record.json").write_text(json.dumps({"vinyl": ["Kind of Blue"]}))
    (root / "app").mkdir()
    (root / "app" / "config.json").write_text(json.dumps({"theme": "dark"}))
    (root / "run.run").mkdir()
    (root / "run.run" / "text.txt").write_text(TEXT)
    return root


@pytest.fixture
def run(monkeypatch, capsys):
    return runner(monkeypatch, capsys)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


NO_STATE = "is not a state of t2r, so it is not replaced"
NO_PAGE = "is not a page of t2r, so it is not replaced"
INPUT = "is an input of the command, so it is not replaced"
BENCH = "--length 4 --batch 1 --repeats 1"
CASES = [
    ("generate {m}/rnn the --save-state {m}/rnn/config.json", NO_STATE),
    ("generate {m}/rnn the --save-state {m}/rnn/model.safetensors", NO_STATE),
    ("generate {m}/rnn the --save-state {m}/rnn/tokenizer.json", NO_STATE),
    ("generate {m}/rnn --file {m}/few.txt --save-state {m}/few.txt", INPUT),
    ("generate {m}/rnn the --save-state {m}/rnn", "is a folder: give the name of a file for a state"),
    ("generate {m}/rnn the --save-state /dev/null", "is a device, a pipe or a socket"),
    ("report {m}/x.json --out {m}/x.json", INPUT),
    ("report {m}/named.html", INPUT),
    ("report {m}/x.json --out {m}/own.html", NO_PAGE),
    ("report {m}/x.json --out {m}/link.html", INPUT),
    ("report {m}/x.json --out {m}/hard.html", NO_PAGE),
    ("report {m}/x.json --out {m}/rnn/config.json", NO_PAGE),
    ("report {m}/x.json --out {m}/rnn", "is a folder"),
    (f"bench decode {{m}}/rnn {BENCH} --page {{m}}/rnn/config.json", NO_PAGE),
    ("bench memory {m}/rnn --memory 1 --page {m}/own.html", NO_PAGE),
    (f"bench translate {{m}}/marian {BENCH} --page {{m}}/rnn/config.json", NO_PAGE),
    ("evaluate {m}/marian --src {m}/few.txt --ref {m}/1-marian.txt --outputs {m}", INPUT),
    ("evaluate {m}/marian --src {m}/1-marian.txt --ref {m}/few.txt --outputs {m}", INPUT),
    ("reproduce {m}/experiment.yaml --out {m}/work", "record.json exists and is not a record of t2r"),
    ("swap {m}/marian {m}/app --overwrite", "is not a saved model, so --overwrite does not replace it"),
    ("convert {m}/rnn {m}/run --train {m}/run.run/text.txt --restart", "would delete"),
    ("pretrain gpt2-tiny {m}/run --train {m}/run.run/text.txt --restart", "would delete"),
]


@pytest.mark.parametrize(("command", "says"), CASES, ids=[command[:80] for command, _ in CASES])
def test_nothing_else_is_replaced(run, made, command, says):
    before = contents(made)
    code, _, stderr = run(*(word.format(m=made) for word in command.split()))
    assert code == 2, stderr
    assert says in stderr
    assert is_one_line(stderr), stderr
    assert contents(made) == before


def test_an_empty_output_folder_is_refused(run, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in ("swap {m}/marian", "merge {m}/rnn", "convert {m}/rnn", "pretrain gpt2-tiny", "average {m}/rnn"):
        words = [*command.format(m=made).split(), *([made / "rnn"] if command.startswith("average") else []), ""]
        words += ["--train", made / "text.txt"] if command.startswith(("convert", "pretrain")) else []
        code, _, stderr = run(*words)
        assert (code, "has no name: give its path" in stderr) == (2, True), stderr
    for command in ("convert {m}/rnn out --train {m}/text.txt", "pretrain gpt2-tiny out --train {m}/text.txt"):
        code, _, stderr = run(*command.format(m=made).split(), "--recipe", "")
        assert (code, "no recipe ''" in stderr) == (2, True), stderr
    assert os.listdir(tmp_path) == []


def test_states_are_replaced_by_states(run, made, tmp_path):
    for text in ("the old man", "the sea"):
        assert run("generate", made / "rnn", text, "--save-state", tmp_path / "state", "-q")[0] == 0
    again = ("--load-state", tmp_path / "state", "--save-state", tmp_path / "state")
    assert run("generate", made / "rnn", "went out", *again, "-q")[0] == 0
    assert json.loads(run("inspect", tmp_path / "state", "--json")[1])["tokens"] == 4


def test_a_command_of_the_chat_replaces_only_states(made):
    model = t2r.load(made / "rnn")
    with pytest.raises(T2RError, match=NO_STATE):
        t2r.read_document(model, words(), "the sea").save(made / "rnn" / "config.json")


def test_pages_are_replaced_by_pages(run, made, tmp_path):
    path = tmp_path / "page.html"
    for _ in range(2):
        assert run("report", made / "x.json", "--out", path, "-q")[0] == 0
    old = path.read_text().replace('<meta name="generator" content="t2r"/>\n', "")
    path.write_text(old)  # a page of an older version
    assert run("report", made / "x.json", "--out", path, "-q")[0] == 0
    assert path.read_text() != old


def test_kinds_are_recognized(tmp_path, made):
    Page("x").write(tmp_path / "x.html")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "empty").touch()
    found = {path.name for path in tmp_path.iterdir() for kind in (PAGE, FIGURE) if kind.recognizes(path)}
    assert found == {"x.html"}
    with pytest.raises(T2RError, match="is not a figure of t2r"):
        FIGURE.write(made / "figures" / "attention-by-distance.svg", "<svg/>")
    with pytest.raises(T2RError, match="is not a file of translations"):
        TRANSLATIONS.check(made / "text.txt")
