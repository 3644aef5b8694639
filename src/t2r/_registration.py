"""Registration with transformers' Auto classes.

Each module that defines a configuration or a model registers it in its last statement, and so does the recorded step
of `generate()`. `import t2r` imports these modules, so that the Auto classes load models saved by t2r. They import
torch and transformers, which takes seconds. The command line therefore imports them only when a command needs a model,
so that `--help` is fast.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

MODULES = (
    "t2r.config",
    "t2r.architectures",
    "t2r.model.modeling",
    "t2r.generation.recorded",
)


def register() -> None:
    for module in MODULES:
        import_module(module)


def is_command_line() -> bool:
    """Return whether this process is the command `t2r` or `python -m t2r`, which registers modules when needed."""
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # the value of sys.argv[0] while Python locates the module
        after = sys.orig_argv[sys.orig_argv.index("-m") + 1 :]
        return after[:1] == ["t2r"]
    return Path(program).name in ("t2r", "t2r.exe")
