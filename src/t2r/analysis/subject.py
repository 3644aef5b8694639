"""The models of an analysis. Their attention is observed in every decoder layer."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from t2r.attention.observation import Observed, observing
from t2r.attention.recurrence import exact_attention
from t2r.errors import T2RError
from t2r.hub import load_model
from t2r.model import proof
from t2r.model.logits import evaluating
from t2r.model.modeling import T2RModel
from t2r.model.swap import swap


class Place(NamedTuple):
    """One attention of the decoder."""

    layer: int
    kind: str
    """`causal` or `cross`."""


class Reading(NamedTuple):
    """What is observed while a model reads a batch."""

    attention: dict[Place, Observed]
    """The attention inputs of each decoder layer, first layer first."""
    nll: Tensor | None
    """The negative log likelihood of all tokens but the first of each row, `[batch, time - 1]`. None for
    encoder-decoders."""


class Subject:
    """A model whose attention can be observed.

    An unmodified transformer is swapped in memory and computes exact attention in its sites, so that the queries and
    keys of every family are available. Its outputs are those of the transformer.

    Args:
        source: a folder, a name on the Hub, or a model object. An object is not modified.
    """

    def __init__(self, source: str | Path | PreTrainedModel, dtype: str, device: str) -> None:
        given = isinstance(source, PreTrainedModel)
        self.name = type(source).__name__ if given else str(source)
        model: Any = (
            source if isinstance(source, PreTrainedModel) else load_model(str(source), dtype=dtype, device=device)
        )
        self.is_transformer = not isinstance(model, T2RModel)
        if self.is_transformer:
            with _without_notices():  # about the swap, which computes nothing here
                model = swap(copy.deepcopy(model) if given else model, feature_map="elu")
        self.model = model
        self.places = {
            id(site.module): Place(site.layer, "cross" if site.cross else "causal")
            for site in model.t2r_family.sites(model)
        }

    @contextmanager
    def reading(self) -> Iterator[PreTrainedModel]:
        """Yield the model in evaluation mode. A transformer computes its own softmax attention."""
        exact = exact_attention(self.model) if self.is_transformer else nullcontext()
        with evaluating(self.model), exact:
            yield self.model

    def observe(self, inputs: Mapping[str, Tensor]) -> Reading:
        """Run the model once, and return its attention and its scores."""
        found: dict[Place, Observed] = {}

        def note(module: nn.Module, seen: Observed) -> None:
            if (place := self.places.get(id(module))) is not None:  # None: an encoder layer
                found[place] = seen

        with self.reading() as model, observing(note):
            inputs = {name: x.to(model.device) for name, x in inputs.items()}
            out = model(**inputs, use_cache=False)
            nll = None if model.config.is_encoder_decoder else _nll(out.logits, inputs["input_ids"])
        if missing := [place for place in self.places.values() if place not in found]:
            raise T2RError(
                f"the attention of {self.name} cannot be observed in layer {missing[0].layer} ({missing[0].kind}): "
                "its forward does not call the attention of its decoder layers"
            )
        return Reading(dict(sorted(found.items())), nll)


def _nll(logits: Tensor, input_ids: Tensor) -> Tensor:
    """Score one row at a time: in float32, logits are large."""
    rows = zip(logits[:, :-1], input_ids[:, 1:].to(logits.device), strict=True)
    return torch.stack([cross_entropy(row.float(), targets, reduction="none") for row, targets in rows])


@contextmanager
def _without_notices() -> Iterator[None]:
    logger = proof.logger
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
