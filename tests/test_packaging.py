"""Declared dependencies are those imported, and the built distributions can be installed and used."""

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib.metadata import distributions, packages_distributions
from pathlib import Path

import pytest

import oldest
from processes import same_threads

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "t2r"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {name: lines for name, lines in PROJECT["optional-dependencies"].items() if name != "dev"}

# Dependencies that t2r does not import itself.
FOR_OTHERS = {
    "jinja2": "transformers renders chat templates with it",
    "protobuf": "transformers reads SentencePiece models with it",
    "sacremoses": "transformers tokenizes for Marian and FSMT with it",
    "sentencepiece": "transformers tokenizes for Marian, T5 and mBART with it",
}

# Modules that are measured beside ours where somebody installed them: t2r does nothing with them itself.
COMPARED = {"fla": "`t2r bench ops --backend fla`; the message says how it is installed"}


def distribution(requirement: str) -> str:
    """Return the name of a requirement: `lm-eval[hf]>=0.4` -> lm_eval."""
    return re.match(r"[\w.-]+", requirement)[0].replace("-", "_").lower()


DECLARED = {distribution(line) for line in PROJECT["dependencies"]}
OPTIONAL = {distribution(line) for lines in EXTRAS.values() for line in lines}


def imported() -> set[str]:
    """Return the distributions whose modules the package imports, including those in functions."""
    modules = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules.add(node.module.split(".")[0])
    modules -= set(sys.stdlib_module_names) | set(COMPARED) | {"t2r"}
    known = packages_distributions()
    return {known.get(module, [module])[0].replace("-", "_").lower() for module in modules}


def test_imports_and_declared_dependencies_agree():
    assert imported() - DECLARED - OPTIONAL == set()
    assert (DECLARED | OPTIONAL) - imported() - set(FOR_OTHERS) == set()
    assert not DECLARED & OPTIONAL


def test_an_extra_that_a_message_names_exists():
    named = {name for path in PACKAGE.rglob("*.py") for name in re.findall(r"extra\(['\"]([\w-]+)", path.read_text())}
    assert named
    assert named <= set(EXTRAS)


def test_every_bound_is_one_that_can_be_tested():
    names = {distribution(line) for line in oldest.requirements()}
    assert names == (DECLARED | OPTIONAL) - {distribution(name) for name in oldest.KEPT}


def test_all_versions_are_pinned():
    """Versions of packages that are not in constraints.txt would change over time."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {distribution(line) for line in lines if line and not line.startswith("#")}
    development = {distribution(line) for line in PROJECT["optional-dependencies"]["dev"]} - {"t2r"}
    assert DECLARED | OPTIONAL - {"triton"} | development <= pinned


def test_the_development_environment_has_every_extra():
    """Tests that are skipped if an extra is missing must run in a development environment."""
    installed = {distribution(found.name) for found in distributions()}
    assert installed >= OPTIONAL


# --- The wheel and the source distribution ------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Return a folder with the source distribution and the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def source(built, tmp_path_factory) -> Path:
    """Return the unpacked source distribution."""
    folder = tmp_path_factory.mktemp("source")
    (archive,) = built.glob("*.tar.gz")
    assert archive.stat().st_size < 2_200_000  # 1.64 MB of it are the novels of the demo
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return unpacked


def test_the_source_distribution_is_the_repository_without_the_teacher(source):
    files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt", "pyproject.toml"} <= files
    assert {"src/t2r/py.typed", "tests/conftest.py", "examples/demo.py", "docs/architecture.md"} <= files
    assert "examples/teacher/model.safetensors" not in files
    assert max((source / name).stat().st_size for name in files) < 500_000


@pytest.mark.slow
def test_tests_run_from_the_source_distribution(source):
    """Tests that require the teacher are skipped with a reason."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_teacher.py"]
    environment = same_threads(PYTHONPATH=str(source / "src"))
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the source distribution leaves out examples/teacher/model.safetensors" in done.stdout
    assert re.search(r"\d passed, \d skipped", done.stdout)


