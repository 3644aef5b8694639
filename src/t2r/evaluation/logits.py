"""Logits a slice of positions at a time: with a vocabulary of 50,000 they are the largest tensor by far."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from t2r.errors import T2RError
from t2r.surgery.adapters import family_of

AT_ONCE = 1 << 25
"""How many logits a slice may hold: 128 MiB of float32."""


def logits_by_slice(model: PreTrainedModel, input_ids: Tensor, first: int, last: int) -> Iterator[Tensor]:
    """The logits of positions `first` to `last` (exclusive), in float32 and in slices that are never large.

    The body of the model runs once, and what enters its head is kept. For each slice the model is then called
    on one token, and in place of that token's hidden state its head is given the slice. That token costs next
    to nothing, and what a family does to its logits afterwards, such as scaling or capping, is done as the
    family does it (to each position by itself, in all families that we know). A model without a separate head
    returns its logits whole, and they are cut afterwards.
    """
    hidden: list[Tensor] = []

    def keep(states: Tensor) -> Tensor:
        hidden.append(states)
        return states[:, -1:]

    with _before_head(model, keep, input_ids.shape):
        logits = _forward(model, input_ids)
    size = max(1, AT_ONCE // (len(input_ids) * logits.shape[-1]))
    if not hidden:
        for piece in logits[:, first:last].split(size, dim=1):
            yield piece.float()
        return
    for states in hidden[0][:, first:last].split(size, dim=1):
        token = input_ids[:, :1]
        # The hook is gone before we yield: another slicing of the same model may be under way.
        with _before_head(model, partial(_instead, states), token.shape):
            logits = _forward(model, token)
        yield logits.float()


def _instead(states: Tensor, _: Tensor) -> Tensor:
    return states


def _forward(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=input_ids, use_cache=False).logits
    return logits


@contextmanager
def _before_head(model: PreTrainedModel, function: Callable[[Tensor], Tensor], shape: torch.Size) -> Iterator[None]:
    """Have what enters the head pass through `function`, if it is a hidden state for each token."""

    def hook(head: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if args and isinstance(args[0], Tensor) and args[0].shape[:-1] == shape:
            return (function(args[0]), *args[1:])
        return None

    head = model.get_output_embeddings()
    handle = None if head is None else head.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


@contextmanager
def evaluating(*models: PreTrainedModel | None) -> Iterator[None]:
    """No gradients and no dropout; afterwards each model is as it was.

    Not inference_mode: a table of positions that a model makes at its first use would then be one that it can
    never train with, and evaluation is done in the middle of training too.
    """
    were = [(model, model.training) for model in models if model is not None]
    try:
        for model, _ in were:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for model, training in were:
            model.train(training)


def check_positions(model: PreTrainedModel, length: int) -> None:
    """A text longer than the positions that were learned is an index error on a CPU, and worse on a GPU."""
    try:
        limit = family_of(model).max_positions(model)
    except T2RError:  # a family that we do not know: its own forward will say
        return
    if limit is not None and length > limit:
        raise T2RError(f"this {model.config.model_type} model has learned {limit} positions, and {length} are needed")
