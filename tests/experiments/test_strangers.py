"""Experiments of strangers: they are limited, write in the working folder, and run code only if the user says so."""

import json
import re

import pytest
from typer.testing import CliRunner

from t2r.cli import app
from t2r.errors import T2RError
from t2r.experiments import command, load_experiment, reproduce, run
from t2r.experiments.experiment import make_experiment
from t2r.experiments.results import generated_table
from t2r.experiments.run import read_record

MAKES = {"name": "s", "command": "t2r swap {model:m} {out:s}"}


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("bench decode {model:m} --page /tmp/x.html", "leave out --page"),
        ("bench decode {model:m} --page=../x.html", "leave out --page"),
        ("evaluate {model:m} --src a --ref b --outputs ../x", "leave out --outputs"),
        ("analyze {model:m} --text a --plots x", "leave out --plots"),
        ("convert {model:m} {out:one} --train a --report-to wandb", "leave out --report-to"),
        ("swap --revision {out:one} {model:m} OUTSIDE", "give the model and the output folder first"),
        ("swap --revision {out:one} OUTSIDE", "give the model and the output folder first"),
        ("swap {model:m} ../one", "its output folder must be {out:one}"),
        ("swap {model:m} {out:one}/../..", "its output folder must be {out:one}"),
        ("swap {model:option} {out:one}", "give the model and the output folder first"),
        ("bench decode {model:m} {model:page}", "leave out --page"),
        ("bench decode {model:m} --pa{model:ge} x", "leave out --page"),
        ("evaluate {model:m} --text {examples:../../secret}", "is outside of the examples"),
        ("generate {model:server} --file {examples:README.md}", "give a model, not an address"),
        ("generate --file {examples:README.md} https://example.org", "give a model, not an address"),
        ("generate {model:m} --save-state ../x", "leave out --save-state"),
        ("bench serve --url {model:server}", "an experiment measures its own servers only: leave out --url"),
        ("bench serve {model:m} --url=https://example.org", "leave out --url"),
        ("bench serve --u{model:rl} https://example.org", "leave out --url"),
    ],
)
def test_commands_write_in_the_working_folder_only(command, says):
    models = {
        "m": "x/y",
        "option": "--revision",
        "page": "--page=/tmp/x",
        "ge": "ge",
        "rl": "rl",
        "server": "http://example.org",
    }
    with pytest.raises(T2RError, match=re.escape(says)):
        make_experiment({"models": models, "steps": [{"name": "one", "command": f"t2r {command}"}]}, "test")


@pytest.mark.parametrize(
    ("change", "name", "scale", "says"),
    [
        ({"folder": "../x", "scales": {"a": {}}}, "test", "a", "must be a name of letters"),
        ({"folder": "/tmp/x", "scales": {"a": {}}}, "test", "a", "must be a name of letters"),
        ({"scales": {"../../x": {}}}, "test", "../../x", "must be a name of letters"),
        ({}, "..", None, "must be a name of letters"),
        (
            {"steps": [MAKES | {"name": "steps", "command": "t2r swap {model:m} {out:steps}"}]},
            "test",
            None,
            "called steps",
        ),
        (
            {"steps": [MAKES | {"name": "data", "command": "t2r swap {model:m} {out:data}"}]},
            "test",
            None,
            "called data",
        ),
    ],
)
def test_folders_are_in_the_working_folder(change, name, scale, says):
    said = {"models": {"m": "x/y"}, "steps": [{"name": "one", "command": "t2r bench ops"}]} | change
    with pytest.raises(T2RError, match=says):
        make_experiment(said, name, scale)


AXES = {name: list(range(400)) for name in "abc"}
WIDE = "{scale:b}" * 1000


@pytest.mark.parametrize(
    ("step", "seeds", "says"),
    [
        ({"name": "x-{for:a}-{for:b}-{for:c}", "for": AXES}, 1, "more than 10,000 cells"),
        ({"seeds": True}, 10**9, "more than 10,000 steps"),
        ({"command": "t2r bench ops {scale:a}"}, 1, "more than 100,000 characters"),
    ],
)
def test_cells_and_seeds_are_limited(step, seeds, says):
    scales = {"one": {"a": WIDE, "b": "{scale:c}" * 1000, "c": "x" * 1000}}
    said = {"scales": scales, "steps": [{"name": "one", "command": "t2r bench ops"} | step]}
    with pytest.raises(T2RError, match=says):
        make_experiment(said, "test", "one", seeds)


def test_files_are_limited(tmp_path):
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
    for name, text in {"bomb": f"{bomb}steps: []", "large": "x" * 2**21}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
        with pytest.raises(T2RError, match="has more than"):
            load_experiment(str(tmp_path / f"{name}.yaml"))
        for words in (["reproduce"], ["pretrain"], ["convert", "m"]):
            end = {"pretrain": ["out", "--train", "x"], "convert": ["out", "--train", "x"]}.get(words[0], [])
            file = [str(tmp_path / f"{name}.yaml")]
            option = ["--recipe", *file] if words[0] == "convert" else []
            given = [*words, *([] if option else file), *end, *option]
            error = CliRunner().invoke(app, given).exception
            assert isinstance(error, T2RError), given
            assert "has more than" in str(error), given


