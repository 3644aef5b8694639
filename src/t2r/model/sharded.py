"""Loading of models whose weights are divided among processes: swapped models and their teachers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from t2r import compat
from t2r.attention.recurrence import recurrent_sites
from t2r.surgery.adapters import family_of


class ShardedByLayer(compat.Sharded):
    """Mixin of a model class: each layer gathers its weights while it runs, and the root gathers all others.

    The feature maps are not divided. A transfer trains them alone: its backward pass enters no layer, so that a layer
    would not gather them again. They are small beside the other weights."""

    def layer_names(self) -> list[str]:
        model: Any = self
        family = family_of(model)
        layers = {id(layer) for layer in (*family.encoder_layers(model), *family.decoder_layers(model))}
        return [name for name, module in model.named_modules() if id(module) in layers]

    @contextmanager
    def without_maps(self) -> Iterator[None]:
        model: Any = self
        taken: list[tuple[nn.Module, nn.Module]] = []
        for site in recurrent_sites(model):
            if (found := site._modules.pop("feature_map", None)) is not None:
                taken.append((site, found))
        try:
            yield
        finally:
            for owner, found in taken:
                owner.add_module("feature_map", found)


@functools.cache
def sharded_class(base: Any) -> Any:
    """Return a class of the same models that is divided by layers when it is loaded."""
    return type(base.__name__, (ShardedByLayer, base), {"__module__": base.__module__})
