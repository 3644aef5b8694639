"""What a state consists of, and the one check of it: states from files and states of callers pass the same."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from t2r.attention.masks import Padding

LONGEST = 1 << 40
"""Tokens of a state. More can only be a damaged number."""


class Damaged(ValueError):
    """Raised for contents that no model has made. The message says what is wrong."""


class OfAnotherModel(ValueError):
    """Raised for contents whose memories are not those of the model."""


class Contents(NamedTuple):
    """What a state consists of, as it is saved."""

    rows: int
    lengths: dict[str, int]
    """The number of tokens of each layer, by `self.0` or `cross.0`."""
    tensors: dict[str, Tensor]
    """The tensors of each layer, by `self.0.name`, and the padding of its rows."""

    @classmethod
    def of(cls, cache: Any) -> Contents:
        """Return the contents of a cache. The tensors are those of the cache."""
        tensors: dict[str, Tensor] = {}
        lengths = {}
        for part, layers in cache.parts().items():
            for i, layer in enumerate(layers):
                lengths[f"{part}.{i}"] = int(layer.get_seq_length())
                tensors |= {f"{part}.{i}.{name}": x for name, x in layer.tensors().items()}
        if cache.padding is not None:
            tensors |= {"padding": cache.padding.tokens, "padding_start": cache.padding.start}
        return cls(cache.rows, lengths, tensors)

    @torch.no_grad()
    def into(self, model: Any) -> Any:
        """Check the contents, and return a cache of this model with them.

        Raises:
            OfAnotherModel: if the memories, or the shapes of their tensors, are not those of the model.
            Damaged: if lengths, rows or padding do not fit together, or a tensor has a value that is not finite.
        """
        cache = model.make_cache()
        layers = {f"{part}.{i}": layer for part, found in cache.parts().items() for i, layer in enumerate(found)}
        if self.lengths.keys() != layers.keys():
            raise OfAnotherModel("it has other layers")
        shapes = {f"{part}.{i}": kind for part, found in model.memory_kinds().items() for i, kind in enumerate(found)}
        known = {"padding", "padding_start"}
        for name, layer in layers.items():
            held = {n.removeprefix(f"{name}."): x for n, x in self.tensors.items() if n.startswith(f"{name}.")}
            known |= {f"{name}.{key}" for key in held}
            try:
                layer.check(held, self.lengths[name], self.rows)
                layer.load(held, self.lengths[name])
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise Damaged(f"layer {name} is invalid") from error
            if held and layer.kind() != shapes[name]:
                raise OfAnotherModel(f"layer {name} has other memories")
        if self.tensors.keys() - known:
            raise Damaged("it has tensors of no layer")
        for part in cache.parts():
            lengths = {length for name, length in self.lengths.items() if name.startswith(f"{part}.")}
            if len(lengths) > 1 or max(lengths, default=0) > LONGEST:
                raise Damaged(f"its layers have read {', '.join(map(str, sorted(lengths)))} tokens")
        self.pad(cache)
        self.check_values()
        return cache

    def pad(self, cache: Any) -> None:
        """Give the padding to a cache. Raises Damaged if it does not fit its rows, or its windows."""
        length, count = cache.get_seq_length(), torch.zeros(self.rows, dtype=torch.long)
        if (tokens := self.tensors.get("padding")) is not None:
            start = self.tensors.get("padding_start")
            cache.padding = padding = Padding(torch.zeros_like(tokens) if start is None else start, tokens)
            if not all(x.shape == (self.rows,) and x.dtype == torch.long for x in padding) or bool(
                ((tokens < 0) | (padding.start + tokens > length)).any()
            ):
                raise Damaged(f"its padding does not match {self.rows} sequences of {length} tokens")
            count = tokens
        windows = [layer.window for layer in cache.parts()["self"] if layer.window is not None]
        for window in windows:
            if window.seen is not None and not torch.equal(window.seen.cpu(), length - count.cpu()):
                raise Damaged(f"its windows have not read {length} tokens")

    def check_values(self) -> None:
        """Raise Damaged if a value is not finite. Waits for the device once."""
        floats = {name: x for name, x in self.tensors.items() if x.is_floating_point() and x.numel()}
        if not floats:
            return
        places = {x.device for x in floats.values()}
        ends = [torch.stack(x.aminmax()).double() for x in floats.values()]
        if not bool(torch.stack([end.cpu() if len(places) > 1 else end for end in ends]).isfinite().all()):
            bad = next(name for name, x in floats.items() if not bool(x.isfinite().all()))
            raise Damaged(f"{bad} has values that are not finite")
