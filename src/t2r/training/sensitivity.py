"""Which layers need their softmax attention most? Swap each alone, and see what it costs."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate
from transformers import PreTrainedModel

from t2r.attention.recurrence import exact_attention, recurrent_sites

BLOCKS = 16
"""How many blocks of text are scored for each layer."""


@torch.no_grad()
def most_sensitive(model: PreTrainedModel, blocks: Any, count: int = BLOCKS) -> list[tuple[int, float]]:
    """Layers and the loss that making this one alone recurrent adds, the most costly first. After a transfer: the
    maps must be trained, the trunk must still be the teacher's."""
    training = model.training
    model.eval()
    batch = default_collate([blocks[i * len(blocks) // count] for i in range(min(count, len(blocks)))])
    batch = {name: x.to(model.device) for name, x in batch.items()}
    with exact_attention(model):
        exact = loss_of(model, batch)
    costs = []
    for layer in dict.fromkeys(site.layer_idx for site in recurrent_sites(model)):
        with exact_attention(model, recurrent_layers=[layer]):
            costs.append((layer, loss_of(model, batch) - exact))
    model.train(training)
    return sorted(costs, key=lambda cost: -cost[1])


def loss_of(model: PreTrainedModel, batch: dict[str, Any]) -> float:
    """A mean over all tokens that are to be learned from."""
    total, count = 0.0, 0
    for start in range(0, len(batch["input_ids"]), 4):
        rows = {name: x[start : start + 4] for name, x in batch.items()}
        labels = rows.pop("labels")[:, 1:].flatten()
        logits = model(**rows, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        total += cross_entropy(logits, labels, ignore_index=-100, reduction="sum").item()
        count += int((labels >= 0).sum())
    return total / max(1, count)
