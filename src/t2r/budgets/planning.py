"""Plans for a memory budget, and what is known about them before anything is trained."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from t2r.budgets.costs import Costs, Source, features_for, in_mib
from t2r.budgets.descent import Descent
from t2r.budgets.limited import Limited
from t2r.budgets.text import Text, evenly
from t2r.data.beginning import bos_of
from t2r.data.fingerprint import digest, of_config, of_weights
from t2r.errors import T2RError
from t2r.evaluation.generation import recall_questions, recall_sentences, repeated_sentences
from t2r.ops.stored import AS_THEY_ARE
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
    source_tokens: int | None = None
    """The longest source that is planned for. None: the model is no encoder-decoder."""
    cross_features: int = 0
    """Features of the states of cross attention. 0: it stays exact."""
    cross: int = 0
    """The bytes of cross attention, which are part of `used`."""

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
        blocks: text of the user: token ids `[blocks, context]`, or pairs for an encoder-decoder.
        context: the number of tokens that is planned for. None: those of a block.
        source: what cross attention keeps.
        text: a name of the text. What was measured with another part of the same text is used again. None: the token
            ids themselves.
        progress: whether to show progress bars.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        blocks: Tensor | Text,
        *,
        context: int | None = None,
        source: Source | None = None,
        text: str | None = None,
        progress: bool = True,
    ) -> None:
        self.model, self.tokenizer, self.progress, self.source = model, tokenizer, progress, source
        given = Text.of(blocks)
        self.context = context or given.tokens
        self.costs = Costs.of(model, self.context, source=source)
        kind = model.device.type
        self.limited = Limited(model, self.costs, given)
        self.measured = given.some(MEASURED.get(kind, MORE))
        # What is between the sentences of a question: a block begins with BOS if texts do.
        first = 0 if tokenizer is None or bos_of(tokenizer) is None else 1
        self.text = blocks[:, first:].flatten().tolist() if isinstance(blocks, Tensor) else []
        self.questions = self.ask(QUESTIONS, self.context, seed=0)
        if self.questions is not None and (able := self.limited.right(*self.questions)) < KNOWN:
            logger.info("recall: the model itself answers %.0f %% of the questions: it is not asked", 100 * able)
            self.questions = None
        self.sentences = None if tokenizer is None or self.questions is None else recall_sentences(tokenizer)
        if text is None:
            assert isinstance(blocks, Tensor), "pairs require a name"
            text = digest(blocks.tolist())
        name = digest([of_weights(model), of_config(model), kind, text])
        self.descent = Descent(self.limited, given, self.ask_for, name, progress=progress)

    def ask(self, count: int, length: int, seed: int) -> tuple[Tensor, Tensor] | None:
        """Return questions about a word that was said once, near the beginning of `length` tokens, and the choices."""
        if self.tokenizer is None or not self.text:
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
        return repeated_sentences(self.tokenizer, self.text, self.context, rows, seed=step, sentences=self.sentences)

    def plan(self, memory: int, features: int | None = None, nbits: int = AS_THEY_ARE) -> Planned:
        """Return the plan for a number of bytes.

        Args:
            features: features of the states. None: by the memory; 0: windows only.
            nbits: bits of the numbers of keys and values in windows. The descent is the same: it compares heads.
        """
        if features is None:
            features = features_for(self.model, self.context, memory, self.source)
        costs = Costs.of(self.model, self.context, features, self.source, nbits)
        costs.check(memory)
        windows, one = self.descent.windows(memory, costs), costs.one_window(memory)
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
            None if self.source is None else self.source.tokens,
            0 if self.source is None else self.source.features,
            costs.cross,
        )


def text_blocks(dataset: Any, count: int) -> Tensor:
    """Return blocks of a training set, evenly distributed over it."""
    return torch.stack([torch.as_tensor(item["input_ids"]) for item in evenly(dataset, count)])


def blocks_to_read(device: torch.device) -> int:
    return BLOCKS.get(device.type, MANY)


def told(planned: Planned) -> str:
    """Describe a plan in a line."""
    sizes = sorted(size for row in planned.plan.windows for size in row)
    counts = ", ".join(f"{sizes.count(size)} of {size:,}" for size in sorted(set(sizes)))
    states = f"states of {planned.features} features" if planned.features else "no states"
    states += "" if planned.plan.nbits == AS_THEY_ARE else f"; keys and values of {planned.plan.nbits} bits"
    line = f"{in_mib(planned.used)} of {in_mib(planned.memory)}: windows of heads {counts} tokens; {states}"
    return line if planned.source_tokens is None else f"{line}; {source_told(planned.to_dict())}"


def source_told(planned: Mapping[str, Any]) -> str:
    """Say what the cross attention of a plan (`Planned.to_dict`) keeps."""
    cross, tokens = in_mib(planned["cross"]), f"{planned['source_tokens']:,}"
    if planned["cross_features"]:
        return f"cross attention has states of {planned['cross_features']} features, {cross} for any source"
    return f"cross attention stays exact, {cross} for {tokens} source tokens"


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
