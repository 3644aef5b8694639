"""The memory budget of a conversion: the text on which heads are measured, and the plan."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from t2r.budgets.costs import Costs, in_mib, parse_memory
from t2r.budgets.planning import HEADER, Planned, Planner, blocks_to_read, table_row, text_blocks, told
from t2r.data.mixture import Sources
from t2r.errors import T2RError
from t2r.hub import choose_device, load_model, load_tokenizer
from t2r.model.modeling import T2RModel
from t2r.pipelines.common import Texts
from t2r.tasks import LanguageModeling, Task
from t2r.tasks.base import max_positions

logger = logging.getLogger(__name__)

CONTEXT = 2048
"""The largest context, if none is given."""


class MemoryBudget:
    """A number of bytes for each sequence, and the context for which they are planned."""

    def __init__(self, memory: str | int, context: int | None = None) -> None:
        self.memory, self.context = parse_memory(memory), context
        if context is not None and (type(context) is not int or context < 32):
            raise T2RError(f"context must be a whole number of tokens, at least 32; got {context!r}")

    def context_of(self, model: PreTrainedModel) -> int:
        positions = max_positions(model)
        if self.context is None:
            return CONTEXT if positions is None else min(CONTEXT, positions)
        if positions is not None and self.context > positions:
            raise T2RError(f"a context of {self.context:,} tokens is longer than the model's {positions:,} positions")
        return self.context

    def check(self, model: PreTrainedModel, texts: Texts, softmax_layers: Any) -> None:
        """Raise T2RError, before anything is measured, if there can be no plan."""
        if isinstance(model, T2RModel):
            raise T2RError("a conversion that is continued keeps its memory: do not give memory")
        if texts.translates:
            raise T2RError("memory is for language models: a translation has a source of fixed length")
        if softmax_layers is not None:
            raise T2RError("memory decides what each head keeps: do not give softmax_layers too")
        Costs.of(model, self.context_of(model)).check(self.memory)

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
        context = self.context_of(model)
        task.read()
        if not task.tokens:
            raise T2RError("memory is planned on a text: give one (--train FILE), also if the teacher writes more")
        blocks = text_blocks(task.dataset(context), blocks_to_read(model.device))
        planner = Planner(model, tokenizer, blocks, text=task.text_key, progress=progress)
        logger.info(
            "planning a memory of %s for %s tokens, whose keys and values need %s",
            in_mib(self.memory),
            f"{context:,}",
            in_mib(planner.costs.whole),
        )
        planned = planner.plan(self.memory, swap_options.get("feature_size") if trains else 0)
        del planner
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # training shapes its memory in another way, and other processes may need it
        logger.info("plan: %s", told(planned))
        return planned


def plan_memory(
    model: str | PreTrainedModel,
    memory: Sequence[str | int],
    *,
    train: Sources,
    tokenizer: PreTrainedTokenizerBase | None = None,
    context: int | None = None,
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
        train: text, as for `convert`.
        context: the number of tokens that windows are planned for. None: the positions, at most 2,048.
        states: plan states too, which have to be trained. Otherwise: windows only.
    """
    budgets = [MemoryBudget(each, context) for each in memory]
    texts, place = Texts(train), choose_device(device)
    if isinstance(model, str):
        hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        base = load_model(model, dtype="float32", device=str(place), **hub)
        tokenizer = tokenizer or load_tokenizer(model, **hub)
    else:
        base = model
    if tokenizer is None:
        raise T2RError("the model has no tokenizer: give one")
    for budget in budgets:
        budget.check(base, texts, None)
    task = LanguageModeling(tokenizer, train, hold_out=True, longest=budgets[0].context_of(base), progress=progress)
    task.check(base, [budgets[0].context_of(base)])
    return [budget.plan(base, tokenizer, task, {}, trains=states, progress=progress) for budget in budgets]


def plan_table(found: Sequence[Planned]) -> Table:
    """Return a table with a row for each plan."""
    table = Table()
    for name in HEADER:
        table.add_column(name, justify="right")
    for each in found:
        table.add_row(*table_row(each.to_dict()))
    return table
