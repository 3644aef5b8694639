"""Plans for a memory budget: measure the needs of heads on a text, and give every byte to the head that needs it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from t2r.budgets.allocation import Head, Needs, allocate
from t2r.budgets.costs import BEYOND, Costs, features_for, in_mib
from t2r.budgets.scan import BLOCKS, MANY, Kept, Limited, ask, measure_needs, recall_heads
from t2r.errors import T2RError
from t2r.plans import MemoryPlan

logger = logging.getLogger(__name__)

REACHES = (1, 2, 4, 8)
"""Recall is planned for the whole context; if the memory does not allow that, for a half, a quarter or an eighth."""
MOST_FOR_RECALL = 0.45
"""The largest share of the memory for heads that recall: beyond it, perplexity would pay."""


@dataclass(frozen=True)
class Planned:
    """A plan within a budget, and what is known about it."""

    memory: int
    """The budget in bytes."""
    used: int
    """The bytes of the plan."""
    features: int
    """Features of its states. 0: it has none."""
    plan: MemoryPlan
    recall_heads: tuple[Head, ...]
    """Layers and heads that see more for the sake of recall."""
    divergence: float | None = None
    """The KL divergence of its windows, not trained and without states, on the text of the scan."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Planner:
    """Makes plans for budgets of one model. The scan is done once, and kept in the cache.

    Args:
        model: the base model, which is not modified.
        tokenizer: its tokenizer.
        blocks: text of the user, token ids `[blocks, context]`.
        recall: whether heads are searched that recall what was said long ago.
        progress: whether to show progress bars.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        blocks: Tensor,
        *,
        recall: bool = True,
        progress: bool = True,
    ) -> None:
        self.model, self.tokenizer, self.blocks, self.progress = model, tokenizer, blocks, progress
        self.context = blocks.shape[1]
        self.recalls = recall
        self.costs = Costs.of(model, self.context)
        self.kept = Kept.open(model, self.costs, blocks)
        self._limited: Limited | None = None
        self._needs: Needs | None = None

    @property
    def limited(self) -> Limited:
        if self._limited is None:
            self._limited = Limited(self.model, self.costs, self.blocks)
        return self._limited

    @property
    def needs(self) -> Needs:
        if self._needs is None:
            self._needs = measure_needs(self.limited, self.kept, self.progress)
        return self._needs

    def plan(self, memory: int, features: int | None = None) -> Planned:
        """Return the plan for a number of bytes.

        Args:
            features: features of the states. None: by the memory; 0: windows only.
        """
        if features is None:
            features = features_for(self.model, self.context, memory)
        costs = Costs.of(self.model, self.context, features)
        costs.check(memory)
        windows = partial(allocate, self.needs, costs, memory)
        name = f"{memory} bytes, {features} features"
        heads = self.kept.remember(f"recall, {name}", lambda: self.find_recall(costs, memory)) if self.recalls else []
        chosen = {(layer, head): window for layer, head, window in heads}
        plan = costs.plan(windows(chosen))

        def diverges() -> float:
            self.limited.limit(dict(enumerate(plan.windows)))
            return self.limited.divergence()

        divergence = self.kept.remember(f"divergence, {name}, {len(heads)} heads", diverges)
        return Planned(memory, costs.of_plan(plan), features, plan, tuple(chosen), divergence)

    def find_recall(self, costs: Costs, memory: int) -> list[list[int]]:
        """Return layers, heads and windows for recall, as far back as the memory allows."""
        text = self.blocks.flatten().tolist()
        known = [(layer, head) for layer, head in self.kept.values.get("recall heads", [])]
        for part in REACHES:
            context = self.context // part
            window = min(context + context // BEYOND, max(layer.longest for layer in costs.layers))
            most = int(MOST_FOR_RECALL * memory / max(layer.of(window) for layer in costs.layers))
            try:
                questions = ask(self.model, self.tokenizer, text, context)
            except T2RError as error:
                logger.info("recall: %s: no head is kept for it", error)
                return []
            chosen = recall_heads(
                self.limited,
                questions,
                partial(allocate, self.needs, costs, memory),
                reach=window,
                known=known,
                most=most,
                progress=self.progress,
            )
            self.kept.values["recall heads"] = [list(head) for head in known]
            if chosen is not None:
                return [[*head, size] for head, size in chosen.items()]
        return []


def text_blocks(dataset: Any, count: int) -> Tensor:
    """Return blocks of a training set, evenly distributed over it."""
    count = min(count, len(dataset))
    if not count:
        raise T2RError("the text is shorter than one context: give more text, or a smaller --context")
    return torch.stack([torch.as_tensor(dataset[i * len(dataset) // count]["input_ids"]) for i in range(count)])


def blocks_to_read(device: torch.device) -> int:
    return BLOCKS.get(device.type, MANY)


def told(planned: Planned) -> str:
    """Describe a plan in a line."""
    sizes = sorted(size for row in planned.plan.windows for size in row)
    counts = ", ".join(f"{sizes.count(size)} of {size:,}" for size in sorted(set(sizes)))
    states = f"states of {planned.features} features" if planned.features else "no states"
    recall = f"; {len(planned.recall_heads)} heads chosen for recall" if planned.recall_heads else ""
    return f"{in_mib(planned.used)} of {in_mib(planned.memory)}: windows of heads {counts} tokens; {states}{recall}"


def table_rows(plans: Sequence[Planned]) -> list[tuple[str, ...]]:
    """Return a row for each plan: memory, smallest, median and largest window, features, recall heads, divergence."""
    rows: list[tuple[str, ...]] = []
    for each in plans:
        sizes = sorted(size for row in each.plan.windows for size in row)
        middle = sizes[len(sizes) // 2]
        kl = "" if each.divergence is None else f"{each.divergence:.4f}"
        recall = str(len(each.recall_heads))
        window = f"{sizes[0]:,} / {middle:,} / {sizes[-1]:,}"
        rows.append((in_mib(each.used), window, str(each.features), recall, kl))
    return rows
