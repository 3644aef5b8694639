"""Which layers need their softmax attention most? Each is made recurrent alone, and the loss it adds is its cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from t2r.attention.recurrence import exact_attention, recurrent_sites
from t2r.data.progress import progress_bar
from t2r.model.logits import Readout, evaluating
from t2r.tasks import Task

BLOCKS = 16
"""How many blocks of text are scored for each layer."""
ROWS = 4
"""How many of them at a time."""


def most_sensitive(
    model: PreTrainedModel,
    task: Task,
    block_size: int,
    count: int = BLOCKS,
    *,
    remember: Callable[[str, Callable[[], float]], float] = lambda name, measure: measure(),
    progress: bool = False,
) -> list[tuple[int, float]]:
    """Layers and the loss that making this one alone recurrent adds, the most costly first. After a transfer: the
    maps must be trained, the trunk must still be the teacher's.

    `remember` keeps each loss by a name, so that a scan that was stopped goes on where it was."""
    blocks: Any = task.dataset(block_size)
    chosen = [blocks[i * len(blocks) // count] for i in range(min(count, len(blocks)))]
    batches = [task.collate(chosen[i : i + ROWS]) for i in range(0, len(chosen), ROWS)]
    batches = [{name: x.to(model.device) for name, x in batch.items()} for batch in batches]
    layers = sorted({site.layer_idx for site in recurrent_sites(model)})
    with (
        evaluating(model),
        progress_bar("each layer is measured alone", len(layers) + 1, "layers", shown=progress) as report,
    ):
        with exact_attention(model):
            exact = remember("exact", lambda: loss_of(model, task, batches))
        report(1)
        costs = []
        for layer in layers:
            with exact_attention(model, recurrent_layers=[layer]):
                loss = remember(str(layer), lambda: loss_of(model, task, batches))
            costs.append((layer, loss - exact))
            report(1 + len(costs))
    return sorted(costs, key=lambda cost: -cost[1])


def loss_of(model: PreTrainedModel, task: Task, batches: list[dict[str, Any]]) -> float:
    """The mean cross entropy over all positions that are scored."""
    readout = Readout(model, task.inputs(batches[0]))
    total: Any = 0.0
    count: Any = 0
    for batch in batches:
        labels = task.labels(batch).flatten()
        logits = readout(readout.states(task.inputs(batch))).flatten(0, 1).float()
        total = total + cross_entropy(logits, labels, ignore_index=-100, reduction="sum").double()
        count = count + (labels >= 0).sum()
    return float(total / count.clamp_min(1))
