"""The recurrent state as a Hugging Face cache, and as a thing one can hold: save it, fork it, resume it, rewind it."""

from __future__ import annotations

import copy
import hashlib
import json
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from t2r.attention.layers import (
    Added,
    RecurrentLayer,
    check_layer,
    fill_layer,
    held_tensors,
    layer_bytes,
    layer_tensors,
    refuse_window,
    stack_layers,
)
from t2r.attention.masks import Padding
from t2r.errors import T2RError
from t2r.storage import whole_file

__all__ = [
    "Added",
    "RecurrentLayer",
    "StateMixin",
    "T2RCache",
    "T2REncoderDecoderCache",
    "adopt",
    "cache_bytes",
    "fingerprint",
    "load_state",
    "read_header",
]

FORMAT = 2
"""The number of the format of saved states. The fingerprint of format 1 did not know `rotary`."""


class StateMixin:
    """What one can do with the memory of a model, beyond generating from it. Shared by the two caches below."""

    padding: Padding | None = None
    """Which of the positions of each row are padding; None: none."""
    unseen: int = 0
    """How many of the tokens it has read are not among those that `generate` was given (see `continue_from`)."""
    model: Callable[[], nn.Module | None] = staticmethod(lambda: None)
    """A weak reference to the model that fills it."""

    def parts(self) -> dict[str, list[Any]]:
        """The layers, by what they attend to."""
        raise NotImplementedError

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """The bytes of everything it holds."""
        return sum(layer_bytes(layer) for layers in self.parts().values() for layer in layers)

    @property
    def is_recurrent(self) -> bool:
        """Whether every layer is recurrent, so that its size does not depend on what it has read."""
        return all(isinstance(layer, RecurrentLayer) for layers in self.parts().values() for layer in layers)

    @property
    def rows(self) -> int:
        """How many sequences it remembers."""
        tensors = next(iter(layer_tensors(next(iter(self.parts().values()))[0]).values()), None)
        return 0 if tensors is None else tensors.shape[0]

    def attention_mask(self, new_tokens: int = 0) -> Tensor:
        """The padding mask over what it has read and so many tokens more."""
        length = self.get_seq_length() + new_tokens
        return torch.ones(self.rows, length, dtype=torch.long) if self.padding is None else self.padding.mask(length)

    def copied(self) -> Self:
        """The same with tensors of its own, which no gradient flows through."""
        held = [x for layers in self.parts().values() for layer in layers for x in held_tensors(layer)]
        return copy.deepcopy(self, {id(x): x.detach().clone() for x in held})

    def fork(self, copies: int = 1) -> Self:
        """A copy of its own, each row `copies` times: many continuations of one past."""
        new = self.copied()
        new.batch_repeat_interleave(copies)  # type: ignore[attr-defined]
        return new

    def take(self, row: int) -> Self:
        """One sequence out of the batch, without the padding that it needed there."""
        new = self.copied()
        new.batch_select_indices(torch.tensor([row]))  # type: ignore[attr-defined]
        if self.padding is None:
            return new
        real, padding = self.attention_mask()[row].bool(), int(self.padding.tokens[row])
        new.padding = None
        for layer in (layer for name, layers in new.parts().items() if name != "cross" for layer in layers):
            if isinstance(layer, RecurrentLayer):
                layer.length -= padding
            elif padding:
                refuse_window(layer)
                layer.keys, layer.values = (x[:, :, real.to(x.device)] for x in (layer.keys, layer.values))
        return new

    @classmethod
    def stack(cls, caches: Sequence[Self]) -> Self:
        """One batch of several memories, of different lengths too: the shorter ones count as padded on the left."""
        if not caches:
            raise T2RError("there is nothing to stack")
        new, lengths = caches[0].copied(), [cache.get_seq_length() for cache in caches]
        longest = max(lengths)
        if "cross" in new.parts() and longest != min(lengths):
            raise T2RError(
                f"these decoders have written {min(lengths)} to {longest} tokens: an encoder-decoder counts positions "
                "for the batch as a whole, so stack its states at equal lengths"
            )
        counts = []
        for cache, length in zip(caches, lengths, strict=True):
            own = torch.zeros(cache.rows, dtype=torch.long)
            if cache.padding is not None:
                own = cache.padding.tokens.cpu()
                if bool((cache.padding.start.cpu() != 0).any()) and not cache.is_recurrent:
                    raise T2RError(
                        "states padded on the right cannot be stacked where softmax layers were kept: take() rows"
                    )
            counts.append(own + longest - length)
        count = torch.cat(counts)
        new.padding = Padding(torch.zeros_like(count), count) if bool(count.any()) else None
        for name, layers in new.parts().items():
            for i, layer in enumerate(layers):
                stack_layers(layer, [cache.parts()[name][i] for cache in caches], align=name != "cross")
        return new

    def save(self, path: str | Path) -> None:
        """Write it to a safetensors file, with the fingerprint of the model that it belongs to."""
        model = self.model()
        if model is None:
            raise T2RError("this cache does not know its model: make it with model.make_cache(), or generate with it")
        tensors, lengths = {}, {}
        for name, layers in self.parts().items():
            for i, layer in enumerate(layers):
                lengths[f"{name}.{i}"] = int(layer.get_seq_length())
                for key, tensor in layer_tensors(layer).items():
                    tensors[f"{name}.{i}.{key}"] = tensor.detach().cpu().contiguous()
        if self.padding is not None:
            self.padding.check()
            tensors |= {"padding": self.padding.tokens.cpu(), "padding_start": self.padding.start.cpu()}
        header = {"format": FORMAT, "fingerprint": fingerprint(model), "lengths": lengths, "rows": self.rows}
        try:
            with whole_file(path) as temporary:
                save_file(tensors, temporary, metadata={"t2r_state": json.dumps(header)})
        except (OSError, SafetensorError) as error:
            raise T2RError(f"{path} cannot be written: {error}") from error


