"""Experiments: a toy from end to end, resuming, errors, shipped experiments, and tables."""

import errno
import json
import lzma
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import typer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from families import tiny
from publish import page, record_page, record_pages
from t2r.cli import app
from t2r.data.mixture import parse_sources
from t2r.data.wikitext import detokenize, prepare
from t2r.errors import T2RError
from t2r.experiments import load_experiment, reproduce, scales_of, shipped_experiments
from t2r.experiments.command import call
from t2r.experiments.data import TEXTS, missing, prepared
from t2r.experiments.experiment import make_experiment
from t2r.experiments.markup import markdown
from t2r.experiments.places import Places
from t2r.experiments.record import compact, joined, recorded
from t2r.experiments.results import evaluation_tables, training_table
from t2r.experiments.tables import provenance, record_tables
from t2r.training.recipes.recipe import load_recipe

ROOT = Path(__file__).parents[2]
RAW = " = Fish = \n\n The old man ( of the sea ) went out , with a @-@ boat , to catch 1 @,@ 000 fish . \n" * 60
TOY = """
title: A toy
models: {{teacher: nobody/nothing}}
steps:
  - name: rnn
    command: >
      t2r convert {{model:teacher}} {{out:rnn}} --train {{data:wikitext/train}} --valid {{data:wikitext/valid}}
      --limit 2 --feature-size 4 --device cpu --set block_size=16 --set batch_tokens=32 --set transfer.steps={steps}
      --set distill.steps=2 --set warmup_steps=1
  - name: controls
    command: >
      t2r evaluate {{model:teacher}} {{out:rnn}} --text {{data:wikitext/valid}} --text {{data:wikitext/train}}
      --window 16 --window 32 --stride 8 --limit 2 --no-generation --device cpu
      --variant {{model:teacher}}:window=4,sinks=1 --variant {{out:rnn}}:state=bfloat16
  - name: tasks
    optional: true
    command: t2r evaluate {{model:teacher}} --no-such-option
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Make a teacher, texts and an experiment below tmp_path."""
    monkeypatch.setenv("T2R_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    core = Tokenizer(models.WordLevel(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.train_from_iterator([RAW], trainers.WordLevelTrainer(special_tokens=["<pad>", "<s>", "</s>", "<unk>"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    tiny("llama", torch.float32).save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    folder = tmp_path / "texts" / "wikitext"
    folder.mkdir(parents=True)
    (folder / "wiki.train.raw").write_text(RAW)
    with lzma.open(folder / "valid.raw.txt.xz", "wt") as file:
        file.write(RAW)
    (tmp_path / "toy.yaml").write_text(TOY.format(steps=3))
    return tmp_path


def given(toy, out="out"):
    return {"data_folder": toy / "texts", "models": {"teacher": str(toy / "llama")}, "out": toy / out}


@pytest.mark.slow
def test_an_experiment_from_end_to_end_and_again(toy, capfd):
    record = reproduce(str(toy / "toy.yaml"), **given(toy), steps=["rnn"])
    assert [part["name"] for part in record["steps"]] == ["rnn"]
    assert not record["complete"]
    said = capfd.readouterr().err
    assert (
        f"t2r: rnn: t2r convert {toy / 'llama'} {toy / 'out' / 'rnn'} --train {toy}/out/data/wikitext/train.txt" in said
    )
    record = reproduce(str(toy / "toy.yaml"), **given(toy))
    assert "t2r: rnn: already done" in capfd.readouterr().err
    assert record == json.loads((toy / "out" / "record.json").read_text())
    assert (record["experiment"], record["complete"]) == ("toy", True)
    assert record["machine"]["cores"] == os.cpu_count()
    assert {"t2r", "python", "torch", "transformers"} <= set(record["versions"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])
    rnn, controls, tasks = record["steps"]
    assert rnn["command"].startswith("t2r convert teacher rnn --train wikitext/train --valid wikitext/valid --limit 2")
    assert rnn["seconds"] > 0
    assert rnn["result"]["stages"]["distill"]["kl"] > 0
    assert [r["model"] for r in controls["result"]] == ["teacher", "teacher", "rnn", "rnn"]
    assert [m["text"] for m in controls["result"][0]["measured"]] == ["wikitext/valid"] * 2 + ["wikitext/train"] * 2
    assert "result" not in tasks
    assert "No such option" in tasks["failed"]
    assert str(toy) not in json.dumps(record)  # a record contains no paths
    assert "log" not in rnn["result"]
    assert (toy / "out" / "data" / "wikitext" / "valid.txt").read_text() == detokenize(RAW)

    # Again: only the optional step, which failed, is run.
    again = reproduce(str(toy / "toy.yaml"), **given(toy))
    said = capfd.readouterr().err
    assert said.count("already done") == 2
    assert again["steps"][:2] == record["steps"][:2]
    tables = "\n".join(record_tables(record))
    assert "teacher, window 4 + 1 sinks" in tables
    assert f"{controls['result'][3]['perplexity']:.2f}" in tables
    assert "could not be run" not in tables

    # A finished step with another command is an error.
    (toy / "toy.yaml").write_text(TOY.format(steps=4))
    with pytest.raises(T2RError, match="another command"):
        reproduce(str(toy / "toy.yaml"), **given(toy))


@pytest.mark.slow
def test_an_interrupted_step_is_resumed(toy):
    """Killed during training, after a checkpoint: the same command resumes, and counts all seconds."""
    often = TOY.format(steps=4000).replace("--set block_size", "--save-steps 5 --set block_size", 1)
    (toy / "toy.yaml").write_text(often)
    words = [sys.executable, "-m", "t2r", "reproduce", str(toy / "toy.yaml"), "--data", str(toy / "texts")]
    words += ["--model", f"teacher={toy / 'llama'}", "--out", str(toy / "out"), "--json"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 240
        while not list(toy.glob("out/rnn.run/**/checkpoint-*/complete")) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 130
    assert not (toy / "out" / "steps" / "rnn.json").exists()
    before = float((toy / "out" / "steps" / "rnn.seconds").read_text())
    assert before > 0
    # 4,000 steps would take too long: it is enough that the run resumes.
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        goes_on, lines = False, []
        for line in process.stderr:
            lines.append(line)
            if "resuming the unfinished run" in line:
                goes_on = True
                break
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert goes_on, lines
    assert float((toy / "out" / "steps" / "rnn.seconds").read_text()) > before


@pytest.mark.parametrize(("writes", "file"), [(0, "steps/ops.json"), (1, "record.json")])
def test_a_full_disk_is_one_error(tmp_path, monkeypatch, writes, file):
    done = []

    def full(_):
        if len(done) == writes:
            raise OSError(errno.ENOSPC, "No space left on device")
        done.append(1)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(T2RError, match=rf"{file} cannot be written .* free some disk space and repeat the command"):
            reproduce("ops-cpu", out=str(tmp_path), records=["ops-cpu"])
    assert not (tmp_path / file).exists()
    reproduce("ops-cpu", out=str(tmp_path), records=["ops-cpu"])
    assert (tmp_path / file).exists()


def test_a_full_disk_ends_a_running_command(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with (tmp_path / "lock").open("wb") as lock, pytest.raises(T2RError, match=r"x\.seconds cannot be written"):
        call("x", ["--version"], 0.0, tmp_path / "x.seconds", lock)


def test_missing_inputs_are_one_error(toy):
    options = given(toy)
    with pytest.raises(T2RError, match=r"wikitext/train.txt, wikitext/valid.txt .* the --data folder"):
        reproduce(str(toy / "toy.yaml"), **options | {"data_folder": None})
    (toy / "texts" / "wikitext" / "wiki.train.raw").unlink()
    with pytest.raises(T2RError, match=r"requires wikitext/train.txt \(or .xz, .gz\) in .*texts"):
        reproduce(str(toy / "toy.yaml"), **options)
    (toy / "texts" / "wikitext" / "train.txt").write_text("text")
    with pytest.raises(T2RError, match="does not exist"):
        reproduce(str(toy / "toy.yaml"), **options | {"models": {"teacher": str(toy / "nowhere")}})
    with pytest.raises(T2RError, match="has no model student"):
        reproduce(str(toy / "toy.yaml"), **options | {"models": {"student": "x"}})
    with pytest.raises(T2RError, match="has no step draw; its steps are rnn, controls, tasks"):
        reproduce(str(toy / "toy.yaml"), **options, steps=["draw"])
    with pytest.raises(T2RError, match="no experiment 'nothing'"):
        reproduce("nothing")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"steps": None}, "steps must be a list"),
        ({"extra": 1}, "the fields must be"),
        ({"command": "rm -rf /"}, "starts with t2r"),
        ({"command": "t2r serve x"}, "the command must be one of"),
        ({"command": "t2r evaluate {model:other}"}, "no model other"),
        ({"command": "t2r evaluate {out:rnn}"}, "no earlier step makes rnn"),
        ({"command": "t2r evaluate {data:nothing}"}, "no text nothing"),
        ({"command": "t2r convert {model:m} {out:other}"}, "its output folder must be"),
        ({"command": "t2r bench 'ops"}, "step one: the command cannot be read (No closing quotation)"),
        ({"name": "../a", "command": "t2r bench ops"}, "requires a name"),
        ({"models": ["m"]}, "models must be a mapping from names to texts"),
        ({"models": {"m": 3}}, "models must be a mapping from names to texts"),
        ({"paper": "teacher"}, "paper must be a mapping from names to mappings"),
        ({"paper": {"teacher": 18.5}}, "paper must be a mapping from names to mappings"),
        ({"titles": ["teacher"]}, "titles must be a mapping from names to texts"),
        ({"figures": {"title": "a"}}, "figures must be a list"),
        ({"figures": ["a"]}, "a figure must be a mapping with a title"),
        ({"figures": [{"title": "a", "where": "k"}]}, "its `where` a mapping"),
        ({"scales": {1: {}}}, "scales must be a mapping from names to values"),
    ],
)
def test_invalid_experiments_are_refused(change, says):
    of_step = {k: v for k, v in change.items() if k in ("name", "command")}
    step = {"name": "one", "command": "t2r bench ops"} | of_step
    said = {"models": {"m": "x/y"}, "steps": [step]} | {k: v for k, v in change.items() if k not in of_step}
    with pytest.raises(T2RError, match=re.escape(says)):
        make_experiment(said, "test")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"title: caf\xe9\nsteps: []", "cannot be read: 'utf-8' codec"),
        (b"about: 2024-99-01\nsteps: []", "is not valid YAML: month must be in 1..12"),
        (b"scales: nosuch\nsteps: []", "no scales 'nosuch': give a mapping, or one of "),
        (b"scales: 3\nsteps: []", "scales must be a mapping from names to values"),
    ],
)
def test_files_that_are_no_experiments_are_refused(tmp_path, text, says):
    (tmp_path / "own.yaml").write_bytes(text)
    for words in ([], ["--list"]):
        error = CliRunner().invoke(app, ["reproduce", str(tmp_path / "own.yaml"), *words]).exception
        assert isinstance(error, T2RError)
        assert says in str(error)


