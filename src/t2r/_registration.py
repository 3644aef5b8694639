"""Registration with transformers' Auto classes.

Each module that defines a configuration or a model registers it as its last statement. `import t2r` imports those
modules, so that the Auto classes load what t2r has saved. They import torch and transformers, which takes seconds: the
command line must answer `--help` before that, and imports them when a command needs a model.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

MODULES = (
    "t2r.config",
    "t2r.architectures",
    "t2r.model.modeling",
)


def register() -> None:
    for module in MODULES:
        import_module(module)


def is_command_line() -> bool:
    """Whether this process is the command `t2r` (or `python -m t2r`), which registers what it needs by itself."""
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # what Python says while it looks for the module
        after = sys.orig_argv[sys.orig_argv.index("-m") + 1 :]
        return after[:1] == ["t2r"]
    return Path(program).name in ("t2r", "t2r.exe")
