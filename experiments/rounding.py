"""What is lost if a state is stored in half precision, with nearest and with stochastic rounding?

    python experiments/rounding.py --model smollm2 --text novels.txt --out runs/rounding

A state of the recipe memory-lm, with its initial maps and rates of decay and without decay, reads a text token by token
and is rounded after each, as a static cache does: to bfloat16 and to float16, each to the nearest number, and at random
as `t2r.ops.rounding` does. Keys, values and queries are those of some layers of the model, computed in blocks with
exact attention, and rotated to their positions in the whole text. The state has all that was read: a window, which
would keep the last tokens, is left out.

Errors are against the state in float32, the root of the mean square over the last queries of each length, and the mean
over heads. Mean: of the average of values that a query reads. Mass: of its sum of weights, which says how much the
state counts beside a window. Exact mass: of the mean, if the sum of features, one of 65 numbers, stays in float32.
The result is OUT/results.json and OUT/table.md.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from t2r.attention.recurrence import exact_attention
from t2r.evaluation.inputs import encode, read_text
from t2r.experiments.markup import markdown
from t2r.hub import load_model, load_tokenizer
from t2r.model.swap import swap
from t2r.ops import Draws
from t2r.ops.rounding import random_bits, rounded_by
from t2r.reporting import environment
from t2r.storage import write_text
from t2r.training.recipes.recipe import load_recipe

logger = logging.getLogger("rounding")

ROUNDINGS = {
    f"{str(dtype).removeprefix('torch.')}, {name}": (dtype, name)
    for dtype in (torch.bfloat16, torch.float16)
    for name in ("nearest", "stochastic")
}
QUERIES = 64


class Read(NamedTuple):
    """What the heads of all layers have of a text, by key head."""

    q: Tensor
    """Features of queries `[key_heads, time, group, features]`."""
    k: Tensor
    """Features of keys `[key_heads, time, features]`."""
    v: Tensor
    decay: Tensor
    """Rates `[key_heads, features]`."""


def rounded(state: Tensor, dtype: torch.dtype, how: str, count: int) -> Tensor:
    """Round a state after it has read so many tokens."""
    if how == "nearest":
        return state.to(dtype).float()
    (bits,) = random_bits(Draws(torch.tensor([count]), 0), [state[None]])
    assert bits is not None
    return rounded_by(state, dtype, bits[0]).float()


@torch.no_grad()
def read(given: argparse.Namespace) -> Read:
    """Compute the features of the text in some layers, in blocks with exact attention."""
    model, tokenizer = load_model(given.model, dtype="float32", device="cpu"), load_tokenizer(given.model)
    assert tokenizer is not None
    body: Any = model.get_decoder()
    body.layers = body.layers[: max(given.layers) + 1]
    model.config.num_hidden_layers = len(body.layers)
    swapped: Any = swap(model, **load_recipe("memory-lm").swap, feature_size=given.features)
    ids = encode(tokenizer, read_text(given.text, tokenizer)).token_ids[: max(given.lengths)]
    if len(ids) < max(given.lengths):
        raise SystemExit(f"the text has {len(ids):,} tokens, fewer than {max(given.lengths):,}")
    parts: dict[int, list[tuple[Tensor, ...]]] = {layer: [] for layer in given.layers}
    decays: dict[int, Tensor] = {}

    def observe(site: Any, inputs: Any, exact: Tensor) -> None:
        if site.layer_idx in parts:
            q, k = site.feature_map(inputs.q * inputs.scaling, inputs.k)
            parts[site.layer_idx].append((q[0], k[0], inputs.v[0]))
            decays[site.layer_idx] = site.feature_map.decay

    with exact_attention(swapped, observer=observe):
        for start in range(0, len(ids), given.block):
            block = ids[None, start : start + given.block]
            positions = torch.arange(start, start + block.shape[1])[None]
            swapped.get_decoder()(block, position_ids=positions, use_cache=False)
            logger.info("%d of %d tokens", start + block.shape[1], len(ids))
    found = []
    for layer in given.layers:
        q, k, v = (torch.cat(x, dim=1) for x in zip(*parts[layer], strict=True))
        q = q.unflatten(0, (k.shape[0], -1)).transpose(1, 2)
        found.append((q, k, v, decays[layer]))
    return Read(*(torch.cat(x).float().contiguous() for x in zip(*found, strict=True)))


def advance(text: Read, left: Tensor, lengths: list[int]) -> list[dict[str, Any]]:
    """Read the text with a state in float32 and in each rounding. Returns the errors at each length."""
    torch.set_num_threads(1)  # the operations are small
    heads, _, features = text.k.shape
    values = torch.cat([text.v, torch.ones_like(text.v[..., :1])], dim=-1)  # the last column is the sum of features
    states = {name: torch.zeros(heads, features, values.shape[2]) for name in ("float32", *ROUNDINGS)}
    wanted = {t for length in lengths for t in range(length - QUERIES, length)}
    answers: dict[str, list[Tensor]] = {name: [] for name in states}
    found = []
    for t in range(max(lengths)):
        new = text.k[:, t, :, None] * values[:, t, None]
        for name, state in states.items():
            torch.addcmul(new, state, left, out=state)
            if t in wanted:  # a step reads what it has computed, before it is rounded
                answers[name].append(text.q[:, t] @ state)
            if name in ROUNDINGS:
                state.copy_(rounded(state, *ROUNDINGS[name], t))
        if t + 1 in lengths:
            found += compared({name: torch.stack(x, 1) for name, x in answers.items()}, states, t + 1)
            answers = {name: [] for name in states}
            logger.info("%d tokens", t + 1)
    return found


def compared(answers: dict[str, Tensor], states: dict[str, Tensor], length: int) -> list[dict[str, Any]]:
    def mean(numerators: Tensor, masses: Tensor) -> Tensor:
        return numerators[..., :-1] / masses[..., -1:]

    def error(x: Tensor, exact: Tensor) -> float:
        x, exact = x.flatten(1), exact.flatten(1)
        return float(((x - exact).norm(dim=1) / exact.norm(dim=1)).mean())

    own, rows = answers["float32"], []
    for name in ROUNDINGS:
        x = answers[name]
        row: dict[str, Any] = {"length": length, "rounding": name}
        row |= {"mean": error(mean(x, x), mean(own, own)), "mass": error(x[..., -1:], own[..., -1:])}
        row |= {"exact mass": error(mean(x, own), mean(own, own)), "largest": float(states[name].abs().max())}
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]], lengths: list[int]) -> str:
    lines = []
    for decay in dict.fromkeys(row["decay"] for row in rows):
        for what in ("mean", "mass", "exact mass"):
            for name in ROUNDINGS:
                own = {r["length"]: r[what] for r in rows if (r["decay"], r["rounding"]) == (decay, name)}
                lines.append([decay, what, name, *(f"{100 * own[length]:.2f} %" for length in lengths)])
    return markdown(["decay", "error of the", "state", *(f"{n:,} tokens" for n in lengths)], lines) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name of a model with rotary positions")
    parser.add_argument("--text", required=True, help="a long text")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 14])
    parser.add_argument("--features", type=int, default=32)
    parser.add_argument("--block", type=int, default=2048, help="tokens that attend to each other in the model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192, 32768])
    parser.add_argument("--out", type=Path, default=Path("runs/rounding"))
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    given = arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    given.out.mkdir(parents=True, exist_ok=True)
    text = read(given)
    rates = {"none": torch.zeros_like(text.decay), "initial rates": text.decay}
    rows = []
    for name, decay in rates.items():
        rows += [{"decay": name} | row for row in advance(text, (-decay).exp()[..., None], given.lengths)]
    write_text(given.out / "results.json", json.dumps({"rows": rows, "machine": environment.made()}, indent=1))
    write_text(given.out / "table.md", table(rows, given.lengths))
    print(table(rows, given.lengths))


if __name__ == "__main__":
    main()
