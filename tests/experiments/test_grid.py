"""Grids: scales, cells and seeds; several processes on one folder; going on from a record."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from t2r.cli import app
from t2r.errors import T2RError
from t2r.experiments import command, load_experiment, reproduce, run
from t2r.experiments.experiment import make_experiment
from t2r.storage import take_lock

GRID = """
title: A grid
folder: shared
scales:
  one: {size: 8, words-elu: --feature-map elu, seconds: 0}
  slow: {size: 16, words-elu: --feature-map elu, seconds: 0.3}
steps:
  - name: teacher
    command: t2r pretrain gpt2-tiny {out:teacher} --set steps={scale:seconds}
  - name: "{for:start}-{for:map}"
    for:
      start: [pretrained]
      map: {elu: "{scale:words-{for:map}}", t2r: "--feature-map t2r --feature-size {scale:size}"}
    seeds: true
    command: t2r convert {out:teacher} {out:{for:start}-{for:map}} {with:map} --set steps={scale:seconds}
  - name: random-{for:map}
    for: {start: [random], map: [elu]}
    command: t2r pretrain gpt2-tiny {out:random-{for:map}} --feature-map {for:map} --set steps={scale:seconds}
  - name: quality-{for:map}
    for: {start: [pretrained], map: [elu, t2r]}
    seeds: true
    command: t2r evaluate {out:pretrained-{for:map}} --limit {scale:size}
"""
PROGRAM = """
import json, pathlib, sys, time
words, log = sys.argv[2:], pathlib.Path(sys.argv[1])
name = pathlib.Path(words[2] if words[0] in ("pretrain", "convert") else words[1]).name
def tell(what):
    with log.open("a") as file:
        file.write(f"{what} {words[0]} {name}\\n")
tell("begin")
deadline = time.monotonic() + 60  # a test that failed does not remove it
while (log.parent / f"hold-{words[0]}").exists() and time.monotonic() < deadline:
    time.sleep(0.02)
time.sleep(next((float(word[6:]) for word in words if word.startswith("steps=")), 0))
if words[0] in ("pretrain", "convert"):
    if "bad" in words:
        sys.exit("t2r: it does not work")
    folder = pathlib.Path(words[2])
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps({"stages": {}}))
    (folder / "config.json").write_text("{}")
else:
    print(json.dumps([{"model": words[1], "perplexity": 2.0}]))
