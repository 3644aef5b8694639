"""Describes this machine: versions, devices, and available backends."""

import os
import platform
import shlex
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from t2r import ops
from t2r._version import __version__
from t2r.words import counted

if TYPE_CHECKING:
    from rich.table import Table

LIBRARIES = ("torch", "transformers", "accelerate", "triton")


def describe() -> dict[str, Any]:
    """Return the facts about this machine that a bug report should contain, for JSON."""
    kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return {
        "versions": {"t2r": __version__, "python": platform.python_version()}
        | {name: _version(name) for name in LIBRARIES},
        "devices": _devices(),
        "backends": {name: {"usable": reason is None, "reason": reason} for name, reason in ops.backends().items()},
        "auto": {kind: ops.choose(torch.device(kind)) for kind in kinds},
    }


def made() -> dict[str, Any]:
    """Return how a result is made: the date, the command if there is one, versions and devices."""
    facts = describe()
    program = Path(sys.argv[0])
    is_command = program.stem == "t2r" or program.parts[-2:] == ("t2r", "__main__.py")
    command = shlex.join(["t2r", *sys.argv[1:]]) if is_command else None
    return {"date": time.strftime("%Y-%m-%d"), "command": command} | {
        name: facts[name] for name in ("versions", "devices")
    }


def _version(library: str) -> str | None:
    """Read a version from installed metadata. Importing the library would be slow, and can fail."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _devices() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": {"cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "cuda": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
        "mps": torch.backends.mps.is_available(),
    }


def tables(facts: dict[str, Any]) -> "list[Table]":
    """Return the facts as tables."""
    from rich.table import Table

    versions = Table(title="versions", show_header=False)
    for name, number in facts["versions"].items():
        versions.add_row(name, number or "not installed")

    devices = Table(title="devices", show_header=False)
    cpu = facts["devices"]["cpu"]
    devices.add_row("cpu", f"{counted(cpu['cores'], 'core')}, torch uses {counted(cpu['threads'], 'thread')}")
    for i, gpu in enumerate(facts["devices"]["cuda"]):
        devices.add_row(f"cuda:{i}", f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB")
    if not facts["devices"]["cuda"]:
        devices.add_row("cuda", "none")
    devices.add_row("mps", "yes" if facts["devices"]["mps"] else "none")

    backends = Table("backend", "available", "chosen by auto for", title="backends")
    for name, backend in facts["backends"].items():
        chosen = [kind for kind, taken in facts["auto"].items() if taken == name]
        backends.add_row(name, "yes" if backend["usable"] else f"no: {backend['reason']}", ", ".join(chosen))
    return [versions, devices, backends]
