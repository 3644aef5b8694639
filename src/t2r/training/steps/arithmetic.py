"""Numerical settings for training: TF32, denormals, kernels of masked attention, and bfloat16 weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel


@contextmanager
def fast_sums(place: torch.device) -> Iterator[None]:
    """Use TF32 for float32 matrix products on a GPU, for training. Evaluation keeps full precision."""
    before = torch.get_float32_matmul_precision()
    if place.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def without_denormals() -> Iterator[None]:
    """Flush denormals (below 1e-38) to zero. Decaying features produce them, and they are slow on a CPU: transfer of
    some layers took five times as long.

    Threads inherit the setting when they start, so enter this context before any are started; those keep it."""
    flushed = (torch.tensor(1e-39) * 1.0).item() == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)


@contextmanager
def sound_gradients() -> Iterator[None]:
    """Do not use cuDNN's softmax attention. With a mask, and lengths such as 64 or 192, its gradients are NaN if all
    scores of a query are far below zero (torch 2.11 to 2.13 on H100 and H200, pytorch/pytorch#196678)."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def halve(model: PreTrainedModel) -> None:
    """Convert the parameters to bfloat16, but not the buffers: rotary frequencies must not be rounded."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