tell("end")
"""
SCRIPT = """
import sys
from t2r.experiments import command, record, run
command.PROGRAM = [sys.executable, {program!r}, {log!r}]
record.machine = lambda: {{"machine": {{"cpu": "none", "cores": 1}}, "versions": {{}}, "commit": None}}
command.BEAT = run.POLL = 0.1
from t2r.cli import main
main()
"""


@pytest.fixture
def grid(tmp_path, monkeypatch):
    """Write the experiment, and a program in place of t2r that logs its calls."""
    (tmp_path / "grid.yaml").write_text(GRID)
    (tmp_path / "program.py").write_text(PROGRAM)
    log = tmp_path / "log"
    log.touch()
    monkeypatch.setattr(command, "PROGRAM", [sys.executable, str(tmp_path / "program.py"), str(log)])
    monkeypatch.setattr(command, "BEAT", 0.1)
    monkeypatch.setattr(run, "machine", lambda: {"machine": {"cpu": "none", "cores": 1}, "versions": {}})
    return tmp_path


def test_a_step_for_each_cell_and_seed():
    said = yaml.safe_load(GRID)
    experiment = make_experiment(said, "grid", "one", seeds=2)
    assert (experiment.record, experiment.place, experiment.scales) == ("grid-one", "shared-one", ("one", "slow"))
    labels = {step.name: step.label for step in experiment.steps}
    assert labels["pretrained-elu"] == "t2r convert teacher pretrained-elu --feature-map elu --set steps=0"
    assert labels["pretrained-t2r-seed1"] == (
        "t2r convert teacher pretrained-t2r-seed1 --feature-map t2r --feature-size 8 --set steps=0 --seed 1"
    )
    assert labels["quality-t2r-seed1"] == "t2r evaluate pretrained-t2r-seed1 --limit 8"
    assert len(labels) == 1 + 4 + 1 + 4
    cells = {step.name: step.cell for step in experiment.steps}
    assert cells["pretrained-t2r-seed1"] == {"start": "pretrained", "map": "t2r", "seed": "1"}
    assert cells["teacher"] == {}
    chosen = experiment.select(where={"map": "t2r", "start": "pretrained"})
    assert [step.name for step in chosen] == [
        "teacher", "pretrained-t2r", "pretrained-t2r-seed1", "quality-t2r", "quality-t2r-seed1"
    ]  # fmt: skip
    second = experiment.select(where={"seed": "1"})
    assert [step.name for step in second] == [
        step.name for step in experiment.steps if step.cell.get("seed", "1") == "1"
    ]
    assert "pretrained-t2r" not in [step.name for step in second]
    with pytest.raises(T2RError, match="no cell map=relu: map is elu or t2r"):
        experiment.select(where={"map": "relu"})
    with pytest.raises(T2RError, match="relu"):
        experiment.select(where={"map": ["t2r", "relu"]})
    either = experiment.select(where={"map": ["t2r", "elu"]})
    assert {step.cell["map"] for step in either if "map" in step.cell} == {"t2r", "elu"}
    with pytest.raises(T2RError, match="no axis system: its axes are start, map"):
        experiment.select(where={"system": "t2r"})
    assert [step.name for step in experiment.required(experiment.select(["quality-elu"]))] == [
        "teacher", "pretrained-elu", "quality-elu"
    ]  # fmt: skip


def test_the_command_line_passes_every_label_of_an_axis(tmp_path):
    words = ["reproduce", "table1", "--scale", "smoke", "--out", str(tmp_path / "out")]
    ran = CliRunner().invoke(app, [*words, "--where", "system=nothing", "--where", "system=elu"])
    assert isinstance(ran.exception, T2RError)
    assert "no cell system=nothing" in str(ran.exception)


@pytest.mark.parametrize(
    ("change", "scale", "says"),
    [
        ({}, None, "requires a scale: give --scale one or slow"),
        ({}, "large", "has no scale large"),
        ({"scales": None}, "one", "has no scales"),
        ({"for": {"map": []}}, "one", "axis map must have"),
        ({"for": [1]}, "one", "`for` must be a mapping"),
        ({"for": {"seed": [1, 2]}}, "one", "an axis cannot be called seed"),
        ({"optional": "false"}, "one", "optional must be true or false; got 'false'"),
        ({"name": "a" * 101}, "one", "a name of at most 100 letters"),
        ({"command": "t2r bench ops {for:other}"}, "one", "{for:other} is not known"),
        ({"command": "t2r bench ops {scale:loop}"}, "one", "contain each other"),
    ],
)
def test_wrong_grids_are_refused(change, scale, says):
    step = {"name": "a-{for:map}", "for": {"map": ["x"]}, "command": "t2r bench ops"}
    said = {"scales": {"one": {"loop": "{scale:loop}"}, "slow": {}}, "steps": [step | change]}
    said |= {key: said["steps"][0].pop(key) for key in list(change) if key == "scales"}
    with pytest.raises(T2RError, match=re.escape(says)):
        make_experiment(said, "test", scale)


def test_a_grid_goes_on_from_a_record(grid, capfd):
    file, log = str(grid / "grid.yaml"), grid / "log"
    first = reproduce(file, scale="one", out=grid / "a", where={"map": "t2r"})
    assert [part["name"] for part in first["steps"]] == ["teacher", "pretrained-t2r", "quality-t2r"]
    assert first["steps"][1]["cell"] == {"start": "pretrained", "map": "t2r"}
    assert (first["experiment"], first["scale"], first["complete"]) == ("grid", "one", False)
    log.write_text("")

    # Elsewhere, with another teacher: the cells in the record are not run, nor is the teacher.
    other = grid / "models" / "teacher"
    shutil.copytree(grid / "a" / "teacher", other)
    record = grid / "a" / "grid-one.json"
    second = reproduce(file, scale="one", out=grid / "b", records=[record], models={"teacher": str(other)})
    assert second["complete"]
    ran = [line.split()[2] for line in log.read_text().splitlines() if line.startswith("begin")]
    assert ran == ["pretrained-elu", "random-elu", "pretrained-elu"]  # the last one is evaluated
    assert second["steps"][0] == first["steps"][0]
    log.write_text("")

    # Without the teacher it is trained again, because its folder is needed; the other cell is not.
    third = reproduce(file, scale="one", out=grid / "c", records=[record])
    assert third["complete"]
    ran = [line.split()[2] for line in log.read_text().splitlines() if line.startswith("begin")]
    assert ran == ["teacher", "pretrained-elu", "random-elu", "pretrained-elu"]
    log.write_text("")
    assert reproduce(file, scale="one", out=grid / "c") == third
    assert not log.read_text()
    with pytest.raises(T2RError, match="no record nothing"):
        reproduce(file, scale="one", out=grid / "d", records=["nothing"])
    for text in ('{"steps": {"distill": 8}}', '{"steps": [{"name": "a"}]}', "[]", "{"):
        (grid / "results.json").write_text(text)
        with pytest.raises(T2RError, match=r"results\.json is not a record"):
            reproduce(file, scale="one", out=grid / "d", records=[grid / "results.json"])
    assert not (grid / "d").exists()

    capfd.readouterr()
    foreign = json.loads(record.read_text())
    foreign["steps"] = [{**part, "command": part["command"] + " --seed 7"} for part in foreign["steps"]]
    (grid / "foreign.json").write_text(json.dumps(foreign))
    reproduce(file, scale="one", out=grid / "c", records=[grid / "foreign.json"])
    assert "no step of the record has a command of this experiment" in capfd.readouterr().err


def test_fewer_seeds_leave_the_others_in_the_record(grid):
    file, log = str(grid / "grid.yaml"), grid / "log"
    both = reproduce(file, scale="one", out=grid / "a", where={"map": "t2r"}, seeds=2)
    assert "quality-t2r-seed1" in [part["name"] for part in both["steps"]]
    log.write_text("")
    assert reproduce(file, scale="one", out=grid / "a", where={"map": "t2r"}) == both
    elsewhere = reproduce(
        file, scale="one", out=grid / "b", where={"map": "t2r"}, records=[grid / "a" / "grid-one.json"]
    )
    assert elsewhere == both
    assert not log.read_text()


def test_a_failed_cell_does_not_stop_the_others(grid):
    (grid / "grid.yaml").write_text(GRID.replace("words-elu: --feature-map elu", "words-elu: bad"))
    with pytest.raises(
        T2RError, match=r"step pretrained-elu failed: it does not work.*quality-elu failed: requires pre"
    ):
        reproduce(str(grid / "grid.yaml"), scale="one", out=grid / "a")
    assert (grid / "a" / "steps" / "pretrained-elu.failed").read_text() == "it does not work"
    done = json.loads((grid / "a" / "grid-one.json").read_text())
    assert [part["name"] for part in done["steps"]] == ["teacher", "pretrained-t2r", "random-elu", "quality-t2r"]


def test_waiting_for_another_process_is_said_once(grid, monkeypatch, capfd):
    """Another process holds the first step until this one has looked at it three times."""
    (grid / "out" / "steps").mkdir(parents=True)
    lock, looks = take_lock(grid / "out" / "steps" / "teacher.lock"), []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            lock.close()

    monkeypatch.setattr(run, "time", SimpleNamespace(sleep=sleep, strftime=time.strftime, time=time.time))
    reproduce(str(grid / "grid.yaml"), scale="one", out=grid / "out", where={"map": "t2r"})
    assert looks == [run.POLL] * 3
    said = capfd.readouterr().err
    assert said.count("waiting for other processes: teacher\n") == 1
    assert said.index("waiting") < said.index("teacher: t2r pretrain")


def test_a_step_that_fails_in_another_process_is_not_tried_here_too(grid, monkeypatch):
    steps = grid / "out" / "steps"
    steps.mkdir(parents=True)
    lock = take_lock(steps / "teacher.lock")

    def sleep(seconds):
        later = time.time() + 1
        (steps / "teacher.failed").write_text("it does not work")
        os.utime(steps / "teacher.failed", (later, later))
        lock.close()

    given = {"scale": "one", "out": grid / "out", "where": {"map": "t2r"}}
    with monkeypatch.context() as patch:
        patch.setattr(run, "time", SimpleNamespace(sleep=sleep, strftime=time.strftime, time=time.time))
        with pytest.raises(
            T2RError, match="step teacher failed: in another process: it does not work; step pretrained-t2r"
        ):
            reproduce(str(grid / "grid.yaml"), **given)
    assert not (grid / "log").read_text()
    earlier = time.time() - 60
    os.utime(steps / "teacher.failed", (earlier, earlier))
    reproduce(str(grid / "grid.yaml"), **given)  # a new call tries again
    assert not (steps / "teacher.failed").exists()


def test_processes_share_a_grid_and_lose_nothing_when_one_is_killed(grid):
    """Three processes; one is killed alone, while its command goes on, and one together with its command."""
    folder, log = grid / "out", grid / "log"
    script = grid / "t2r"  # a name by which the package knows the command line, and does not import torch
    script.write_text(SCRIPT.format(program=str(grid / "program.py"), log=str(log)))
    words = [
        sys.executable,
        str(script),
        "reproduce",
        str(grid / "grid.yaml"),
        "--scale",
        "slow",
        "--out",
        str(folder),
        "--json",
    ]

    def start():
        return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0)

    def until(line):
        deadline = time.monotonic() + 60
        while line not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    hold = {word: grid / f"hold-{word}" for word in ("pretrain", "convert")}  # such commands go on when it is removed
    for file in hold.values():
        file.touch()
    alone = start()
    until("begin pretrain teacher")
    alone.kill()  # its command goes on, and holds the lock
    alone.wait()
    group = start()
    until("begin pretrain random-elu")  # the teacher is locked
    hold["pretrain"].unlink()
    until("begin convert")
    others = [start(), start()]
    os.killpg(group.pid, signal.SIGKILL)
    group.wait()
    hold["convert"].unlink()
    said = [process.communicate(timeout=60)[1] for process in others]
    assert [process.returncode for process in others] == [0, 0], said
    lines = log.read_text().splitlines()
    ends = Counter(line for line in lines if line.startswith("end"))
    assert set(ends.values()) == {1}, lines
    assert len(ends) == len(load_experiment(str(grid / "grid.yaml"), "slow").steps)
    begins = Counter(line.removeprefix("begin") for line in lines if line.startswith("begin"))
    assert sum(begins.values()) == len(ends) + 1, lines  # only the command that was killed ran twice
    assert begins[" pretrain teacher"] == 1
    assert json.loads((folder / "grid-slow.json").read_text())["complete"]


def ran(grid):
    return [line.split()[2] for line in (grid / "log").read_text().splitlines() if line.startswith("begin")]


def test_results_of_another_model_are_refused(grid):
    """Also of one that was given for the output of a step."""
    file, other = str(grid / "grid.yaml"), grid / "models" / "teacher"
    first = reproduce(file, scale="one", out=grid / "a", where={"map": "t2r"})
    shutil.copytree(grid / "a" / "teacher", other)
    with pytest.raises(T2RError, match=r"teacher\.json was made with --model none, not teacher=.*give another --out"):
        reproduce(file, scale="one", out=grid / "a", models={"teacher": str(other)})
    given = {"teacher": str(other)}
    reproduce(file, scale="one", out=grid / "b", models=given, steps=["pretrained-t2r"])
    (grid / "log").write_text("")
    with pytest.raises(T2RError, match="was made with --model teacher="):
        reproduce(file, scale="one", out=grid / "b", where={"map": "t2r"})
    assert ran(grid) == []  # refused before anything runs
    assert reproduce(file, scale="one", out=grid / "b", models=given, where={"map": "t2r"})["steps"]
    assert not any("models" in part for part in first["steps"])


def test_a_given_output_needs_no_inputs(grid):
    file, other = str(grid / "grid.yaml"), grid / "models" / "t2r"
    reproduce(file, scale="one", out=grid / "a", steps=["pretrained-t2r"])
    shutil.copytree(grid / "a" / "pretrained-t2r", other)
    (grid / "log").write_text("")
    reproduce(file, scale="one", out=grid / "b", steps=["quality-t2r"], models={"pretrained-t2r": str(other)})
    assert ran(grid) == ["t2r"]  # the evaluation of the given folder; no teacher is trained


def test_an_output_of_another_command_is_refused(grid):
    file = grid / "grid.yaml"
    reproduce(str(file), scale="one", out=grid / "a", steps=["teacher"])
    (grid / "a" / "steps" / "teacher.json").unlink()
    file.write_text(file.read_text().replace("gpt2-tiny {out:teacher}", "gpt2-tiny {out:teacher} --seed 3"))
    with pytest.raises(T2RError, match=r"teacher was made by another command \(t2r pretrain gpt2-tiny teacher"):
        reproduce(str(file), scale="one", out=grid / "a", steps=["teacher"])


def test_damaged_results_and_empty_selections_are_one_error(grid):
    file = str(grid / "grid.yaml")
    reproduce(file, scale="one", out=grid / "a", steps=["teacher"])
    (grid / "a" / "steps" / "teacher.seconds").write_text("")
    (grid / "a" / "steps" / "teacher.json").write_text("{")
    with pytest.raises(T2RError, match=r"teacher\.json is damaged: delete it"):
        reproduce(file, scale="one", out=grid / "a", steps=["teacher"])
    with pytest.raises(T2RError, match="no step of experiment grid has these names and these labels"):
        reproduce(file, scale="one", out=grid / "b", steps=["quality-t2r"], where={"map": "elu"})
    assert not (grid / "b").exists()


def test_seeds_of_another_experiment_do_not_count(grid):
    """It shares the folder."""
    reproduce(str(grid / "grid.yaml"), scale="one", out=grid / "a", seeds=2)
    said = yaml.safe_load((grid / "grid.yaml").read_text())
    steps = [step | {"name": f"other-{step['name']}"} for step in said["steps"][3:]]
    (grid / "other.yaml").write_text(yaml.safe_dump(said | {"steps": [*said["steps"][:2], *steps]}))
    (grid / "alone.yaml").write_text(yaml.safe_dump(said | {"steps": said["steps"][:1]}))
    assert reproduce(str(grid / "alone.yaml"), scale="one", out=grid / "a")["complete"]
    assert not reproduce(str(grid / "other.yaml"), scale="one", out=grid / "a", steps=["teacher"])["complete"]


@pytest.mark.parametrize(
    ("ended", "why"),
    [
        ((0, 1.0, "{}", "t2r: note"), None),
        ((2, 1.0, "", "t2r: no such file"), "no such file"),
        ((1, 1.0, "", ""), "exit code 1"),
        ((-9, 1.0, "", "t2r: step 3"), "killed by SIGKILL (out of memory?); its last message: step 3"),
        ((-15, 1.0, "", ""), "killed by SIGTERM"),
    ],
)
def test_why_a_command_failed(ended, why):
    assert run.reason(command.Ended(*ended)) == why


def test_a_command_without_json_fails(grid, monkeypatch):
    monkeypatch.setattr(run, "call", lambda *_: command.Ended(0, 1.0, "Usage: t2r", ""))
    given = {"pretrained-t2r": str(grid)}
    with pytest.raises(T2RError, match="step quality-t2r failed: it printed no JSON"):
        reproduce(str(grid / "grid.yaml"), scale="one", out=grid / "a", steps=["quality-t2r"], models=given)
