"""What does a state make of positions that it was not trained on? Single heads of a model, with their own tensors.

    python experiments/far_layers.py --model smollm2 --data texts --layer 8 --head 0

Queries, keys and values of one layer are taken from long texts, and kept in OUT. A state of a key-value head beside a
window learns what the window misses, as in the transfer of `memory-lm`, on blocks of a quarter of the texts, with one
block for each step, in three ways: all blocks start at position 0; all at a random place; every second one. Then the
error of window and state, relative to that of the window alone, is measured on other texts: in blocks of a quarter at
several places, and by eighths of whole texts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

import t2r
from t2r.attention.recurrence import Inputs, Recurrence, recurrent_sites
from t2r.evaluation.inputs import read_text
from t2r.experiments.data import prepared
from t2r.experiments.markup import markdown
from t2r.hub import load_config, load_model, load_tokenizer
from t2r.plans import MemoryPlan
from t2r.training.recipes.recipe import load_recipe
from t2r.training.steps.objectives import site_error
from t2r.training.steps.order import Order

TEXT, BLOCK = 8192, 2048
TRAIN, HELD_OUT = ("wiki/enwiki2018-core", 6), (("novels/valid", 1), ("wiki/enwiki2014-later", 1))
"""Texts, and how many pieces of `TEXT` tokens are read of each."""
FEATURES, RATE, WARM_UP = 32, 1e-2, 20
WAYS = {"start": "all blocks start at 0", "moved": "all moved", "second": "every second one moved"}


class Head(NamedTuple):
    """The tensors of one key-value head in a text, before the rotation, `[1, heads, time, size]`."""

    q: Tensor
    k: Tensor
    v: Tensor

    def part(self, start: int, size: int) -> Head:
        return Head(*(x[:, :, start : start + size] for x in self))


def tensors(name: str, layer: int, data: Path, out: Path) -> list[list[dict[str, Tensor]]]:
    """Return the outputs of the projections of a layer, for the texts of the training and for the others."""
    file = out / f"layer-{layer}.safetensors"
    if not file.is_file():
        model, tokenizer = load_model(name, dtype="float32", device="cpu"), load_tokenizer(name)
        assert tokenizer is not None
        body: Any = model.base_model
        body.layers = body.layers[: layer + 1]
        store: dict[str, Tensor] = {}
        for part in "qkv":
            projection = getattr(body.layers[layer].self_attn, f"{part}_proj")
            projection.register_forward_hook(lambda m, i, o, part=part: store.__setitem__(part, o[0].half()))
        made: dict[str, Tensor] = {}
        for of, texts in enumerate(((TRAIN,), HELD_OUT)):
            rows = [row for text in texts for row in pieces(tokenizer, prepared(text[0], data, out / "texts"), text[1])]
            for index, row in enumerate(rows):
                with torch.no_grad():
                    body(input_ids=row[None], use_cache=False)
                made |= {f"{of}.{index}.{part}": x for part, x in store.items()}
        out.mkdir(parents=True, exist_ok=True)
        save_file(made, file)
    read: tuple[dict[int, dict[str, Tensor]], ...] = ({}, {})
    for key, x in load_file(file).items():
        number, place, part = key.split(".")
        read[int(number)].setdefault(int(place), {})[part] = x
    return [[rows[place] for place in sorted(rows)] for rows in read]


def pieces(tokenizer: Any, file: Path, count: int) -> Tensor:
    """Return the beginning of a text as pieces."""
    text = read_text(str(file), tokenizer)[: 10 * count * TEXT]
    return torch.tensor(tokenizer(text)["input_ids"][: count * TEXT]).view(count, TEXT)


def exact(head: Head, rotated: tuple[Tensor, Tensor]) -> Tensor:
    q, k = rotated
    return scaled_dot_product_attention(q, k.expand_as(q), head.v.expand_as(q), is_causal=True)


class Trial:
    """One head of a layer."""

    def __init__(self, name: str, layer: int, head: int, window: int, data: Path, out: Path) -> None:
        config: Any = load_config(name)
        groups = config.num_attention_heads // config.num_key_value_heads
        size = config.hidden_size // config.num_attention_heads

        def of_head(read: dict[str, Tensor]) -> Head:
            q, k, v = (read[part].float().unflatten(-1, (-1, size)).transpose(0, 1)[None] for part in "qkv")
            return Head(q[:, head * groups : (head + 1) * groups], k[:, head : head + 1], v[:, head : head + 1])

        self.train, self.test = ([of_head(read) for read in part] for part in tensors(name, layer, data, out))
        changed = {"num_hidden_layers": 1, "vocab_size": 64, "num_key_value_heads": 1, "head_dim": size}
        config.update(changed | {"num_attention_heads": groups, "hidden_size": groups * size})
        self.config, self.plan = config, MemoryPlan(((window,),), 4)

    def site(self) -> Recurrence:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(self.config).float()
        self.rotary = model.base_model.rotary_emb
        model = t2r.swap(model, **load_recipe("memory-lm").swap, feature_size=FEATURES, plan=self.plan)
        return recurrent_sites(model)[0]

    def rotated(self, head: Head, start: int) -> tuple[Tensor, Tensor]:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        cos, sin = self.rotary(head.q, start + torch.arange(head.q.shape[2])[None])
        return apply_rotary_pos_emb(head.q, head.k, cos, sin)

    def trained(self, way: str, steps: int) -> Recurrence:
        """Train the map of a head as the transfer of a conversion does."""
        site = self.site()
        paces, parameters = site.feature_map.paces(), list(site.feature_map.parameters())
        groups = [{"params": [p], "lr": RATE * paces.get(p, 1.0)} for p in parameters]
        optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.95), weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1, (step + 1) / WARM_UP) * (1 - step / steps)
        )
        drawn, order = torch.Generator().manual_seed(1), Order([0], 2 * steps, 0, TEXT - BLOCK)
        for step in range(steps):
            text, start = (int(torch.randint(n, (), generator=drawn)) for n in (len(self.train), TEXT - BLOCK + 1))
            head = self.train[text].part(start, BLOCK)
            place = {"start": 0, "moved": 2 * step + 1, "second": step}[way]  # at odd places, an order has offsets
            with torch.no_grad():
                target = exact(head, self.rotated(head, 0))
            q, k = self.rotated(head, order.offset(place))
            loss = site_error(site, Inputs(q, k, head.v, None, q.shape[-1] ** -0.5), target)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
        return site

    @torch.no_grad()
    def errors(self, site: Recurrence, start: int, size: int, parts: int) -> list[float]:
        """Return the relative errors by parts of the texts, whose first position is `start`."""
        found = []
        for text in self.test:
            head = text.part(0, size)
            q, k = self.rotated(head, start)
            inputs = Inputs(q, k, head.v, None, q.shape[-1] ** -0.5)
            target, near = exact(head, self.rotated(head, 0)), site.imitate_window(inputs)
            assert near is not None
            error, alone = (
                (x - target).square().sum(-1).unflatten(-1, (parts, -1)).mean(-1) for x in (site.imitate(inputs), near)
            )
            found.append((error / alone.clamp_min(1e-12)).mean((0, 1)))
        return torch.stack(found).mean(0).tolist()


def row(trial: Trial, site: Recurrence) -> list[str]:
    blocks = [trial.errors(site, start, BLOCK, 1) for start in range(0, TEXT, BLOCK)]
    return [f"{x:.2f}" for x in [*(x for part in blocks for x in part), *trial.errors(site, 0, TEXT, 8)]]


def header() -> list[str]:
    blocks = [f"a block from {start:,}" for start in range(0, TEXT, BLOCK)]
    return ["", *blocks, *(f"to {math.ceil(TEXT * (i + 1) / 8):,}" for i in range(8))]


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model", required=True, help="the folder of a model of the family llama, with 8,192 positions"
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder of the texts, as for t2r reproduce")
    parser.add_argument("--out", type=Path, default=Path("runs/far-layers"))
    parser.add_argument("--layer", type=int, default=8)
    parser.add_argument("--head", type=int, default=0)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    own = parser.parse_args(given)
    trial, rows = Trial(own.model, own.layer, own.head, own.window, own.data, own.out), []
    for way in own.ways:
        rows.append([WAYS[way], *row(trial, trial.trained(way, own.steps))])
        print(markdown(header(), rows), flush=True)


if __name__ == "__main__":
    main()