def test_a_home_folder_is_expanded_once(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    experiment = make_experiment(
        {"models": {"m": "x/y"}, "steps": [{"name": "one", "command": "t2r evaluate {model:m}"}]}, "test"
    )
    places = Places(experiment, None, {"m": "~/lm"}, tmp_path)
    with pytest.raises(T2RError, match=r"folder .*/lm does not exist"):
        places.check(experiment.steps)
    (tmp_path / "lm").mkdir()
    places.check(experiment.steps)
    assert places.path("model", "m") == str(tmp_path / "lm")


# --- Shipped files ------------------------------------------------------------------------------------------


EVERY = [(name, scale) for name in shipped_experiments() for scale in scales_of(name) or [None]]


@pytest.fixture(scope="module")
def group():
    return typer.main.get_command(app)


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_every_shipped_command_parses(name, scale, group):
    """Options are checked with the real parser. Nothing is run."""
    for step in load_experiment(name, scale).steps:
        words = list(step.words(lambda kind, name: name))
        with group.make_context("t2r", list(words), resilient_parsing=False) as context:
            command_name, command, rest = group.resolve_command(context, words)
            while hasattr(command, "resolve_command"):
                with command.make_context(command_name, list(rest), parent=context) as inner:
                    command_name, command, rest = command.resolve_command(inner, rest)
            with command.make_context(command_name, list(rest), parent=context):
                pass


def training_of(name):
    """Return the tokens that the first step of an experiment reads, and its mixture."""
    step = load_experiment(name).steps[0]
    words = step.words(lambda kind, name: name)
    values = {
        flag: [value for word, value in pairwise(words) if word == flag] for flag in ("--set", "--train", "--recipe")
    }
    plan = load_recipe(*(values["--recipe"] or ["distill-lm"]), values["--set"])
    return sum((stage.steps or 0) * stage.batch_tokens for stage in plan.stages), parse_sources(values["--train"])


def test_the_teacher_is_finetuned_on_the_same_tokens():
    tokens, mixture = training_of("smollm2-pure")
    finetuned, same = training_of("smollm2-finetuned")
    assert finetuned == pytest.approx(tokens, rel=0.01)
    assert same == mixture
    assert training_of("smollm2-kept")[1] == mixture
    _, without = training_of("smollm2-pure-no-wikitext")
    assert without == [source for source in mixture if source.source != "wikitext/train"]


def test_translation_is_compared_on_the_same_pairs_and_tokens():
    """A conversion and the finetuned teacher, and every model that is trained on the same pairs."""
    steps = {step.name: step for step in load_experiment("opus-zh-en").steps}

    def planned(name, default):
        words = steps[name].words(lambda kind, name: name)
        flags = ("--set", "--src", "--tgt", "--recipe")
        values = {flag: [b for a, b in pairwise(words) if a == flag] for flag in flags}
        plan = load_recipe(*(values["--recipe"] or [default]), values["--set"])
        return sum(stage.tokens for stage in plan.stages), values["--src"], values["--tgt"]

    more = planned("more", "distill-mt")
    assert planned("finetuned", "scratch-mt") == planned("best", "distill-mt")
    assert planned("joined-larger", "distill-mt") == planned("joined", "distill-mt")
    for name in ("larger", "smaller", "causal", "cross", "attention"):
        assert planned(name, "distill-mt") == more
    rnn = planned("rnn", "distill-mt")
    assert rnn[0] == more[0]
    assert planned("given", "distill-mt")[:2] == rnn[:2]


def test_tables_of_translations():
    row = {"model": "opus", "source": "test.zh.xz", "lines": 2001, "beams": 5, "bleu": 19.4, "chrf": 50.0}
    (table,) = evaluation_tables([row, row | {"model": "rnn", "bleu_difference": -0.4, "chrf_difference": 0.0}])
    assert table.startswith("| test.zh, 2,001 lines, beam 5 | BLEU | chrF |")
    assert "| rnn | 19.40 (-0.40) | 50.00 (+0.00) |" in table
    stages = {"distill": {"bleu": 19.0, "chrf": 49.9, "loss": 2.0, "kl": 0.1}}
    teacher = {"bleu": 19.4, "chrf": 50.0, "loss": 1.9}
    table = training_table({"task": "translation", "teacher": teacher, "stages": stages})
    assert "| after distill | 19.00 | 49.90 | 2.000 | 0.100 |" in table


def test_trainings_of_several_systems_are_one_table():
    teacher, steps = {"bleu": 19.4, "chrf": 50.0, "loss": 1.9}, []
    for name in ("rnn", "more"):
        stages = {"distill": {"bleu": 19.0, "chrf": 49.9, "loss": 2.0, "kl": 0.1}}
        result = {"task": "translation", "teacher": teacher, "stages": stages}
        steps.append({"name": name, "command": f"t2r convert opus {name}", "result": result})
    (table,) = record_tables({"experiment": "opus", "steps": steps})
    assert [row.split(" | ")[0] for row in table.splitlines()[2:]] == [
        "| teacher",
        "| rnn, after distill",
        "| more, after distill",
    ]


def test_the_list_names_models_and_texts():
    done = CliRunner().invoke(app, ["reproduce", "--list"])
    assert done.exit_code == 0
    for name in shipped_experiments():
        for scale in scales_of(name) or [None]:
            experiment = load_experiment(name, scale)
            assert f"{name}: {experiment.title}" in done.stdout
            assert all(
                re.search(rf"^    {TEXTS[text].files[0]}.*: .", done.stdout, re.M) for text in experiment.texts()
            )
    listed = json.loads(CliRunner().invoke(app, ["reproduce", "--list", "--json"]).stdout)
    assert [entry["name"] for entry in listed] == shipped_experiments()


def test_the_list_of_one_experiment():
    """It names the steps, of which those in the shipped record have a time, and no other texts."""
    experiment = load_experiment("table1", "small")
    done = CliRunner().invoke(app, ["reproduce", "table1", "--scale", "small", "--list"])
    assert done.exit_code == 0
    assert f"{len(experiment.steps)} steps at scale small, " in done.stdout
    assert all(re.search(rf"^    {step.name}( \(.+\))?$", done.stdout, re.M) for step in experiment.steps)
    assert "teacher (2.6 minutes)" in done.stdout
    assert "zh-en" not in done.stdout
    listed = json.loads(CliRunner().invoke(app, ["reproduce", "ops-cpu", "--list", "--json"]).stdout)
    assert (listed["name"], listed["texts"]) == ("ops-cpu", [])
    assert "at scale smoke:" in CliRunner().invoke(app, ["reproduce", "table1", "--list"]).stdout
    assert "nosuch" in str(CliRunner().invoke(app, ["reproduce", "nosuch", "--list"]).exception)


def test_command_line_errors():
    for words, says in (([], "no experiment given"), (["ops-cpu", "--model", "x"], "write NAME=FOLDER")):
        assert says in str(CliRunner().invoke(app, ["reproduce", *words]).exception)


def test_the_pages_match_the_records():
    generated = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs/records").iterdir()}
    assert generated == record_pages(), "run: python experiments/publish.py"
    wanted = {name for name in shipped_experiments() if not scales_of(name)}
    wanted |= {f"{name}-small" for name in shipped_experiments() if "small" in scales_of(name)}
    wanted |= {path.stem for path in (ROOT / "experiments/records").glob("*.json")}
    assert wanted <= {name.removesuffix(".md") for name in generated}
    linked = set()
    for path in (ROOT / "docs").glob("*.md"):
        text = path.read_text(encoding="utf-8")
        assert text == page(text), "run: python experiments/publish.py"
        linked |= set(re.findall(r"\]\(records/([\w-]+)\.md", text))
    assert wanted <= linked, "the page of a question links each record that it is about"


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_records_name_their_commands(name, scale):
    record = recorded(name if scale is None else f"{name}-{scale}")
    if record is None:
        return
    assert (record["experiment"], record.get("scale")) == (name, scale)
    assert record["date"]
    assert record["machine"]
    assert record["versions"]
    assert provenance(record)
    if not record.get("hand_run"):  # made by the current experiment, or by some of its steps
        seeds = 1 + max(int(part.get("cell", {}).get("seed", 0)) for part in record["steps"])
        labels = {step.name: step.label for step in load_experiment(name, scale, seeds).steps}
        commands = {part["name"]: part["command"] for part in record["steps"]}
        assert commands == {step: labels[step] for step in commands}
        assert record["complete"] == (commands.keys() == labels.keys())
    for part in record["steps"]:
        assert shlex.split(part["command"])[0] == "t2r"


# --- Tables -------------------------------------------------------------------------------------------------


def test_a_change_of_a_record_changes_the_page(tmp_path, monkeypatch):
    assert "Not recorded yet: `t2r reproduce x`." in record_page("x")
    record = {
        "experiment": "x",
        "date": "2026-11-16",
        "machine": {"gpus": ["NVIDIA H200"]},
        "versions": {"torch": "2.11"},
        "steps": [
            {
                "name": "rnn",
                "command": "t2r convert a b",
                "seconds": 90.0,
                "result": {"teacher": {"perplexity": 20.0}, "stages": {"distill": {"perplexity": 22.0, "kl": 0.1}}},
            },
            {"name": "tasks", "command": "t2r evaluate a", "seconds": 1.0, "failed": "no data"},
        ],
    }
    monkeypatch.setattr("publish.recorded", lambda name: record)
    made = record_page("x")
    assert "2026-11-16; NVIDIA H200; torch 2.11; 1.5 minutes over all steps" in made
    assert "    t2r convert a b    # 90 s" in made
    assert "| after distill | 22.00 (+10.0 %) | 0.100 |" in made
    assert "could not be run: no data" in made
    text = "before\n<!-- summary: performance -->\nold\n<!-- end -->\nafter\n"
    made = page(text)
    assert made.startswith("before\n<!-- summary: performance -->\n| ms per step")
    assert made.endswith("<!-- end -->\nafter\n")
    assert page(made) == made


def test_a_table_without_its_record_is_an_error(monkeypatch):
    with pytest.raises(T2RError, match="no summary 'nothing'; there are conversion, translation"):
        page("<!-- summary: nothing -->\n<!-- end -->\n")
    monkeypatch.setattr("summaries.recorded", lambda name: None)
    with pytest.raises(T2RError, match="smollm2-decode-gpu is not recorded: run t2r reproduce"):
        page("<!-- summary: performance -->\n<!-- end -->\n")


def test_evaluations_as_tables():
    recall = [{"distance": 16, "accuracy": 0.5, "chance": 0.125, "trials": 256, "interval": [0.44, 0.56]}]
    one = {"model": "teacher", "text": "w", "window": 512, "tokens": 10, "perplexity": 20.0, "recall": recall}
    other = one | {"model": "rnn", "variant": "window 4", "perplexity": 21.0, "ratio": 1.05, "kept_bytes": 3 << 20}
    quality, recalled = evaluation_tables([one, other])
    assert "| rnn, window 4 | 21.00 (+5.0 %) | 3.0 MiB |" in quality  # no column for missing KL values
    assert "| teacher | 50.0 % (44-56) |" in recalled
    rounded = other | {"model": "teacher", "kl": 0.1}  # a variant of the same model, without a teacher
    assert "| KL to the first model |" in evaluation_tables([one, rounded])[0]
    assert "| KL to the teacher |" in evaluation_tables([one | {"kl": 0.2}, rounded])[0]
    assert "| KL to the teacher |" in evaluation_tables([one, other | {"kl": 0.1}])[0]
    assert markdown(("a", "b", "c"), [("1", "", "3")]) == "| a | c |\n| --- | --- |\n| 1 | 3 |\n"
    assert training_table({"untrained": {"perplexity": 9.5}, "stages": {}}).endswith("| before | 9.50 |\n")


def test_a_record_is_of_the_machine_of_most_steps():
    """A step that was run elsewhere, also the last one, says so itself."""
    gpu, cpu = ({"date": "2026-11-18", "machine": {"cpu": name}, "versions": {}} for name in ("big", "small"))
    old = gpu | {"date": "2026-11-01", "machine": {"cpu": "old"}}
    steps = [{"name": name, **source} for name, source in zip("abcd", (old, gpu, gpu, cpu), strict=True)]
    found = joined(load_experiment("smollm2-pure"), steps)
    assert (found["date"], found["machine"]) == ("2026-11-18", {"cpu": "big"})
    assert [part.get("machine") for part in found["steps"]] == [{"cpu": "old"}, None, None, {"cpu": "small"}]
    assert joined(load_experiment("smollm2-pure"), [])["machine"] == {}


def test_a_record_is_short_and_contains_no_paths():
    value = {"log": [1], "x": [{"path": "/a/b/c.txt", "by_position": []}], "n": 1.23456789, "k": True}
    assert compact(value, {"/a/b": "out", "/a/b/c.txt": "text"}) == {"x": [{"path": "text"}], "n": 1.2346, "k": True}
    names = {"m": "smollm2", "runs/pure": "pure"}
    assert compact(["m", "some model", "no runs/pure:", "runs/pure2"], names) == [
        "smollm2", "some model", "no pure:", "runs/pure2"
    ]  # fmt: skip


# --- Texts --------------------------------------------------------------------------------------------------


def test_wikitext_is_detokenized(tmp_path):
    raw = " = A = \n In 1 @,@ 234 ( or [ 5 @.@ 6 ] ) % they did n't see Ann 's well @-@ known \" dog \" ; why ? \n"
    text = " = A =\n In 1,234 (or [5.6])% they didn't see Ann's well-known \" dog \"; why?\n"
    assert detokenize(raw) == text
    (tmp_path / "raw").write_text(raw)
    prepare(str(tmp_path / "raw"), tmp_path / "out.txt")
    assert (tmp_path / "out.txt").read_text() == text


def test_texts_are_found_prepared_and_shortened(tmp_path):
    assert missing(["novels/train", "speeches"], tmp_path) == ["novels/train.txt", "speeches.txt"]
    (tmp_path / "novels").mkdir()
    (tmp_path / "novels" / "train.txt").write_text("a novel")
    with lzma.open(tmp_path / "speeches.txt.xz", "wt") as file:
        file.writelines(f"line {i}\n" for i in range(9000))
    assert missing(["novels/train", "speeches"], tmp_path) == []
    assert prepared("novels/train", tmp_path, tmp_path / "work") == tmp_path / "novels" / "train.txt"
    lines = prepared("speeches", tmp_path, tmp_path / "work").read_text().splitlines()
    assert lines == [f"line {i}" for i in range(TEXTS["speeches"].lines)]


def test_a_changed_text_is_prepared_again(tmp_path):
    source, work = tmp_path / "wikitext" / "valid.raw.txt", tmp_path / "work"
    source.parent.mkdir()
    source.write_text(RAW)
    first = prepared("wikitext/valid", tmp_path, work).read_text()
    unchanged = prepared("wikitext/valid", tmp_path, work).stat().st_mtime_ns
    assert prepared("wikitext/valid", tmp_path, work).stat().st_mtime_ns == unchanged
    source.write_text(RAW.replace("fish", "crabs"))
    assert prepared("wikitext/valid", tmp_path, work).read_text() == first.replace("fish", "crabs")


def test_lines_of_texts_are_read_as_in_training(tmp_path):
    """Without marks at the beginning and at line ends. A text that is not UTF-8 is refused."""
    (tmp_path / "speeches.txt").write_bytes("\ufeffa\r\nb".encode())
    assert prepared("speeches", tmp_path, tmp_path / "work").read_bytes() == b"a\nb\n"
    (tmp_path / "speeches.txt").write_bytes(b"a\nb\xff\n")
    with pytest.raises(T2RError, match=r"speeches.txt is not UTF-8: 0xff at byte 3, line 2"):
        prepared("speeches", tmp_path, tmp_path / "again")


def test_a_text_of_several_parts(tmp_path):
    """Both sides are joined alike, and never across files."""
    for side, space in (("zh", ""), ("en", " ")):
        text = TEXTS[f"zh-en/long.{side}"]
        assert set(text.parts) < set(load_experiment("opus-zh-en").texts())  # these are what a user must have
        for i, part in enumerate(text.parts):
            file = tmp_path / f"{TEXTS[part].files[0]}.xz"
            file.parent.mkdir(parents=True, exist_ok=True)
            with lzma.open(file, "wt") as lines:
                lines.write("a\nb\nc\nd\ne" + "\n" * (i % 2))  # the last line of a file may have no end
        found = prepared(f"zh-en/long.{side}", tmp_path, tmp_path / "work").read_text().splitlines()
        assert found == ["a", f"b{space}c", f"d{space}e"] * len(text.parts)
