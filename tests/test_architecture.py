"""Checks of the source: imports follow the layers, and no file mentions machines on which it was developed."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "t2r"

# Each layer may import the layers above it, but not its own or lower ones. `cli` may import anything.
LAYERS = (
    ("_version", "errors", "words"),
    ("options", "terminal"),
    ("storage", "compat", "threads", "context", "graphs", "plans", "sharding", "capacity"),
    ("architectures",),
    ("config",),
    ("ops",),
    ("feature_maps",),
    ("attention",),
    ("surgery",),
    ("model",),
    ("hub",),
    ("data",),
    ("generation",),
    ("evaluation",),
    ("budgets",),
    ("tasks",),
    ("training",),
    ("reporting",),
    ("serving",),
    ("bench", "analysis"),
    ("pipelines",),
    ("experiments",),
    ("pages",),
    ("cli",),
)
LEVEL = {part: level for level, layer in enumerate(LAYERS) for part in layer}

# The same inside a package: each of its packages may import those above it. Its own `__init__.py` imports none of them.
INSIDE = {"training": ("recipes", "steps", "loop", "planning", "sessions")}


def parts_of(path: Path) -> tuple[str, ...]:
    """Return the parts of a module name: src/t2r/ops/chunked.py -> ("ops", "chunked"). A package has its own name."""
    return tuple(p for p in path.relative_to(PACKAGE).with_suffix("").parts if p != "__init__")


def imports(source: str, package: tuple[str, ...]) -> Iterator[str]:
    """Return all modules that a file imports, including those in functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            # `from t2r import ops` imports a subpackage, not the public API.
            packages = ("t2r", *(f"t2r.{part}" for part in INSIDE))
            yield from (f"{module}.{alias.name}" for alias in node.names) if module in packages else [module]


def violations(part: str, imported: Iterator[str]) -> list[str]:
    """Return the imports of a part of the package that violate the layers."""
    wrong = []
    for module in imported:
        root, _, rest = module.partition(".")
        if root == "transformers" and part == "ops":
            wrong.append(module)
        if root == "t2r" and part != "cli":
            target = rest.split(".")[0]
            allowed = target == part or LEVEL.get(target, len(LAYERS)) < LEVEL[part]
            if not allowed or (part == "config" and target not in ("errors", "options", "plans", "storage")):
                wrong.append(module)
    return wrong


def violations_inside(parts: tuple[str, ...], imported: Iterator[str]) -> list[str]:
    """Return the imports of a module that violate the order inside its package."""
    order = INSIDE[parts[0]]
    allowed = order[: order.index(parts[1]) + 1] if parts[1:] else ()
    wrong = []
    for module in imported:
        root, package, target, *_ = [*module.split("."), "", ""]
        if (root, package) == ("t2r", parts[0]) and target not in allowed:
            wrong.append(module)
    return wrong


# The public API imports from all layers.
ENTRANCE = (PACKAGE / "__init__.py", PACKAGE / "__main__.py", PACKAGE / "_registration.py")
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path not in ENTRANCE]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    parts = parts_of(path)
    assert parts[0] in LEVEL, f"{parts[0]} has no place yet: give it one in LAYERS and in docs/architecture.md"
    package = ("t2r", *(parts if path.name == "__init__.py" else parts[:-1]))
    wrong = violations(parts[0], imports(path.read_text(), package))
    assert not wrong, f"{parts[0]} must not import {', '.join(wrong)}"


@pytest.mark.parametrize(
    "path", [path for path in FILES if parts_of(path)[0] in INSIDE], ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_imports_inside_a_package_go_one_way(path):
    parts = parts_of(path)
    order = INSIDE[parts[0]]
    assert parts[1:2] in ((), *((name,) for name in order)), f"{'.'.join(parts)} is in none of {', '.join(order)}"
    package = ("t2r", *(parts if path.name == "__init__.py" else parts[:-1]))
    wrong = violations_inside(parts, imports(path.read_text(), package))
    assert not wrong, f"{'.'.join(parts)} must not import {', '.join(wrong)}"


@pytest.mark.parametrize(
    ("part", "source", "wrong"),
    [
        ("ops", "import transformers.cache_utils", ["transformers.cache_utils"]),
        ("ops", "def f():\n    from t2r import attention, errors", ["t2r.attention"]),
        ("feature_maps", "from t2r.attention import masks", ["t2r.attention"]),
        ("attention", "if TYPE_CHECKING:\n    from .surgery import install", ["t2r.surgery"]),
        ("config", "import t2r.ops", ["t2r.ops"]),
        ("surgery", "from t2r import T2RError", ["t2r.T2RError"]),
        ("surgery", "import t2r", ["t2r"]),
        ("model", "from t2r import __version__", ["t2r.__version__"]),
        ("bench", "from t2r import _version, ops\nfrom t2r.bench import speed", []),
        ("cli", "from t2r.pipelines import convert", []),
    ],
)
def test_a_wrong_import_is_seen(part, source, wrong):
    assert violations(part, imports(source, ("t2r",))) == wrong


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("training.recipes.stage", "from t2r.training.steps.job import Job", ["t2r.training.steps.job"]),
        (
            "training.loop.trainer",
            "def f():\n    from t2r.training import recipes, sessions",
            ["t2r.training.sessions"],
        ),
        ("training.steps.learner", "from ..loop import trainer", ["t2r.training.loop"]),
        ("training.steps.learner", "from .. import planning", ["t2r.training.planning"]),
        ("training.planning.plan", "import t2r.training", ["t2r.training"]),
        ("training", "from t2r.training.recipes import recipe", ["t2r.training.recipes"]),
        ("training.sessions.run", "from t2r.errors import T2RError\nfrom t2r.training.sessions import card", []),
    ],
)
def test_a_wrong_import_inside_a_package_is_seen(module, source, wrong):
    parts = tuple(module.split("."))
    assert violations_inside(parts, imports(source, ("t2r", *parts[:-1]))) == wrong


def repository_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_machine():
    # The words are split, so that this file does not match.
    machine = ["/" + "work/", "/" + "root/", "/" + "opt/"]
    neighbor = "../" + "shared"
    found = []
    for path in repository_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        name = str(path.relative_to(ROOT))
        forbidden = machine if name in (".ci/run", "Makefile") else [*machine, neighbor]
        found += [f"{name}: {string}" for string in forbidden if string in text]
    assert not found
