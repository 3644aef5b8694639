"""Plans for a memory budget, and what is known about them before anything is trained."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from t2r.budgets.costs import Costs, features_for, in_mib
from t2r.budgets.descent import Descent
from t2r.budgets.limited import Limited
from t2r.data.fingerprint import digest, of_weights
from t2r.errors import T2RError
from t2r.evaluation.generation import recall_questions, repeated_sentences
from t2r.plans import MemoryPlan

logger = logging.getLogger(__name__)

BLOCKS = {"cpu": 64}
MANY = 512
"""Blocks of text from which a descent draws."""
MEASURED = {"cpu": 4}
MORE = 32
"""Blocks on which a plan is measured."""
QUESTIONS = 32
"""Questions with which a plan is measured."""
ASKED = {"cpu": 1}
AT_ONCE = 4
"""Texts with questions in a step of a descent."""
KNOWN = 0.5
"""A model that answers less than this share of the questions is not asked: it would teach nothing about its heads."""


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
    context: int
    """The number of tokens that is planned for."""
    divergence: float
    """The KL divergence of its windows from the model, not trained and without states, on the text of the plan."""
    one_window: int
    """The window that all heads would have in the same memory."""
    one_window_divergence: float
    recall: float | None = None
    """The share of questions about a word at the beginning of the context that its windows answer. None: the model
    itself does not."""

    @property
    def whole_heads(self) -> int:
        """The number of heads that see the whole context."""
        return sum(size >= self.context for row in self.plan.windows for size in row)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Planner:
    """Makes plans for budgets of one model. What is measured is kept in the cache.

    Args:
        model: the base model, which is not modified.
        tokenizer: its tokenizer, for questions. None: it is not asked any.
        blocks: text of the user, token ids `[blocks, context]`.
        text: a name of the text. What was measured with another part of the same text is used again. None: the blocks
            themselves.
        progress: whether to show progress bars.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        blocks: Tensor,
        *,
        text: str | None = None,
        progress: bool = True,
    ) -> None:
        self.model, self.tokenizer, self.blocks, self.progress = model, tokenizer, blocks, progress
        self.context = blocks.shape[1]
        self.costs = Costs.of(model, self.context)
        kind = model.device.type
        self.limited = Limited(model, self.costs, blocks)
        self.measured = blocks[:: max(1, len(blocks) // MEASURED.get(kind, MORE))]
        self.text = blocks.flatten().tolist()
        self.questions = self.ask(QUESTIONS, self.context, seed=0)
        if self.questions is not None and (able := self.limited.right(*self.questions)) < KNOWN:
            logger.info("recall: the model itself answers %.0f %% of the questions: it is not asked", 100 * able)
            self.questions = None
        name = digest([of_weights(model), kind, digest(blocks.tolist()) if text is None else text])
        self.descent = Descent(self.limited, blocks, self.ask_for, name, progress=progress)

    def ask(self, count: int, length: int, seed: int) -> tuple[Tensor, Tensor] | None:
        """Return questions about a word that was said once, near the beginning of `length` tokens, and the choices."""
        if self.tokenizer is None:
            return None
        try:
            repeated_sentences(self.tokenizer, self.text, length, 1)  # raises if there is no place for them
            return recall_questions(self.tokenizer, self.text, length, count, seed=seed)
        except T2RError as error:
            logger.info("recall: %s: nothing is asked", error)
            return None

    def ask_for(self, step: int) -> tuple[Tensor, Tensor] | None:
        """Return the questions of a step of the descent, about words at all distances."""
        if self.questions is None or self.tokenizer is None:
            return None
        rows = ASKED.get(self.model.device.type, AT_ONCE)
        return repeated_sentences(self.tokenizer, self.text, self.context, rows, seed=step)

    def plan(self, memory: int, features: int | None = None) -> Planned:
        """Return the plan for a number of bytes.

        Args:
            features: features of the states. None: by the memory; 0: windows only.
        """
        if features is None:
            features = features_for(self.model, self.context, memory)
        costs = Costs.of(self.model, self.context, features)
        costs.check(memory)
        windows, one = self.descent.windows(memory, costs), self.costs.one_window(memory)
        return Planned(
            memory,
            costs.of_windows(windows),
            features,
            costs.plan(windows),
            self.context,
            self.limited.divergence(self.measured, windows),
            max(size for row in one for size in row),
            self.limited.divergence(self.measured, one),
            None if self.questions is None else self.limited.right(*self.questions, windows),
        )


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
    return f"{in_mib(planned.used)} of {in_mib(planned.memory)}: windows of heads {counts} tokens; {states}"


HEADER = (
    "memory",
    "windows: least / median / most",
    "whole",
    "features",
    "recall",
    "KL, not trained",
    "one window",
    "KL",
)


def table_row(planned: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the row of a plan (`Planned.to_dict`) in a table with `HEADER`."""
    sizes = sorted(size for row in planned["plan"]["windows"] for size in row)
    whole = sum(size >= planned["context"] for size in sizes)
    return (
        in_mib(planned["used"]),
        f"{sizes[0]:,} / {sizes[len(sizes) // 2]:,} / {sizes[-1]:,}",
        f"{whole} of {len(sizes)}",
        str(planned["features"]),
        "" if planned["recall"] is None else f"{100 * planned['recall']:.0f} %",
        f"{planned['divergence']:.4f}",
        f"{planned['one_window']:,}",
        f"{planned['one_window_divergence']:.4f}",
    )
