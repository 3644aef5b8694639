"""Do int8 weights make a step on a CPU faster, and what quality is lost?

    pip install --target packages --no-deps torchao
    PYTHONPATH=packages python experiments/int8.py --model smollm2 --text valid.txt --out runs/int8

Time: a step of the engine at the state of fresh rows, in one thread, on the model swapped with untrained maps, of
which the time does not depend. CPU time of this process, so that other programs disturb it little; the ways are
interleaved, and the median is reported. Quality: perplexity and KL to float32 of the model itself, not swapped, in
which all that is quantized is the same. One window at a time, because `quantize_dynamic` has one scale for all tokens
of a call.

Ways that are not installed are left out. The result is OUT/results.json and OUT/table.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from t2r.evaluation import perplexity
from t2r.evaluation.inputs import encode, read_text
from t2r.experiments.markup import markdown
from t2r.generation.engine.step import DecodeStep
from t2r.hub import auto_class, load_config, load_tokenizer
from t2r.pipelines.swap import swap_folder
from t2r.reporting import environment
from t2r.storage import write_text

logger = logging.getLogger("int8")

FIRST = "float32"
STEPS = 15
"""Timings of each way and batch."""


def plain(source: str, dtype: str = FIRST, **options: Any) -> Any:
    loader = auto_class(load_config(source))
    return loader.from_pretrained(source, dtype=getattr(torch, dtype), **options).eval()


def by_torchao(name: str, dtype: str = FIRST) -> Callable[[str], Any]:
    def load(source: str) -> Any:
        from torchao import quantization
        from transformers import TorchAoConfig

        return plain(source, dtype, quantization_config=TorchAoConfig(getattr(quantization, name)()))

    return load


def by_torch(dtype: torch.dtype, setting: str) -> Callable[[str], Any]:
    def load(source: str) -> Any:
        from torch.ao import quantization

        config = getattr(quantization, setting)
        return quantization.quantize_dynamic(plain(source), {nn.Linear: config}, dtype=dtype)

    return load


WAYS: dict[str, Callable[[str], Any]] = {
    FIRST: plain,
    "bfloat16": lambda source: plain(source, "bfloat16"),
    "torchao, weights": by_torchao("Int8WeightOnlyConfig"),
    "torchao, weights, bfloat16": by_torchao("Int8WeightOnlyConfig", "bfloat16"),
    "torchao, weights and inputs": by_torchao("Int8DynamicActivationInt8WeightConfig"),
    "quantize_dynamic, float16": by_torch(torch.float16, "float16_dynamic_qconfig"),
    "quantize_dynamic, int8": by_torch(torch.qint8, "per_channel_dynamic_qconfig"),
}
"""How a model is loaded. Of those of torchao the head, which is tied to the embeddings, is not quantized."""


def available(source: str) -> dict[str, Callable[[str], Any]]:
    """Return the ways that this machine has."""
    found = {}
    for name, load in WAYS.items():
        try:
            load(source)
        except (ImportError, AttributeError) as error:
            logger.warning("%s is left out: %s", name, error)
        else:
            found[name] = load
    return found


def times(ways: dict[str, Callable[[str], Any]], source: str, batch: int) -> dict[str, float]:
    """Return the CPU time in ms of a step by way."""
    steps = {name: DecodeStep(load(source), batch, None) for name, load in ways.items()}
    for step in steps.values():
        step.active.fill_(1)
        step.run()
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(STEPS):
        for name, step in steps.items():
            began = time.process_time()
            step.run()
            spent[name].append(1000 * (time.process_time() - began))
    return {name: median(values) for name, values in spent.items()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name of the teacher")
    parser.add_argument("--text", required=True, help="a held-out text")
    parser.add_argument("--out", type=Path, default=Path("runs/int8"))
    parser.add_argument("--windows", type=int, default=8, help="windows of 512 tokens, of which 256 are scored")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    return parser.parse_args()


def main() -> None:
    given = arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    warnings.simplefilter("ignore")  # quantize_dynamic is deprecated
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    swapped = given.out / "swapped"
    if not swapped.exists():
        swap_folder(given.model, str(swapped), dtype=FIRST, recipe="distill-lm")
    ways = available(str(swapped))
    steps = {batch: times(ways, str(swapped), batch) for batch in given.batch}
    logger.info("steps: %s", steps)

    tokenizer = load_tokenizer(given.model)
    assert tokenizer is not None
    text = encode(tokenizer, read_text(given.text, tokenizer))
    how: dict[str, Any] = {"window": 512, "stride": 256, "limit": given.windows, "batch_size": 1}
    teacher = plain(given.model)
    rows = []
    for name, load in ways.items():
        found = perplexity(load(given.model), text, teacher=teacher, **how)
        row: dict[str, Any] = {"way": name, "perplexity": found.perplexity, "kl": found.mean_kl}
        row |= {f"ms, batch {batch}": steps[batch][name] for batch in given.batch}
        rows.append(row)
        logger.info("%s", row)
    write_text(given.out / "results.json", json.dumps({"rows": rows, "machine": environment.made()}, indent=1))
    write_text(given.out / "table.md", table(rows, given.batch))


def table(rows: list[dict[str, Any]], batches: list[int]) -> str:
    first = rows[0]
    lines = []
    for row in rows:
        lost = 100 * (row["perplexity"] / first["perplexity"] - 1)
        cells = [row["way"], f"{row['perplexity']:.2f} ({lost:+.1f} %)", f"{row['kl']:.4f}"]
        keys = [f"ms, batch {batch}" for batch in batches]
        lines.append([*cells, *(f"{row[key]:.0f} ({first[key] / row[key]:.2f} times as fast)" for key in keys)])
    return markdown(["weights", "perplexity", "KL", *(f"step, batch {batch}" for batch in batches)], lines) + "\n"


if __name__ == "__main__":
    main()
