"""Runs the demo on a small teacher: its output agrees with its page, and an interrupted run is resumed."""

import ast
import importlib
import importlib.util
import logging
import random
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import t2r

SCRIPT = Path(__file__).parent.parent / "examples" / "demo.py"
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dogs", "ran", "to", "it", "in", "rain", "or", "sun", "<b>&"]
XHTML, SVG = "{http://www.w3.org/1999/xhtml}", "{http://www.w3.org/2000/svg}"


def words(count, seed=0):
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Return a teacher with two small layers, and texts."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "train.txt").write_text(words(3000))
    (folder / "valid.txt").write_text(words(1000, seed=1))
    overrides = ("steps=20", "warmup_steps=0", "block_size=64", "batch_tokens=256")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("T2R_CACHE", str(folder / "cache"))
        train = str(folder / "train.txt")
        t2r.pretrain(
            "gpt2-tiny", str(folder / "teacher"), train=train, overrides=overrides, device="cpu", progress=False
        )
    return folder


@pytest.fixture
def demo(world, tmp_path, monkeypatch):
    """Return a function that runs the script with seconds instead of minutes."""
    monkeypatch.setenv("T2R_CACHE", str(world / "cache"))
    monkeypatch.setenv("COLUMNS", "150")
    spec = importlib.util.spec_from_file_location("demo", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo", module)
    spec.loader.exec_module(module)
    module.MINUTES, module.FULL_MINUTES, module.WINDOWS, module.FULL_WINDOWS = 0.15, 1.0, 4, 4
    # Independent of the load of the machine.
    monkeypatch.setattr(module, "fitting", lambda models, seconds: list(module.LENGTHS))
    module.LENGTHS, module.SAMPLE = (16, 64, 256), module.SAMPLE | {"max_new_tokens": 12}

    def run(*arguments, teacher=world / "teacher"):
        options = {
            "teacher": teacher,
            "train": world / "train.txt",
            "valid": world / "valid.txt",
            "out": tmp_path / "out",
        }
        named = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        module.BEGAN = module.time.perf_counter()  # as in a new process
        notes = logging.getLogger("t2r")
        handlers = list(notes.handlers)
        try:
            return CliRunner().invoke(app(module), [*named, *arguments])
        finally:
            notes.handlers[:] = handlers

    run.module, run.out = module, tmp_path / "out"
    return run


def app(module):
    made = typer.Typer()
    made.command()(module.main)
    return made


def cells(tree):
    return ["".join(cell.itertext()) for cell in tree.iter() if cell.tag in (f"{XHTML}td", f"{XHTML}th")]


def test_the_page_has_the_numbers_that_were_printed_and_needs_no_network(demo):
    result = demo()
    assert result.exit_code == 0, result.output
    assert "'loss'" not in result.stdout  # log entries go to the curves, not to the results
    page = (demo.out / "index.html").read_text()
    tree = ElementTree.fromstring(page)  # well-formed
    shown = cells(tree)
    rows = re.findall(r"^│ (teacher|swapped, not trained|after .*?|merged.*?) +│ +([\d.]+) +│", result.stdout, re.M)
    assert [re.sub(r"[\d,]+ steps", "N steps", name) for name, _ in rows] == [
        "teacher",
        "swapped, not trained",
        "after N steps of transfer",
        "after N steps of distill",
        "merged and saved, as loaded",
    ]
    told = re.search(r"Perplexity: teacher ([\d.]+), RNN ([\d.]+) \(([-+][\d.]+%)\), in [\d.]+ minutes", result.stdout)
    assert told is not None, result.stdout
    assert (told[1], told[2]) == (rows[0][1], rows[-2][1])
    assert rows[-1][1] == rows[-2][1]  # merging and saving have no visible effect
    steps = re.findall(
        r"│ +[\d,]* │ (teacher|RNN) +│ +([\d.]+) │ +\d+% │ +([\d.]+) │ +([\d,]+) │ +([\d.]+ MiB) │", result.stdout
    )
    assert len(steps) == 6
    for number in [cell for row in rows + steps for cell in row]:
        assert number in shown
    assert "only time and memory are measured" in page  # 256 exceeds its 128 positions
    assert t2r.__version__ in shown
    assert len(list(tree.iter(f"{SVG}svg"))) == 5  # two stages, speed, memory, limit
    # It needs no network and no scripts.
    tags = {element.tag.rpartition("}")[2] for element in tree.iter()}
    assert not tags & {"script", "link", "img", "iframe", "object", "image"}
    for element in tree.iter():
        for name, value in element.attrib.items():
            assert "//" not in value, (name, value)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    assert "prefers-color-scheme: dark" in page
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(ids) == len(set(ids))


@pytest.mark.slow
def test_a_finished_conversion_is_reused_and_another_is_replaced(demo, monkeypatch):
    interrupted = demo.module.decoding.run

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo.module.decoding, "run", stop)
    result = demo()
    assert result.exit_code == 130
    assert "the same command resumes" in result.stderr
    assert not (demo.out / "index.html").exists()
    written = (demo.out / "rnn" / "results.json").stat().st_mtime_ns

    monkeypatch.setattr(demo.module.decoding, "run", interrupted)
    result = demo()
    assert result.exit_code == 0, result.output
    assert "already contains this conversion" in result.stdout
    assert (demo.out / "rnn" / "results.json").stat().st_mtime_ns == written

    demo.module.MINUTES = 0.16
    result = demo()
    assert result.exit_code == 0, result.output
    assert "it is replaced" in result.stdout
    assert (demo.out / "rnn" / "results.json").stat().st_mtime_ns != written


