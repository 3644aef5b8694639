"""The command line, as a user meets it."""

import json
import resource
import subprocess
import sys
from typing import NamedTuple

import pytest

import t2r
from t2r import cli
from t2r.training.recipe import load_recipe


class Outcome(NamedTuple):
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command in this process: a new one would spend seconds on loading torch."""

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
        subprocess.run([sys.executable, "-m", "t2r.cli", "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # Seconds of the processor, and the best of several: on a busy machine a clock measures the others.
    assert min(seconds() for _ in range(5)) < 0.5


def test_convert_tells_the_defaults_of_its_recipe(run):
    told = run("convert", "--help").stdout.replace(" ", "").replace("\n", "")
    for name, value in load_recipe("distill-lm").swap.items():
        option = name.replace("_", "-")
        flag = {True: f"--{option}", False: f"--no-{option}"}.get(value, f"--{option}{value}")
        assert flag in told or (name, value) == ("feature_map", "t2r")  # which is the default everywhere


@pytest.mark.parametrize("statement", ["import t2r.cli", "import t2r; dir(t2r); t2r.T2RError"])
def test_importing_is_light(statement):
    check = "assert not {'torch', 'transformers', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"import sys; {statement}; {check}"], check=True)


def test_every_public_name_can_be_had():
    for name in t2r.__all__:
        assert getattr(t2r, name) is not None
    assert set(t2r.__all__) <= set(dir(t2r))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        t2r.nothing  # noqa: B018


def test_version(run):
    assert run("--version") == (0, f"t2r {t2r.__version__}\n", "")


def test_no_arguments_print_help(run):
    assert run() == run("--help")


def test_info_as_json(run):
    facts = json.loads(run("info", "--json").stdout)
    assert facts["versions"]["t2r"] == t2r.__version__
    assert facts["devices"]["cpu"]["cores"] >= 1
    assert facts["backends"]["chunked"] == {"usable": True, "reason": None}
    assert set(facts["auto"]["cpu"].values()) <= set(facts["backends"])


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
        (["bench", "ops", "--device", "abacus"], "no device 'abacus' here"),
        (["bench", "ops", "--backend", "magic"], "no backend 'magic': choose"),
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
