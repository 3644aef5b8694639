"""Configuration of all tests: threads, seeds, hypothesis, and the real teachers."""

import os
import signal
import sys
from pathlib import Path

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a background job; child processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is loaded; child processes inherit it
    os.environ["OMP_NUM_THREADS"] = "1"

import gc
import importlib.util
import itertools
from collections import Counter

import pytest
import torch
from hypothesis import settings

# Without a GPU, Triton kernels run in the interpreter. The variable is read when t2r.ops is first imported.
if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:  # one worker per core, so more threads would not help
    torch.set_num_threads(1)

# No deadline, because a shared machine may stall. Deterministic examples, so that failures are reproducible.
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def seed() -> int:
    """Start every test with the same state of torch, independently of previous tests."""
    torch.manual_seed(0)
    # On an ARM CPU without bfloat16, torch disables oneDNN for the rest of the process after the first bfloat16 matrix
    # product. float32 products then differ in their last bits from those of a new process.
    torch.backends.mkldnn.enabled = True
    return 0


@pytest.fixture(autouse=True)
def stock_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `generate()` be that of transformers, with which the engine is compared."""
    if (module := sys.modules.get("t2r.model.modeling")) is not None:
        monkeypatch.setattr(module.T2RModel, "recorded", None)


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Exempt the objects of earlier tests from garbage collection.

    The Trainer collects garbage at every checkpoint, which takes seconds with the objects of a thousand tests."""
    gc.collect()
    gc.freeze()


def _why_no_teachers() -> str | None:
    folder = os.environ.get("T2R_TEACHERS")
    if not folder:
        return "T2R_TEACHERS does not name a folder of real teachers"
    if not Path(folder).is_dir():
        raise pytest.UsageError(f"T2R_TEACHERS={folder} is not a folder: a test run must not pass by accident")
    return None


DESCENDANTS = {
    "blenderbot", "blenderbot-small", "gemma", "gemma3_text", "granite", "m2m_100", "mbart", "mt5", "olmo", "olmo2",
    "pegasus", "phi", "plbart", "qwen2", "stablelm",
}  # fmt: skip
"""Families whose adapter has no attention code of its own. Another family tests that code in all combinations."""
FEW, SOME = 1, 3
"""Number of combinations of a test's other parameters that such a family runs at most, and a family that is neither one
of them nor among the most different ones. The others are marked slow."""


def choices(item: pytest.Item) -> frozenset[tuple]:
    """Return what a combination has of each `parametrize` but the family: names, and identities of values."""
    params = item.callspec.params
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    together = [name.replace(" ", "").split(",") if isinstance(name, str) else name for name in names]
    return frozenset(
        (*group, *(id(params[name]) for name in group)) for group in map(tuple, together) if group != ("model_type",)
    )


def covering(group: list[pytest.Item], limit: int, used: Counter[frozenset]) -> list[pytest.Item]:
    """Return combinations that have every value of every parameter, or as many values as `limit` combinations can have.

    `used` counts how often two values were together, in other families too. Rare pairs are preferred."""
    chosen: list[pytest.Item] = []
    left = frozenset().union(*map(choices, group))
    while not chosen or (left and len(chosen) < limit):
        best = max(group, key=lambda item: (len(choices(item) & left), -sum(used[pair] for pair in pairs(item))))
        chosen.append(best)
        left -= choices(best)
        used.update(pairs(best))
    return chosen


def pairs(item: pytest.Item) -> list[frozenset]:
    return [frozenset(pair) for pair in itertools.combinations(choices(item), 2)]


def mark_repetitions(items: list[pytest.Item]) -> None:
    """Mark combinations of a test's parameters as slow in which nothing is new.

    A family has every value of every parameter, or as many combinations as above. Which values are together differs
    between families, and any two values are together in some family."""
    from families import DIFFERENT, FAMILIES  # imports t2r, after the variables above

    groups: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        family = getattr(getattr(item, "callspec", None), "params", {}).get("model_type")
        if isinstance(family, str) and family in FAMILIES and item.get_closest_marker("slow") is None:
            groups.setdefault((item.nodeid.split("[")[0], family), []).append(item)
    used: dict[str, Counter[frozenset]] = {}
    kept: set[pytest.Item] = set()
    for (test, family), group in groups.items():
        limit = len(group) if family in DIFFERENT else FEW if family in DESCENDANTS else SOME
        kept.update(covering(group, limit, used.setdefault(test, Counter())))
    for (test, _), group in groups.items():
        seen = used[test]
        for item in group:
            if not all(seen[pair] for pair in pairs(item)):
                kept.add(item)
                seen.update(pairs(item))
            if item not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_repetitions(items)
    if (reason := _why_no_teachers()) is not None:
        for item in items:
            if item.get_closest_marker("teachers"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def teachers() -> Path:
    """Return the folder of real teachers, for tests marked `teachers`."""
    if (reason := _why_no_teachers()) is not None:
        pytest.skip(reason)
    return Path(os.environ["T2R_TEACHERS"])
