"""Averages the weights of saved models, such as the last checkpoints of a training, and saves the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from t2r.data.fingerprint import of_tokenizer
from t2r.errors import T2RError
from t2r.hub import copy_processor, load_config, load_model, load_tokenizer
from t2r.options.entrance import entrance
from t2r.storage import refuse_replacing, whole_folder

NOT_COMPARED = ("transformers_version", "t2r_version", "dtype", "name_or_path", "_name_or_path", "base_model")
"""Fields of a configuration that may differ between models that are averaged."""


@entrance()
def average(models: Sequence[str], out: str, *, overwrite: bool = False) -> None:
    """Save the mean of the weights of models, with the first one's tokenizer and dtype.

    Softmax and swapped models can be averaged, if they have the same configuration and vocabulary. The mean is computed
    in float32 and needs memory for two models and the sum.

    Args:
        models: folders or hub names, at least two.
        out: the output folder.
        overwrite: replace an existing model in `out`.

    Raises T2RError if the configurations, vocabularies or fixed random features of the models differ.
    """
    if len(models) < 2:
        raise T2RError("an average requires at least two models")
    for source in models:
        refuse_replacing(source, out)
    with whole_folder(out, overwrite=overwrite) as folder:
        first, *others = models
        tokenizer = load_tokenizer(first)
        for source in others:
            check_same(first, source)
        result = load_model(first)
        sums: dict[str, Any] = {}
        for source in others:
            add_difference(sums, result, load_model(source), source)
        with torch.no_grad():
            for name, weight in result.named_parameters():
                weight.copy_(weight.float() + sums[name] / len(models))
        result.save_pretrained(folder)
        copy_processor(first, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


@torch.no_grad()
def add_difference(sums: dict[str, Any], first: PreTrainedModel, other: PreTrainedModel, source: str) -> None:
    """Add the differences of the weights of `other` from those of `first`. Equal weights add exactly 0."""
    weights = dict(other.named_parameters())
    for name, weight in first.named_parameters():
        difference = weights[name].float() - weight.float()
        sums[name] = difference if name not in sums else sums[name].add_(difference)
    buffers = dict(other.named_buffers())
    for name, buffer in first.named_buffers():
        if not torch.equal(buffer, buffers[name]):
            raise T2RError(f"{source} has another {name} than the first model: their mean has no meaning")


def check_same(first: str, other: str) -> None:
    """Raise T2RError if two models have different configurations or vocabularies."""
    ours, theirs = (described(load_config(source).to_dict()) for source in (first, other))
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            raise T2RError(
                f"{first} and {other} have different configurations: {name} is {ours.get(name)!r} and "
                f"{theirs.get(name)!r}"
            )
    tokenizers = [load_tokenizer(source) for source in (first, other)]
    known = {of_tokenizer(tokenizer) for tokenizer in tokenizers if tokenizer is not None}
    if len(known) > 1:
        raise T2RError(f"{first} and {other} have different tokenizers: their weights belong to other tokens")


def described(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the fields that must be equal, those of a nested configuration by their path."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if name in NOT_COMPARED:
            continue
        found |= described(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
