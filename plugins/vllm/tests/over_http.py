"""Start vLLM's server with a model, ask all prompts at the same time as texts, and compare with `generate()`:

python over_http.py MODEL [--processes 2]
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kinds import NEW_TOKENS, prompts, words

LONGEST_START = 600
"""Seconds."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait(url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers. Raises RuntimeError if it ends, or needs too long."""
    end = time.monotonic() + LONGEST_START
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise RuntimeError("the server did not start")


def ask(url: str, prompt: list[int]) -> list[int]:
    fields = {
        "prompt": words(prompt),
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(fields).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
        return tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    start, port = time.monotonic(), free_port()
    expected = json.loads((given.model / "answers.json").read_text())
    options: dict[str, Any] = {
        "model": given.model,
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "max-model-len": 1024,
        "max-num-seqs": 16,
        "kv-cache-memory-bytes": 2**28,
        "tensor-parallel-size": given.processes,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [f"--{name}={value}" for name, value in options.items()]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait(url := f"http://127.0.0.1:{port}", server)
            with ThreadPoolExecutor(len(expected)) as threads:
                found = list(threads.map(lambda prompt: ask(url, prompt), prompts()))
        except Exception:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-8000:])
            raise
        finally:
            server.terminate()
            server.wait(60)
    different = [len(p) for p, own, tokens in zip(prompts(), found, expected, strict=True) if own != tokens]
    wrong = f"other tokens than generate() after prompts of {different} tokens" if different else "equal"
    seconds = time.monotonic() - start
    print(f"{given.model.name}, HTTP, {given.processes} process(es): {wrong} ({seconds:.0f} s)", flush=True)
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
