"""Runs one command of an experiment in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from t2r.experiments.experiment import TRAINING
from t2r.storage import write_text, writing

PROGRAM = [sys.executable, "-m", "t2r"]
BEAT = 5.0
"""Seconds between updates of the saved time of a step, which also counts if the step is killed."""
TELL = 60.0
"""Seconds between two messages about a running step."""


class Ended(NamedTuple):
    """The end of a command."""

    code: int
    seconds: float
    """Including earlier attempts."""
    output: str
    """Its JSON output. Commands that train save their results in their output folder instead."""
    last: str
    """Its last message."""


def call(step: str, words: list[str], before: float, clock: Path, lock: IO[bytes]) -> Ended:
    """Run `t2r ...`, forward its messages, and save the time it takes in the file `clock`.

    The command inherits the lock of its step: if only this process is killed, the step stays locked until the command
    has ended too."""
    command = [*PROGRAM, *words, *([] if words[0] in TRAINING else ["--json"])]
    last = [""]

    def forward(lines: Any) -> None:
        for line in lines:
            sys.stderr.write(line)
            sys.stderr.flush()
            last[0] = line.strip() or last[0]

    began, told = time.monotonic(), before
    with tempfile.TemporaryFile("w+", encoding="utf-8") as stdout:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,  # `t2r generate` without a prompt would read it
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            pass_fds=() if os.name == "nt" else (lock.fileno(),),
        )
        messages = threading.Thread(target=forward, args=(process.stderr,), daemon=True)
        messages.start()
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(BEAT)
                seconds = before + time.monotonic() - began
                with writing(clock):
                    write_text(clock, f"{seconds:.1f}")
                if seconds > told + TELL:
                    say(f"{step}: {seconds:.0f} s so far")
                    told = seconds
                if process.returncode is not None:
                    break
        except BaseException:  # Ctrl-C, or SIGTERM
            process.terminate()
            process.wait()
            raise
        messages.join()
        stdout.seek(0)
        return Ended(process.returncode, before + time.monotonic() - began, stdout.read(), last[0])


def say(line: str) -> None:
    print(f"t2r: {line}", file=sys.stderr, flush=True)