@pytest.mark.slow
def test_the_full_demo_has_three_students(demo):
    result = demo("--full", "--prompt", "the cat")
    assert result.exit_code == 0, result.output
    tree = ElementTree.fromstring((demo.out / "index.html").read_text())
    for name in ("teacher", "RNN", "T2R-75%", "ELU"):
        assert cells(tree).count(name) >= len(demo.module.LENGTHS)
    kept = t2r.T2RForCausalLM.from_pretrained(demo.out / "t2r-75").t2r_config
    assert kept.softmax_every == 4
    assert kept.merged
    elu = t2r.T2RForCausalLM.from_pretrained(demo.out / "elu").t2r_config
    assert (elu.feature_map, elu.decay) == ("elu", False)
    assert len(list(tree.iter(f"{XHTML}blockquote"))) == 4


def test_a_missing_teacher_is_one_error(demo, tmp_path):
    result = demo(teacher=tmp_path / "nobody" / "here")
    assert result.exit_code == 1
    assert "there is no folder" in result.output
    assert "Traceback" not in result.output


def test_only_lengths_that_fit_are_read(world):
    spec = importlib.util.spec_from_file_location("demo", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module
    spec.loader.exec_module(module)
    models = {"teacher": t2r.load(world / "teacher", device="cpu")}
    assert module.fitting(models, -1.0) == [512]
    assert module.fitting(models, 1e6) == [512, 2048, 8192]


def test_an_interrupted_conversion_keeps_its_time_budget(demo, monkeypatch):
    """A second later less time is left."""
    asked = []

    def stop(*args, **options):
        asked.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(t2r, "convert", stop)
    assert demo().exit_code == 130
    demo.module.BEGAN -= 1
    assert demo().exit_code == 130
    demo.module.MINUTES = 0.5
    assert demo().exit_code == 130
    assert [options["restart"] for options in asked] == [True, False, True]
    assert asked[0]["minutes"] == asked[1]["minutes"] != asked[2]["minutes"]


def test_the_demo_uses_only_the_public_api():
    """Only names in `t2r.__all__`, and those that public modules export."""
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules = {name for name in imported if name and name.split(".")[0] == "t2r"}
    assert modules == {"t2r.bench", "t2r.reporting"}
    assert all(name.split(".")[1] in t2r.__all__ for name in modules)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            exported = importlib.import_module(node.module).__all__
            assert {alias.name for alias in node.names} <= set(exported)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "t2r":
            assert node.attr in t2r.__all__
