"""The sensitivity of each layer: the increase in loss when this layer alone is recurrent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from t2r.attention.recurrence import exact_attention, recurrent_sites
from t2r.data.progress import progress_bar
from t2r.model.logits import Readout, evaluating, logits_at_once
from t2r.tasks import Task

BLOCKS = 16
"""Blocks of text that are scored for each layer."""
ROWS = 4
"""Blocks per batch."""


def most_sensitive(
    model: PreTrainedModel,
    task: Task,
    block_size: int,
    count: int = BLOCKS,
    *,
    remember: Callable[[str, Callable[[], float]], float] = lambda name, measure: measure(),
    progress: bool = False,
) -> list[tuple[int, float]]:
    """Return pairs of a layer and its increase in loss, the most sensitive layer first.

    Call this after a transfer: the maps must be trained, and all other weights must still be the teacher's. `remember`
    saves each loss under a name, so that an interrupted scan can be resumed."""
    blocks: Any = task.dataset(block_size)
    count = min(count, len(blocks))
    chosen = [blocks[i * len(blocks) // count] for i in range(count)]
    batches = [task.collate(chosen[i : i + ROWS]) for i in range(0, len(chosen), ROWS)]
    batches = [{name: x.to(model.device) for name, x in batch.items()} for batch in batches]
    return scan_layers(model, lambda: loss_of(model, task, batches), remember=remember, progress=progress)


def scan_layers(
    model: PreTrainedModel,
    loss: Callable[[], float],
    *,
    remember: Callable[[str, Callable[[], float]], float] = lambda name, measure: measure(),
    progress: bool = False,
) -> list[tuple[int, float]]:
    """Return `most_sensitive` for any loss of the model, for example on other data."""
    layers = sorted({site.layer_idx for site in recurrent_sites(model)})
    with (
        evaluating(model),
        progress_bar("scanning layers", len(layers) + 1, "layers", shown=progress) as report,
    ):
        with exact_attention(model):
            exact = remember("exact", loss)
        report(1)
        costs = []
        for layer in layers:
            with exact_attention(model, recurrent_layers=[layer]):
                costs.append((layer, remember(str(layer), loss) - exact))
            report(1 + len(costs))
    return sorted(costs, key=lambda cost: -cost[1])


def loss_of(model: PreTrainedModel, task: Task, batches: list[dict[str, Any]]) -> float:
    """Return the mean cross entropy over all scored positions."""
    readout = Readout(model, task.inputs(batches[0]))
    total: Any = 0.0
    count: Any = 0
    for batch in batches:
        labels = task.labels(batch).flatten()
        states = readout.states(task.inputs(batch)).flatten(0, 1)
        rows = max(1, logits_at_once(states.device) // readout.out_features)  # all logits of a batch may be gigabytes
        for some, targets in zip(states.split(rows), labels.split(rows), strict=True):
            logits = readout(some).float()
            total = total + cross_entropy(logits, targets, ignore_index=-100, reduction="sum").double()
        count = count + (labels >= 0).sum()
    return float(total / count.clamp_min(1))
