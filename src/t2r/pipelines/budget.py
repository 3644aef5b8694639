"""The memory budget of a conversion: the text on which heads are measured, and the plan."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from t2r.budgets.costs import FEATURES, Costs, Source, features_for, in_mib, parse_memory
from t2r.budgets.planning import (
    HEADER,
    Planned,
    Planner,
    blocks_to_read,
    source_told,
    table_row,
    text_blocks,
    told,
)
from t2r.budgets.text import Text
from t2r.capacity import human
from t2r.data.languages import set_languages
from t2r.data.mixture import Sources
from t2r.data.parallel.lines import parse_pairs
from t2r.errors import T2RError
from t2r.hub import choose_device, load_model, load_tokenizer
from t2r.model.modeling import T2RModel
from t2r.ops.stored import EIGHT
from t2r.options import CAUSAL, CROSS, RunOptions, SwapOptions
from t2r.options.entrance import entrance
from t2r.pipelines.common import Texts
from t2r.plans import check_nbits
from t2r.surgery.adapters import repaired
from t2r.tasks import LanguageModeling, Task, Translation
from t2r.tasks.base import max_positions
from t2r.tasks.translation import TEACHER
from t2r.training.planning.plan import over
from t2r.training.recipes.recipe import default_recipe, load_recipe
from t2r.training.sessions.session import caching

logger = logging.getLogger(__name__)

CONTEXT = 2048
"""The largest context, if none is given."""
LEAST = 32
"""The smallest context."""
PAIRS = 1024
"""Tokens of the blocks of pairs on which an encoder-decoder is measured."""
CROSS_FEATURES = 32
"""Features of the states of cross attention, if neither the user nor the recipe says."""


class MemoryBudget:
    """A number of bytes for each sequence, and what is planned for: the context, and of an encoder-decoder the source.

    The defaults of an encoder-decoder are the longest target and source of the training text."""

    def __init__(
        self, memory: str | int, context: int | None = None, source_tokens: int | None = None, nbits: int | None = None
    ) -> None:
        self.memory, self.context, self.source_tokens = parse_memory(memory), context, source_tokens
        self.nbits = EIGHT if nbits is None else nbits
        check_nbits(self.nbits)
        if context is not None and (type(context) is not int or context < LEAST):
            raise T2RError(f"context must be a whole number of tokens, at least {LEAST}; got {context!r}")
        if source_tokens is not None and (type(source_tokens) is not int or source_tokens < 1):
            raise T2RError(f"source_tokens must be a whole number, at least 1; got {source_tokens!r}")

    def context_of(self, model: PreTrainedModel) -> int:
        positions = max_positions(model)
        if self.context is None:
            return CONTEXT if positions is None else min(CONTEXT, positions)
        if positions is not None and self.context > positions:
            raise T2RError(f"a context of {self.context:,} tokens is longer than the model's {positions:,} positions")
        return self.context

    def check(
        self,
        model: PreTrainedModel,
        texts: Texts,
        softmax_layers: Any,
        swap_options: dict[str, Any],
        *,
        trains: bool = True,
    ) -> None:
        """Raise T2RError, before anything is measured, if there can be no plan."""
        if isinstance(model, T2RModel):
            raise T2RError("a conversion that is continued keeps its memory: do not give memory")
        if softmax_layers is not None:
            raise T2RError("memory decides what each head keeps: do not give softmax_layers too")
        context = self.context_of(model)
        if not model.config.is_encoder_decoder:
            if self.source_tokens is not None:
                raise T2RError("source_tokens are of an encoder-decoder: a language model has a context only")
            Costs.of(model, context, nbits=self.nbits).check(self.memory)
            self.check_states(model, context, swap_options.get("feature_size") if trains else 0)
            return
        if swap_options.get("recurrent") == CROSS:
            raise T2RError("memory is of causal attention: give recurrent=causal or both, not cross")
        source = source_of(swap_options, self.source_tokens or 1)
        if source.features and not trains:
            raise T2RError("states of cross attention must be trained: give another recipe, or recurrent=causal")
        if all(pair.target == TEACHER for pair in parse_pairs(texts.source, texts.target, for_all=(TEACHER,))):
            raise T2RError("memory is planned on pairs: give targets (--tgt FILE), also if the teacher writes more")
        positions = max_positions(model)
        if self.source_tokens is not None and positions is not None and self.source_tokens > positions:
            raise T2RError(f"{self.source_tokens:,} source tokens are more than the model's {positions:,} positions")
        # What is not known before the text is read is as small as possible.
        costs = Costs.of(model, context, source=source, nbits=self.nbits)
        if self.memory < costs.least or (self.context and self.source_tokens):
            costs.check(self.memory)

    def check_states(self, model: PreTrainedModel, context: int, features: int | None) -> None:
        """Raise T2RError for a budget that is enough for windows, but not for states too."""
        features = features_for(model, context, self.memory) if features is None else features
        costs = Costs.of(model, context, features, nbits=self.nbits)
        if self.memory < costs.least:
            raise T2RError(
                f"a memory of {human(self.memory)} is not enough for states of {features} features: with the smallest "
                f"windows they need {human(costs.least)}. Plan windows only (--recipe none, or --no-states of t2r plan)"
                f"{'' if features == min(FEATURES) else ', or give a smaller --feature-size'}"
            )

    def settle(self, model: PreTrainedModel, task: Task, swap_options: dict[str, Any]) -> tuple[int, Source | None]:
        """Return the context, and what cross attention keeps of a source, once the text is read."""
        if not isinstance(task, Translation):
            return self.context_of(model), None
        sources, targets = task.longest_sides(PAIRS)
        context = self.context_of(model) if self.context else max(LEAST, min(targets, self.context_of(model)))
        source = source_of(swap_options, self.source_tokens or sources)
        Costs.of(model, context, source=source, nbits=self.nbits).check(self.memory)
        return context, source

    def plan(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        swap_options: dict[str, Any],
        *,
        trains: bool,
        progress: bool,
    ) -> Planned:
        """Measure the heads on the training text, or take what was measured before, and return the plan.

        Args:
            trains: the model will be trained, so it can have states.
        """
        task.read()
        if not task.tokens:
            raise T2RError("memory is planned on a text: give one (--train FILE), also if the teacher writes more")
        context, source = self.settle(model, task, swap_options)
        if source is None and task.tokens < context:
            raise T2RError(
                f"the text has {task.tokens:,} tokens, less than the {context:,} that are planned for: give more text "
                "or a smaller context"
            )
        count = blocks_to_read(model.device)
        blocks = text_blocks(task.dataset(context), count) if source is None else Text.of_task(task, PAIRS, count)
        planner = Planner(
            model, tokenizer, blocks, context=context, source=source, text=task.text_key, progress=progress
        )
        logger.info(
            "planning a memory of %s for %s tokens, whose keys and values need %s",
            in_mib(self.memory),
            f"{context:,}" if source is None else f"{context:,} target and {source.tokens:,} source",
            in_mib(planner.costs.whole),
        )
        planned = planner.plan(self.memory, swap_options.get("feature_size") if trains else 0, self.nbits)
        del planner
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # training shapes its memory in another way, and other processes may need it
        logger.info("plan: %s", told(planned))
        return planned


def source_of(swap_options: dict[str, Any], tokens: int) -> Source:
    """Return what cross attention keeps of a source by the options of a swap: everything, or states."""
    if swap_options.get("recurrent", SwapOptions.recurrent) == CAUSAL:
        return Source(tokens)
    features = swap_options.get("cross_feature_size") or swap_options.get("feature_size") or CROSS_FEATURES
    return Source(tokens, features)


@entrance(RunOptions, SwapOptions)
def plan_memory(
    model: str | Path | PreTrainedModel,
    memory: Sequence[str | int],
    *,
    train: Sources | None = None,
    source: Sources | None = None,
    target: Sources | None = None,
    source_language: str | None = None,
    target_language: str | None = None,
    join: int = 1,
    tokenizer: PreTrainedTokenizerBase | None = None,
    context: int | None = None,
    source_tokens: int | None = None,
    nbits: int | None = None,
    recurrent: str = SwapOptions.recurrent,
    states: bool = True,
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> list[Planned]:
    """Return a plan for each budget. The heads of the model are measured once, on the text that is given.

    Args:
        model: a folder, a hub name, or a model, which is not modified; a model requires `tokenizer`.
        memory: budgets, each in bytes or for example `4MiB`.
        train: text, as for `convert`; for an encoder-decoder, `source` and `target`.
        context: the number of tokens that windows are planned for. None: the positions, at most 2,048; of an
            encoder-decoder, the longest target of the text.
        source_tokens: the tokens of a source whose keys and values count. None: those of the longest source.
        nbits: bits of the keys and values in windows: 8, with a scale for each, so that windows are almost twice as
            long, or 16, as they are. None: 8.
        recurrent: `both` for states of the source too, instead of its keys and values.
        states: plan states too, which have to be trained. Otherwise: windows only.
    """
    if not memory:
        raise T2RError("memory has no budget: give at least one, for example 8MiB")
    budgets = [MemoryBudget(each, context, source_tokens, nbits) for each in memory]
    texts, place = Texts(train, source=source, target=target), choose_device(device)
    if isinstance(model, str | Path):
        hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        base = load_model(str(model), dtype="float32", device=str(place), **hub)
        tokenizer = tokenizer or load_tokenizer(model, **hub)
    else:
        base = repaired(model)
    if tokenizer is None:
        raise T2RError("the model has no tokenizer: give one")
    check_kind(base, texts)
    if not texts.translates and (join != 1 or source_language or target_language or recurrent != SwapOptions.recurrent):
        raise T2RError("join, recurrent and languages are for parallel text: give --src and --tgt, or leave them out")
    swap_options: dict[str, Any] = {}
    task: Task
    if texts.translates:
        swap_options = over(load_recipe(default_recipe(True, memory=True)).swap, {"recurrent": recurrent})
        set_languages(base, tokenizer, source_language, target_language)
        task = Translation(tokenizer, source, target, join=join, progress=progress, caching=caching)
    elif train is None:
        raise T2RError("memory is planned on a text: give one (--train FILE)")
    else:
        longest = budgets[0].context_of(base)
        how: dict[str, Any] = {"hold_out": True, "longest": longest, "progress": progress, "caching": caching}
        task = LanguageModeling(tokenizer, train, **how)
    for budget in budgets:
        budget.check(base, texts, None, swap_options, trains=states or texts.translates)
    task.check(base, [PAIRS if texts.translates else budgets[0].context_of(base)])
    return [budget.plan(base, tokenizer, task, swap_options, trains=states, progress=progress) for budget in budgets]


def check_kind(model: PreTrainedModel, texts: Texts) -> None:
    """Raise T2RError if the text is not that of the model."""
    if model.config.is_encoder_decoder and not texts.translates:
        raise T2RError(f"{model.config.model_type} is an encoder-decoder: give it parallel text (--src, --tgt)")
    if texts.translates and not model.config.is_encoder_decoder:
        raise T2RError(f"{model.config.model_type} is a language model: give it text (--train), not pairs")


def plan_table(found: Sequence[Planned]) -> Table:
    """Return a table with a row for each plan."""
    table = Table()
    for name in HEADER:
        table.add_column(name, justify="right")
    for each in found:
        table.add_row(*table_row(each.to_dict()))
    return table


def plan_notes(found: Sequence[Planned]) -> list[str]:
    """Say what the cross attention of the plans keeps, in one line if it is the same in all."""
    return list(dict.fromkeys(source_told(each.to_dict()) for each in found if each.source_tokens is not None))
