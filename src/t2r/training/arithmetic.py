"""How numbers are computed while a model trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel


@contextmanager
def fast_sums(place: torch.device) -> Iterator[None]:
    """On a GPU, TF32 for the float32 products of bf16 features while it trains; measurements keep full precision."""
    before = torch.get_float32_matmul_precision()
    if place.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def without_denormals() -> Iterator[None]:
    """Numbers below 1e-38 are zero. Features that forget fade into these, and a CPU takes many times as long for each:
    the transfer of some layers was five times as slow. Threads inherit the setting when they start, so it should come
    first; those that are started keep it."""
    flushed = (torch.tensor(1e-39) * 1.0).item() == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)


def halve(model: PreTrainedModel) -> None:
    """Weights in bfloat16. Not buffers: the frequencies of rotary positions would be rounded too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
