"""Child processes of tests: with the same number of threads, in a terminal, or killed after a checkpoint."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

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


# A process of its own makes the terminal, because pytest, with its threads, should not fork.
IN_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
CTRL_C = "\x03"


class InTerminal:
    """A command in a terminal of its own, in which a test types."""

    def __init__(self, *command: str, environment: Mapping[str, str]) -> None:
        self.text = ""
        """Everything that the terminal has shown."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, *command],
            env={**environment, "TERM": "dumb"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.reader = threading.Thread(target=self.read, daemon=True)

    def __enter__(self) -> Self:
        self.reader.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()

    def read(self) -> None:
        assert self.process.stdout is not None
        while data := os.read(self.process.stdout.fileno(), 4096):
            self.text += data.decode(errors="replace").replace("\r", "")

    def type(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def wait_for(self, text: str, times: int = 1, more: int = 0, seconds: float = 300) -> None:
        """Wait until the terminal has shown a text, and `more` characters after it."""
        end = time.monotonic() + seconds
        while self.text.count(text) < times or len(self.text.rpartition(text)[2]) < more:
            assert time.monotonic() < end, f"no {text!r} in {self.text!r}"
            assert self.process.poll() is None, f"it has ended: {self.text!r}"
            time.sleep(0.01)

    def ended(self, seconds: float = 60) -> int:
        """Wait for the end of the command and return its exit code."""
        code = self.process.wait(seconds)
        self.reader.join(seconds)
        return code
