"""Child processes of tests: with the same number of threads, or killed after they have saved a checkpoint."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def same_threads(**more: str) -> dict[str, str]:
    """Return the environment of a process whose results are compared bit by bit with this one.

    The number of threads determines the order of sums and thereby their last bits."""
    return os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())} | more


# The process kills itself at the first step after a checkpoint. A test that waits for the checkpoint would be too late
# on a busy machine.
KILLED = """
import ast, os, pathlib, signal, sys
import t2r
from transformers.trainer_callback import DefaultFlowCallback

name, arguments, options, checkpoints = ast.literal_eval(sys.argv[1])

def kill(*args, **options):
    if list(pathlib.Path(checkpoints).glob("checkpoint-*/complete")):
        os.kill(os.getpid(), signal.SIGKILL)

DefaultFlowCallback.on_step_begin = kill
getattr(t2r, name)(*arguments, **options)
"""


def kill_after_checkpoint(
    name: str, *arguments: str, checkpoints: Path, environment: Mapping[str, str], **options: Any
) -> None:
    """Run the function `name` of t2r until there is a complete checkpoint in the folder `checkpoints`."""
    call = repr((name, arguments, options, str(checkpoints)))
    command = [sys.executable, "-c", KILLED, call]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