class T2RCache(DynamicCache, StateMixin):
    """The cache of a swapped model: recurrent layers, and growing ones where softmax attention was kept."""

    def __init__(self, layers: list[Any], model: nn.Module | None = None) -> None:
        Cache.__init__(self, layers=layers)
        if model is not None:
            self.model = weakref.ref(model)

    def parts(self) -> dict[str, list[Any]]:
        return {"self": self.layers}

    def crop(self, tokens_to_remove: int) -> None:
        # With an early exit, the layers behind it have read nothing.
        filled = [layer for layer in self.layers if layer.is_initialized] or self.layers
        for layer in filled:  # all or none
            if isinstance(layer, RecurrentLayer):
                layer.check_crop(tokens_to_remove)
        for layer in filled:
            layer.crop(tokens_to_remove)

    # What rearranges the batch rearranges its padding.

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.padding = None if self.padding is None else self.padding.map(lambda x: x.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.padding = None if self.padding is None else self.padding.map(lambda x: x[indices])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self.padding = None if self.padding is None else self.padding.map(lambda x: x[beam_idx.to(x.device)])


class T2REncoderDecoderCache(EncoderDecoderCache, StateMixin):
    """The same for an encoder-decoder: what the decoder has written, and the source that it reads."""

    def __init__(self, own: T2RCache, cross: T2RCache, model: nn.Module | None = None) -> None:
        EncoderDecoderCache.__init__(self, own, cross)
        if model is not None:
            self.model = weakref.ref(model)

    def parts(self) -> dict[str, list[Any]]:
        return {"self": self.self_attention_cache.layers, "cross": self.cross_attention_cache.layers}


def load_state(path: str | Path, model: Any) -> Any:
    """Read a saved cache for this model, onto its device. A state of another model or format is refused."""
    header = read_header(path)
    if header["fingerprint"] != fingerprint(model, header["format"]):
        raise T2RError(f"{path} is the state of another model (or of this one with other weights)")
    cache, rows = model.make_cache(), header["rows"]
    with safe_open(path, framework="pt", device=str(model.device)) as file:
        names = set(file.keys())
        for part, layers in cache.parts().items():
            for i, layer in enumerate(layers):
                prefix = f"{part}.{i}."
                held = {n.removeprefix(prefix): file.get_tensor(n) for n in names if n.startswith(prefix)}
                length = header["lengths"].get(f"{part}.{i}")
                try:
                    check_layer(layer, held, length, rows)
                    fill_layer(layer, held, length)
                except (KeyError, TypeError, ValueError) as error:
                    raise T2RError(f"{path} is damaged: layer {i} of its {part} attention is not whole") from error
        if "padding" in names:
            count = file.get_tensor("padding")
            start = file.get_tensor("padding_start") if "padding_start" in names else torch.zeros_like(count)
            cache.padding = Padding(start, count)
            length = cache.get_seq_length()
            if not all(x.shape == (rows,) and not x.is_floating_point() for x in cache.padding) or bool(
                ((count < 0) | (start < 0) | (start + count > length)).any()
            ):
                raise T2RError(f"{path} is damaged: its padding does not fit {rows} sequences of {length} tokens")
    if isinstance(cache, T2REncoderDecoderCache):
        cache.is_updated = {i: layer.get_seq_length() > 0 for i, layer in enumerate(cache.parts()["cross"])}
    return cache


def read_header(path: str | Path) -> dict[str, Any]:
    """What a saved state says of itself: its format, its model's fingerprint, its lengths."""
    if not Path(path).is_file():
        raise T2RError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise T2RError(f"{path} is not a saved state, or was cut off ({error})") from error
    if "t2r_state" not in metadata:
        raise T2RError(f"{path} is a safetensors file, but not a saved state")
    try:
        header: dict[str, Any] = json.loads(metadata["t2r_state"])
        numbers = [header["format"], header["rows"], *header["lengths"].values()]
        if not all(type(number) is int and number >= 0 for number in numbers) or type(header["fingerprint"]) is not str:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise T2RError(f"{path} is not a saved state: its header is damaged") from error
    if header["format"] > FORMAT:
        raise T2RError(f"{path} has state format {header['format']}; this t2r reads up to {FORMAT}: upgrade t2r")
    return header


@torch.no_grad()
def fingerprint(model: nn.Module, format: int = FORMAT) -> str:
    """Tells models apart: the names and shapes of all their tensors, and a few values of each."""
    digest = hashlib.sha256()
    config: Any = getattr(model, "t2r_config", None)
    if config is not None:  # options that leave no trace in the names and shapes of tensors
        if format == 1:
            options = f"{config.feature_map} {config.activation} {(config.softmax_every, config.softmax_layers)}"
        else:
            swapped: Any = model
            options = f"{config.feature_map} {config.activation} {config.rotary} {swapped.kept_layers()}"
        digest.update(options.encode())
    samples = []
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        flat = tensor.flatten()
        samples.append(flat[:: max(1, flat.numel() // 16)][:16].to(torch.float32))
    digest.update(torch.cat(samples).cpu().numpy().tobytes())
    return digest.hexdigest()


def adopt(cache: Cache | None, layer_idx: int, recurrent: bool, cross: bool = False) -> Any:
    """The layer of this cache that a site of attention writes to, of the kind that it needs.

    Whoever made the cache (generate, a user, the base model's own forward) may have made it for softmax attention: a
    layer that is still empty is exchanged for a recurrent one, once.
    """
    if cache is None:
        return None
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.cross_attention_cache if cross else cache.self_attention_cache
    layers: list[Any] = cache.layers
    while len(layers) <= layer_idx:
        layers.append(DynamicLayer())
    layer = layers[layer_idx]
    if isinstance(layer, RecurrentLayer) == recurrent:
        return layer
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, RecurrentLayer):
        raise T2RError(
            f"a recurrent model cannot use a {type(cache).__name__} of {type(layer).__name__}s: "
            "leave cache_implementation unset"
        )
    if layer.is_initialized:
        raise T2RError(
            "this cache was filled by a model with other attention (softmax where this one is recurrent, or the "
            "reverse): start from an empty one"
        )
    layers[layer_idx] = RecurrentLayer() if recurrent else DynamicLayer()
    return layers[layer_idx]


def cache_bytes(cache: Cache) -> int:
    """The bytes held by any cache, recurrent states and keys and values alike."""
    if isinstance(cache, EncoderDecoderCache):
        return cache_bytes(cache.self_attention_cache) + cache_bytes(cache.cross_attention_cache)
    return sum(layer_bytes(layer) for layer in cache.layers)
