"""Compare vLLM with `generate()`, model by model, in one process (with `--processes 2`, in two for each model):

    python offline.py MODEL ... [--settings whole,pieces,cached] [--processes 2]

Prints a line for each model and setting, and fails if any answer differs.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

from kinds import NEW_TOKENS, prompts

SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {"enable_prefix_caching": False, "max_num_batched_tokens": 2048},
    "pieces": {"enable_prefix_caching": False, "max_num_batched_tokens": 64},
    "cached": {"enable_prefix_caching": True, "max_num_batched_tokens": 192},
    "compiled": {"enable_prefix_caching": False, "max_num_batched_tokens": 2048, "enforce_eager": False},
}
"""How prompts are read: at once; in steps of at most 64 tokens; in steps of at most 192 tokens, and then from states of
the same prompts; or at once by a compiled model."""


def compare(model: Path, setting: str, processes: int) -> str | None:
    """Ask all prompts together. Returns what differs, or None."""
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {"enforce_eager": True} | SETTINGS[setting]
    engine = LLM(
        str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=16,
        tensor_parallel_size=processes,
        kv_cache_memory_bytes=2**28,
        disable_log_stats=True,
        **options,
    )
    expected = json.loads((model / "answers.json").read_text())
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts()]
    different: list[int] = []
    cached = 0
    for _ in range(2 if setting == "cached" else 1):
        found = engine.generate(asked, greedy, use_tqdm=False)
        cached = sum(answer.num_cached_tokens or 0 for answer in found)
        both = zip(prompts(), found, expected, strict=True)
        different += [len(prompt) for prompt, own, tokens in both if list(own.outputs[0].token_ids) != tokens]
    engine.llm_engine.engine_core.shutdown()
    if different:
        return f"other tokens than generate() after prompts of {different} tokens"
    if setting == "cached" and not cached:
        return "no cached state was used"
    return None


def clean() -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--settings", default="whole,pieces,cached")
    given = parser.parse_args()
    failed = False
    for model in given.models:
        for setting in given.settings.split(","):
            start = time.monotonic()
            try:
                wrong = compare(model, setting, given.processes)
            except Exception as error:  # the other models are still compared
                wrong = f"{type(error).__name__}: {error}"
            clean()
            failed = failed or wrong is not None
            how = f"{model.name}, {setting}, {given.processes} process(es)"
            print(f"{how}: {wrong or 'equal'} ({time.monotonic() - start:.0f} s)", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
