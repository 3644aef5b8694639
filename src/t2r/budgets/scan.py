"""The needs of heads: how much the distribution of a model changes if one head sees a window only.

Words in the middle of a text can mostly be predicted from what is near, so the mean divergence on a text says little
about recall of what was said once, long ago. A few heads do that, together, and limiting one of them alone has no
effect. `recall_heads` searches for them from a plan, in which all heads are limited.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from t2r.attention.recurrence import Recurrence, exact_attention
from t2r.budgets.allocation import Head, Needs
from t2r.budgets.costs import SINKS, SMALLEST, Costs
from t2r.data.fingerprint import cache_folder, digest, of_weights
from t2r.data.progress import progress_bar
from t2r.evaluation.generation import recall_questions
from t2r.model.logits import Readout, evaluating, logits_at_once, widened
from t2r.model.swap import swap
from t2r.plans import MemoryPlan
from t2r.storage import write_text

logger = logging.getLogger(__name__)

BLOCKS = {"cpu": 4}
MANY = 32
"""Blocks of text that are read for each measurement: few on a CPU."""
AT_ONCE = 32768
"""Tokens of a batch."""
QUESTIONS = 32
"""Questions about what was said long ago."""
KNOWN = 0.5
"""A model that answers less than this share of the questions is not asked: it would teach nothing about its heads."""
ENOUGH = 0.95
"""The share of the model's own answers that is enough."""