def test_code_of_others_runs_only_if_the_user_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "PROGRAM", ["false"])
    monkeypatch.setattr(run, "machine", lambda: {"machine": {"cpu": "none", "cores": 1}, "versions": {}})
    step = {"name": "s", "command": "t2r swap {model:m} {out:s} --trust-remote-code"}
    tasks = {"name": "t", "command": "t2r evaluate {model:m} --task x --task-folder /tmp/tasks"}
    own = {"name": "u", "command": "t2r evaluate {model:m} --task x --task-folder {examples:tasks}"}
    file = tmp_path / "own.yaml"
    file.write_text(json.dumps({"models": {"m": "x/y"}, "steps": [step, tasks, own]}))
    for name, option in {"s": "--trust-remote-code", "t": "--task-folder"}.items():
        with pytest.raises(T2RError, match=rf"step {name} runs code of others \({option}\)"):
            reproduce(str(file), out=tmp_path / "out", steps=[name])
        assert not (tmp_path / "out").exists()
        with pytest.raises(T2RError, match=f"step {name} failed"):
            reproduce(str(file), out=tmp_path / f"out-{name}", steps=[name], trust_remote_code=True)
    with pytest.raises(T2RError, match="step u failed"):
        reproduce(str(file), out=tmp_path / "out", steps=["u"])
    error = CliRunner().invoke(app, ["reproduce", str(file), "--out", str(tmp_path / "c")]).exception
    assert "runs code of others" in str(error)


def test_a_model_of_the_user_is_not_replaced(tmp_path, monkeypatch):
    """A swap replaces only its own output, of an earlier attempt."""
    monkeypatch.setattr(command, "PROGRAM", ["sh", "-c", 'echo "t2r: $*" >&2; exit 2', "t2r"])
    monkeypatch.setattr(run, "machine", lambda: {"machine": {"cpu": "none", "cores": 1}, "versions": {}})
    file = tmp_path / "own.yaml"
    file.write_text(json.dumps({"models": {"m": "x/y"}, "steps": [MAKES]}))
    errors = []
    for _ in range(2):
        with pytest.raises(T2RError) as error:
            reproduce(str(file), out=tmp_path / "models")
        errors.append(str(error.value))
    assert "--overwrite" not in errors[0]
    assert "--overwrite" in errors[1]


PART = {"name": "ops", "command": "t2r bench ops --length 8", "seconds": 1.0, "result": {"settings": {}, "rows": []}}


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "3", "null", "{}", "[" * 10_000 + "]" * 10_000, f'{{"seconds": {10**400}}}',
        *(json.dumps({key: x for key, x in PART.items() if key != gone}) for gone in ("command", "name", "result")),
        *(
            json.dumps(PART | change)
            for change in (
                {"command": 3}, {"name": None}, {"models": ["m"]}, {"seconds": "long"}, {"machine": 3}, {"failed": []},
            )
        ),
    ],
)  # fmt: skip
def test_damaged_step_files_are_one_error(tmp_path, text):
    file = tmp_path / "own.yaml"
    file.write_text(json.dumps({"steps": [{"name": "ops", "command": "t2r bench ops --length 8"}]}))
    (tmp_path / "out" / "steps").mkdir(parents=True)
    (tmp_path / "out" / "steps" / "ops.json").write_text(text)
    with pytest.raises(T2RError, match=r"ops\.json (is damaged|is not|has neither)"):
        reproduce(str(file), out=tmp_path / "out")


@pytest.mark.parametrize(
    "change",
    [
        {"result": 3}, {"result": None}, {"result": {"settings": 3}}, {"result": {"rows": 3}}, {"cell": 3},
        {"result": {"rows": [{"softmax_ms": 0}], "settings": {}}}, {"versions": 3}, {"date": [1]}, {"seconds": -1e308},
    ],
)  # fmt: skip
def test_strange_results_of_steps_are_shown_or_one_error(tmp_path, change):
    file = tmp_path / "own.yaml"
    file.write_text(json.dumps({"steps": [{"name": "ops", "command": "t2r bench ops --length 8"}]}))
    (tmp_path / "out" / "steps").mkdir(parents=True)
    (tmp_path / "out" / "steps" / "ops.json").write_text(json.dumps(PART | change))
    error = CliRunner().invoke(app, ["reproduce", str(file), "--out", str(tmp_path / "out")]).exception
    assert error is None or isinstance(error, T2RError)


def test_seeds_of_a_record_are_limited(tmp_path):
    record = {
        "steps": [{"name": f"one-seed{'9' * 8}", "command": "x"}, {"name": "one-seed" + "9" * 5000, "command": "x"}]
    }
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert run.finished_seeds(tmp_path, [read_record(tmp_path / "record.json")], ["one"]) == 1000
    for seeds in (0, 10**9):
        with pytest.raises(T2RError, match="seeds must be at least 1 and at most 1,000"):
            reproduce("ops-cpu", out=tmp_path / "out", seeds=seeds)


def test_generated_texts_are_no_markdown():
    """No links, no images, and no ends of lines that would end the row of a table."""
    text = "![a](http://x/y.png)\r| <b>\u2028# [c](javascript:d)"
    (row,) = generated_table("one", [{"prompt": "p", "text": text}]).splitlines()[2:]
    assert row == "| p | one | !&#91;a](http://x/y.png)<br>&#124; &lt;b><br># &#91;c](javascript:d) |"
