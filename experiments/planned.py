"""Untrained models with the plan of a published record, for timing:

    python experiments/planned.py smollm2 OUT [--record smollm2-memory-gentle] [--step trained-8]
    t2r bench decode smollm2 OUT/bits-8 OUT/bits-16 --device cuda --dtype bfloat16 --batch 16 --length 8192 --no-own

OUT/bits-8 and OUT/bits-16 have the windows of the plan, with keys and values in 8 and in 16 bits, and states. The time
of a step does not depend on the weights."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import t2r
from t2r.hub import load_model, load_tokenizer
from t2r.training.recipes.recipe import load_recipe

RECORDS = Path(__file__).parent / "records"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--record", default="smollm2-memory-gentle")
    parser.add_argument("--step", default="trained-8")
    given = parser.parse_args()
    steps = json.loads((RECORDS / f"{given.record}.json").read_text())["steps"]
    planned = next(step["result"]["planned"] for step in steps if step["name"] == given.step)
    for nbits in (8, 16):
        options = dict(load_recipe("memory-lm").swap) | {"feature_size": planned["features"]}
        model = t2r.swap(load_model(given.model, dtype="float32"), **options, plan=planned["plan"] | {"nbits": nbits})
        out = given.out / f"bits-{nbits}"
        model.save_pretrained(out)
        tokenizer = load_tokenizer(given.model)
        assert tokenizer is not None
        tokenizer.save_pretrained(out)
        print(out)


if __name__ == "__main__":
    main()