KINDS = {".css", ".html", ".js", ".py", ".svg", ".yaml"}


def test_the_wheel_has_the_data_of_the_package(built):
    (wheel,) = built.glob("*.whl")
    files = set(zipfile.ZipFile(wheel).namelist())
    here = {f"t2r/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*") if path.suffix in KINDS}
    assert here | {"t2r/py.typed"} <= files
    assert all(name.startswith(("t2r/", "t2r-")) for name in files)
    assert wheel.stat().st_size < 950_000  # the records of our experiments, which are in the repository, are 1.3 MB


@pytest.fixture(scope="module")
def fresh(built, tmp_path_factory):
    """Run a program in an environment with the installed wheel, outside the repository.

    The dependencies are those of the current environment, because torch is large."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))
    # Plain paths, unlike site.addsitedir, do not find the editable installation of t2r.
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")) + "\n")
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "T2R_DEBUG")}

    def run(program: str, *arguments: str, status: int = 0) -> str:
        command = [str(environment / "bin" / program), *arguments]
        settings = clean if status else clean | {"T2R_DEBUG": "1"}
        done = subprocess.run(command, cwd=environment, env=settings, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stderr if status else done.stdout

    (wheel,) = built.glob("*.whl")
    run("python", "-m", "pip", "install", "-qq", "--no-index", "--no-deps", "--force-reinstall", str(wheel))
    return run


def test_the_command_of_the_wheel(fresh):
    assert "Turn a pretrained transformer into an RNN" in fresh("t2r", "--help")


def test_the_wheel_has_experiments_but_not_what_only_the_repository_has(fresh):
    """It runs the same commands; records and files of examples are named in one line."""
    assert "table1: " in fresh("t2r", "reproduce", "--list")
    assert " steps at scale small:" in fresh("t2r", "reproduce", "table1", "--scale", "small", "--list")
    for words, says in (
        (("ops-cpu", "--record", "ops-cpu"), "published records are in the repository of t2r only"),
        (("demo",), "run it in a checkout of t2r"),
    ):
        (line,) = fresh("t2r", "reproduce", *words, status=2).splitlines()
        assert says in line


SCRIPT = """
import json, pathlib, sys, tempfile
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
import t2r
from typer.testing import CliRunner
from t2r.cli import app
from t2r.training.recipes.preset import load_preset
from t2r.training.recipes.recipe import load_recipe

config = GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0)
model = t2r.swap(GPT2LMHeadModel(config).eval(), feature_size=4)
prompt = torch.tensor([[1, 2, 3]])
options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
folder = tempfile.mkdtemp()
model.save_pretrained(folder)
again = AutoModelForCausalLM.from_pretrained(folder)
shipped = pathlib.Path(t2r.__file__).parent / "training" / "recipes"
print(json.dumps({
    "where": t2r.__file__,
    "info": CliRunner().invoke(app, ["info"]).stdout,
    "prefix": sys.prefix,
    "tokens": [m.generate(prompt, **options).tolist() for m in (model, again)],
    "recipes": [load_recipe(file.stem).name for file in sorted(shipped.glob("*.yaml"))],
    "presets": [load_preset(file.stem).model["model_type"] for file in sorted((shipped / "presets").glob("*.yaml"))],
}))
"""


def test_the_wheel_swaps_generates_and_finds_its_recipes(fresh):
    found = json.loads(fresh("python", "-c", SCRIPT).splitlines()[-1])
    assert found["where"].startswith(found["prefix"])
    assert PROJECT["name"] in found["info"]
    one, other = found["tokens"]
    assert one == other
    assert len(one[0]) == 8
    shipped = PACKAGE / "training" / "recipes"
    assert len(found["recipes"]) == len(list(shipped.glob("*.yaml")))
    assert len(found["presets"]) == len(list((shipped / "presets").glob("*.yaml")))
    assert "distill-lm" in found["recipes"]
