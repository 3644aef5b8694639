"""The command line: help, flags, errors and exit codes."""

import io
import json
import logging
import os
import re
import resource
import subprocess
import sys
from typing import NamedTuple

import pytest
from rich.table import Table

import t2r
from t2r import cli
from t2r.cli.common import calm, checked_output, print_json, show
from t2r.cli.stages import stage_overrides
from t2r.errors import TOLD_BY_ANY
from t2r.training.recipes.recipe import load_recipe


class Outcome(NamedTuple):
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command in this process. A new one would spend seconds on importing torch."""

    def run(*arguments: str, debug: str = "") -> Outcome:
        monkeypatch.setenv("T2R_DEBUG", debug)
        monkeypatch.setattr(sys, "argv", ["t2r", *arguments])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return Outcome(exit.value.code or 0, *capsys.readouterr())

    return run


def test_help_is_fast():
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "t2r", "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # CPU time, and the best of several runs: wall time on a busy machine includes other processes.
    assert min(seconds() for _ in range(5)) < 0.5


def test_convert_tells_the_defaults_of_its_recipe(run):
    told = run("convert", "-h").stdout.replace(" ", "").replace("\n", "")
    recipe = load_recipe("distill-lm")
    for name, value in recipe.swap.items():
        option = name.replace("_", "-")
        default = {True: option, False: f"no-{option}"}.get(value, value)
        assert re.search(rf"--{option}[^\[]*\[default:{default}\]", told), name
    transfer, distill = recipe.stages
    assert re.search(rf"--learning-rate[^\[]*\[default:{distill.learning_rate}\]", told)
    tokens = f"transfer{transfer.batch_tokens:,},distill{distill.batch_tokens:,}"
    assert re.search(rf"--batch-tokens[^\[]*\[default:{tokens}\]", told)
    swap = run("swap", "--help").stdout.replace(" ", "").replace("\n", "")
    assert re.search(r"--decay[^\[]*\[default:no-decay\]", swap)


def test_flags_of_stages_are_overrides():
    assert stage_overrides({}, {"minutes": 3.0}) == []
    given = {"steps": 5, "learning_rate": 1e-4}
    made = stage_overrides(given, {"overrides": ["transfer.steps=7"]}, "distill-lm")
    assert made == ["steps=5", "distill.learning_rate=0.0001", "transfer.steps=7"]
    transfer, distill = load_recipe("distill-lm", made).stages
    assert (transfer.steps, distill.steps, distill.learning_rate) == (7, 5, 1e-4)
    assert transfer.learning_rate == load_recipe("distill-lm").stages[0].learning_rate
    assert stage_overrides({"learning_rate": 0.1}, {}) == ["learning_rate=0.1"]
    given = {"batch_tokens": 600, "learning_rate": 1e-4}  # the recipe's batch is no multiple of this block
    made = stage_overrides(given, {"overrides": ["block_size=100"]}, "distill-lm")
    assert made == ["batch_tokens=600", "distill.learning_rate=0.0001", "block_size=100"]
    with pytest.raises(t2r.T2RError, match="both set the budget"):
        stage_overrides({"steps": 5}, {"minutes": 3.0})


def test_training_flags_reach_the_pipeline(run, monkeypatch):
    """Tests parsing only. The effect of each flag is tested with the code it controls."""
    for name in ("convert", "pretrain"):
        called = {}
        monkeypatch.setattr(f"t2r.pipelines.{name}.{name}", lambda *a, called=called, **options: called.update(options))
        monkeypatch.setattr("t2r.cli.common.show_results", lambda *a: None)
        monkeypatch.setattr(f"t2r.cli.{name}.show_results", lambda *a: None)
        words = ["--train", "x", "--steps", "3", "--batch-tokens", "64", "--block-size", "32", "--bf16", "--no-compile"]
        words += ["--save-steps", "9", "--gradient-checkpointing", "--restart", "--softmax-layers", "0-2"]
        assert run(name, "a", "b", *words).code == 0
        assert called["overrides"] == ["steps=3", "batch_tokens=64", "block_size=32"]
        assert (called["bf16"], called["compiled"], called["save_steps"], called["restart"]) == (True, False, 9, True)
        assert called["gradient_checkpointing"]
        assert called["softmax_layers"] == [0, 1, 2]
        assert called["progress"] is False  # stderr is not a terminal


@pytest.mark.parametrize("statement", ["import t2r.cli", "import t2r; dir(t2r); t2r.T2RError"])
def test_the_command_line_is_light(statement):
    check = "assert not {'torch', 'transformers', 'rich', 'yaml'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"import sys; sys.argv = ['t2r']; {statement}; {check}"], check=True)


def test_every_public_name_can_be_imported():
    for name in t2r.__all__:
        assert getattr(t2r, name) is not None
    assert set(t2r.__all__) <= set(dir(t2r))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        t2r.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("rank", "count", "told"),
    [(None, None, True), ("0", "2", True), ("1", "2", False), ("1", None, True)],  # the last: left over, no launcher
)
def test_only_the_first_of_several_processes_prints(rank, count, told, monkeypatch, capsys):
    for name, value in (("RANK", rank), ("WORLD_SIZE", count)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with calm(quiet=False, info=True):
        logging.getLogger("t2r.training").warning("a batch is smaller")
        logging.getLogger("t2r.training").error("it went wrong")
        logging.getLogger("t2r.training").warning("interrupted", extra={TOLD_BY_ANY: True})
    written = capsys.readouterr().err
    assert ("a batch is smaller" in written) == told
    assert "interrupted" in written  # by the process that is the first to end, which may be any
    assert "it went wrong" in written


def test_version(run):
    assert run("--version") == (0, f"t2r {t2r.__version__}\n", "")


def test_no_arguments_print_help(run):
    assert run() == run("--help")


def test_info_as_json(run):
    facts = json.loads(run("info", "--json").stdout)
    assert facts["versions"]["t2r"] == t2r.__version__
    assert facts["devices"]["cpu"]["cores"] >= 1
    assert facts["backends"]["chunked"] == {"usable": True, "reason": None}
    assert facts["auto"]["cpu"] in facts["backends"]


def test_info_as_tables(run):
    code, stdout, _ = run("info")
    assert code == 0
    assert "chunked" in stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nonsense"], "No such option"),
        (["nonsense"], "No such command 'nonsense'"),
        (["bench"], "Missing command"),
        (["bench", "ops", "--length", "many"], "--length"),
        (["bench", "ops", "--length", "0"], "length must be at least 1, got 0"),
        (["bench", "ops", "--dtype", "int3"], "no dtype 'int3': choose one of float32"),
        (["bench", "ops", "--device", "abacus"], "device 'abacus' is not available"),
        (["bench", "ops", "--backend", "magic"], "unknown backend 'magic': choose"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, arguments, says):
    code, _, stderr = run(*arguments)
    assert code == 2
    assert says in stderr
    assert stderr.startswith("t2r: ")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(("arguments", "debug"), [(["--debug"], ""), ([], "1")])
def test_debug_lets_the_error_through(run, arguments, debug):
    with pytest.raises(t2r.T2RError, match="no dtype"):
        run(*arguments, "bench", "ops", "--dtype", "int3", debug=debug)


FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(
    ("opened", "code", "says"),
    [
        pytest.param(
            lambda: os.open("/dev/full", os.O_WRONLY),
            2,
            "t2r: standard output cannot be written: No space left on device\n",
            marks=FULL,
            id="full",
        ),
        pytest.param(closed_pipe, cli.CLOSED, "", id="closed"),
    ],
)
@pytest.mark.parametrize("command", ["--version", "--help", "info", "info --json"])
def test_output_that_cannot_be_written(run, monkeypatch, opened, code, says, command):
    with os.fdopen(opened(), "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        outcome = run(*command.split())
        stream.flush()  # what could not be written is dropped, so that Python does not fail at its exit
    assert (outcome.code, outcome.stderr) == (code, says)
    assert sys.stdout is stream


def test_brackets_are_printed_as_they_are(capsys):
    table = Table("model [bold]", title="of :cat:")
    table.add_row("runs/a[v2]")
    show([table, "saved in b[/b]"])
    printed = capsys.readouterr().out
    for words in ("of :cat:", "model [bold]", "runs/a[v2]", "saved in b[/b]"):
        assert words in printed


def test_characters_that_the_output_lacks_are_escaped(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    with checked_output():
        show(["saved in öut"])
        print_json({"out": "öut"})
    saved, printed = stream.buffer.getvalue().decode("ascii").split("\n", 1)
    assert saved == r"saved in \xf6ut"
    assert json.loads(printed) == {"out": "öut"}
