"""How long does a step of the descent of memory budgets take, and do both ways of soft windows agree?

    python experiments/descent.py --model smollm2 --text train.txt --context 2304 --out runs/descent

The steps are those of `t2r plan`, on its text and questions, from windows of a share of the context. Nothing is kept in
the cache. Each way makes the same steps from the same windows: all heads at once, as on a GPU, and head by head in
blocks of queries, as on a CPU. The result is OUT/results.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from t2r.budgets.descent import Descent
from t2r.budgets.planning import Planner, blocks_to_read
from t2r.evaluation.inputs import encode, read_text
from t2r.hub import choose_device, load_model, load_tokenizer
from t2r.ops import soft_windows
from t2r.reporting import environment
from t2r.storage import write_text

logger = logging.getLogger("descent")


def measured(descent: Descent, share: float, steps: int) -> dict[str, Any]:
    """Make steps from windows of a share of the context. Returns their seconds, and what they found."""
    device = descent.limited.model.device
    descent.logs = [x + torch.tensor(share).log2() for x in descent.longest]
    descent.value = [torch.zeros_like(x) for x in descent.longest]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds, divergences = [], []
    for number in range(steps + 1):  # the first one prepares kernels
        began = time.perf_counter()
        divergences.append(descent.step(number))  # which waits for the device
        seconds.append(time.perf_counter() - began)
        if not number:
            worth = torch.cat(descent.value).tolist()
    began = time.perf_counter()
    descent.moved([torch.zeros_like(x) for x in descent.logs], descent.costs.whole / 2)
    moving = time.perf_counter() - began
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    found = {"first": seconds[0], "step": median(seconds[1:]), "moved": moving, "GiB": memory}
    return found | {"divergences": divergences, "worth": worth}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name of the teacher")
    parser.add_argument("--text", required=True, help="a text of several contexts")
    parser.add_argument("--context", type=int, default=2304)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=8, help="timings of each way")
    parser.add_argument("--share", type=float, default=0.25, help="of the context, the windows at the beginning")
    parser.add_argument("--block", type=int, default=512, help="queries at once, head by head. 0: leave this way out")
    parser.add_argument("--out", type=Path, default=Path("runs/descent"))
    return parser.parse_args()


def main() -> None:
    given = arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    device = choose_device(given.device)
    model, tokenizer = load_model(given.model, dtype="float32", device=str(device)), load_tokenizer(given.model)
    assert tokenizer is not None
    ids = encode(tokenizer, read_text(given.text, tokenizer)).token_ids
    count = min(len(ids) // given.context, blocks_to_read(device))
    blocks = ids[: count * given.context].view(count, given.context)
    descent = Planner(model, tokenizer, blocks, progress=False).descent
    found: dict[str, Any] = {}
    ways = {"all heads": None, "by head": given.block} if given.block else {"all heads": None}
    for way, block in ways.items():
        soft_windows.BLOCK.pop(device.type, None)
        if block is not None:
            soft_windows.BLOCK[device.type] = block
        found[way] = measured(descent, given.share, given.steps)
        logger.info("%s: %s", way, {name: x for name, x in found[way].items() if name != "worth"})
    if len(found) > 1:
        first, second = (torch.tensor(each["worth"]) for each in found.values())
        found["difference of the worth"] = float((first - second).norm() / second.norm())
        logger.info("difference of the worth: %.4f of its norm", found["difference of the worth"])
    given.out.mkdir(parents=True, exist_ok=True)
    write_text(given.out / "results.json", json.dumps(found | {"machine": environment.made()}, indent=1))


if __name__ == "__main__":
    main()