class Limited:
    """A copy of a model, each of whose heads can be limited to a window, and the text on which it is measured."""

    def __init__(self, model: PreTrainedModel, costs: Costs, blocks: Tensor) -> None:
        self.costs = costs
        own = copy.deepcopy(model).eval().requires_grad_(False)
        if model.device.type == "cuda":
            own = own.bfloat16()
        whole = MemoryPlan(tuple((layer.longest,) * layer.heads for layer in costs.layers), SINKS, no_states(costs))
        self.model = swap(own, plan=whole)
        self.sites: list[Recurrence] = sorted(
            (m for m in self.model.modules() if isinstance(m, Recurrence) and m.window is not None),
            key=lambda site: site.layer_idx,
        )
        rows = max(1, AT_ONCE // blocks.shape[1])
        self.batches = [{"input_ids": ids.to(model.device)} for ids in blocks.split(rows)]
        self.readout = Readout(self.model, self.batches[0])
        with self.limiting(()):
            self.expected = [self.readout.states(batch) for batch in self.batches]

    def limit(self, windows: Mapping[int, Sequence[int]]) -> None:
        """Set the windows of some layers."""
        for layer, sizes in windows.items():
            self.sites[layer].window_sizes.copy_(torch.tensor(sizes))

    @contextmanager
    def limiting(self, layers: Sequence[int] | None) -> Iterator[None]:
        """Use the windows of these layers only; None: of all."""
        chosen = range(len(self.sites)) if layers is None else layers
        with evaluating(self.model), exact_attention(self.model, recurrent_layers=chosen):
            yield

    def divergence(self, layers: Sequence[int] | None = None) -> float:
        """Return the mean KL divergence of the limited model from the whole one, per token."""
        total, count = torch.zeros((), dtype=torch.float64, device=self.model.device), 0
        kl = torch.compile(kl_sum) if self.model.device.type == "cuda" else kl_sum
        with self.limiting(layers):
            for batch, expected in zip(self.batches, self.expected, strict=True):
                found = self.readout.states(batch).flatten(0, 1)
                rows = max(1, logits_at_once(found.device) // self.readout.out_features)
                for ours, theirs in zip(found.split(rows), expected.flatten(0, 1).split(rows), strict=True):
                    total += kl(self.readout(ours), self.readout(theirs))
                count += len(found)
        return float(total) / count

    def answers(self, questions: Questions, layers: Sequence[int] | None = None) -> tuple[float, float]:
        """Return the mean log probability of right answers, and the share of questions answered rightly."""
        scores, right = [], []
        with self.limiting(layers):
            for ids, choices in questions:
                logits = widened(self.readout(self.readout.states({"input_ids": ids})[:, -1:]))[:, 0]
                scores.append(logits.log_softmax(-1).gather(1, choices[:, :1])[:, 0])
                right.append(logits.gather(1, choices).argmax(1) == 0)
        return float(torch.cat(scores).mean()), float(torch.cat(right).float().mean())


Questions = list[tuple[Tensor, Tensor]]
"""Batches of token ids and of choices, the right one first."""


def no_states(costs: Costs) -> tuple[tuple[bool, ...], ...]:
    return tuple((False,) * layer.heads for layer in costs.layers)


def kl_sum(found: Tensor, expected: Tensor) -> Tensor:
    ours, theirs = (widened(x).log_softmax(-1) for x in (found, expected))
    return (theirs.exp() * (theirs - ours)).sum(dtype=torch.float32)


# --- One head at a time -------------------------------------------------------------------------------------


def window_sizes(costs: Costs, layer: int) -> list[int]:
    """Return the windows that are measured: powers of two."""
    longest = min(costs.context, costs.layers[layer].longest)
    return [size for size in (SMALLEST << i for i in range(32)) if size < longest]


def measure_needs(limited: Limited, kept: Kept, progress: bool = True) -> Needs:
    """Return the divergence for each head and window, with this head limited and nothing else.

    The rounding of the attention to windows itself is measured for each layer, and subtracted."""
    costs, known = limited.costs, kept.values
    total = sum(1 + layer.heads * len(window_sizes(costs, i)) for i, layer in enumerate(costs.layers))
    with progress_bar("measuring heads", total, "measurements", done=len(known), shown=progress) as report:
        for index, layer in enumerate(costs.layers):
            whole = [layer.longest] * layer.heads
            wanted = {f"{index}": whole}
            for head in range(layer.heads):
                for size in window_sizes(costs, index):
                    wanted[f"{index}.{head}.{size}"] = [size if i == head else x for i, x in enumerate(whole)]
            for name, sizes in wanted.items():
                if name not in known:
                    limited.limit({index: sizes})
                    known[name] = limited.divergence([index])
                    report(len(known))
            limited.limit({index: whole})
            kept.write()
    return {
        (index, head): {
            size: max(0.0, known[f"{index}.{head}.{size}"] - known[f"{index}"]) for size in window_sizes(costs, index)
        }
        for index, head in costs.heads
    }


class Kept(NamedTuple):
    """Measurements in a file, from which an interrupted scan is resumed, and which serve every budget."""

    path: Path
    values: dict[str, Any]

    @classmethod
    def open(cls, model: PreTrainedModel, costs: Costs, blocks: Tensor) -> Kept:
        shape = [(layer.heads, layer.longest) for layer in costs.layers]
        key = digest([of_weights(model), shape, costs.context, SINKS, model.device.type, digest(blocks.tolist())])
        path = cache_folder("needs") / f"{key}.json"
        return cls(path, json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps(self.values))

    def remember(self, name: str, measure: Callable[[], Any]) -> Any:
        if name not in self.values:
            self.values[name] = measure()
            self.write()
        return self.values[name]


# --- Recall, by heads together ------------------------------------------------------------------------------


def recall_heads(
    limited: Limited,
    questions: Questions,
    windows: Callable[[Mapping[Head, int]], list[list[int]]],
    *,
    reach: int,
    known: list[Head],
    most: int,
    progress: bool = True,
) -> dict[Head, int] | None:
    """Return heads that need a window of `reach` tokens, so that the model recalls what was said so long ago. None:
    there is no such choice.

    One head after another gets this window: the one with which the model gives the right answers the highest
    probability, beside the heads before. The same heads serve every budget, so those that are known are taken first.

    Args:
        windows: returns the windows of all heads, given those of some.
        known: heads that were found before, in this order. Further ones are added.
        most: the maximum number of heads.
    """
    costs = limited.costs
    _, able = limited.answers(questions, ())
    if able < KNOWN:
        logger.info("recall: the model itself answers %.0f %% of the questions, so no head is kept for it", 100 * able)
        return {}
    chosen: dict[Head, int] = {}
    with progress_bar("searching heads for recall", most * len(costs.heads), "heads", shown=progress) as report:
        for round_ in range(most + 1):
            now = windows(chosen)
            limited.limit(dict(enumerate(now)))
            score, share = limited.answers(questions)
            told = f"{len(chosen)} heads with windows of {reach:,} tokens"
            logger.info("recall: %s: %.0f %% right", told, 100 * share)
            if share >= ENOUGH * able:
                return chosen
            if round_ == most:
                return None
            if len(chosen) < len(known):
                best = known[len(chosen)]
                chosen[best] = max(reach, now[best[0]][best[1]])
                continue
            gains = {}
            for i, (layer, head) in enumerate(costs.heads):
                if now[layer][head] < min(reach, costs.layers[layer].longest):
                    limited.limit({layer: [reach if h == head else w for h, w in enumerate(now[layer])]})
                    gains[layer, head] = limited.answers(questions)[0] - score
                    limited.limit({layer: now[layer]})
                report(round_ * len(costs.heads) + i + 1)
            if not gains or max(gains.values()) <= 0:
                return None
            best = max(gains, key=gains.__getitem__)
            known.append(best)
            chosen[best] = reach
    return None


def ask(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: list[int], context: int) -> Questions:
    """Return questions about a word that was said once, near the beginning of the context."""
    ids, choices = recall_questions(tokenizer, text, context, QUESTIONS)
    rows = max(1, AT_ONCE // ids.shape[1])
    pairs = zip(ids.to(model.device).split(rows), choices.to(model.device).split(rows), strict=True)
    return list(pairs)
