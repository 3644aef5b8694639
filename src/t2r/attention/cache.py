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
    fill_layer,
    held_tensors,
    layer_bytes,
    layer_tensors,
    refuse_window,
    stack_layers,
)
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

FORMAT = 1
"""The number of the format of saved states."""


class StateMixin:
    """What one can do with the memory of a model, beyond generating from it. Shared by the two caches below."""

    padding: Tensor | None = None
    """How many of the positions of each row are padding, `[batch]`; None: none."""
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
    def rows(self) -> int:
        """How many sequences it remembers."""
        tensors = next(iter(layer_tensors(next(iter(self.parts().values()))[0]).values()), None)
        return 0 if tensors is None else tensors.shape[0]

    def attention_mask(self, new_tokens: int = 0) -> Tensor:
        """The padding mask over what it has read and so many tokens more."""
        length = self.get_seq_length()
        padding = torch.zeros(self.rows, dtype=torch.long) if self.padding is None else self.padding
        column = torch.arange(length + new_tokens, device=padding.device)
        return (column >= padding[:, None]).long()

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
        padding = 0 if self.padding is None else int(self.padding[row])
        new.padding = None
        for layer in (layer for name, layers in new.parts().items() if name != "cross" for layer in layers):
            if isinstance(layer, RecurrentLayer):
                layer.length -= padding
            elif padding:
                refuse_window(layer)
                layer.keys, layer.values = layer.keys[:, :, padding:], layer.values[:, :, padding:]
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
        paddings = []
        for cache, length in zip(caches, lengths, strict=True):
            own = torch.zeros(cache.rows, dtype=torch.long) if cache.padding is None else cache.padding.cpu()
            paddings.append(own + longest - length)
        padding = torch.cat(paddings)
        new.padding = padding if bool(padding.any()) else None
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
            tensors["padding"] = self.padding.cpu()
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
        for layer in self.layers:  # all or none
            if isinstance(layer, RecurrentLayer):
                layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    # What rearranges the batch rearranges its padding.

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.padding = None if self.padding is None else self.padding.repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.padding = None if self.padding is None else self.padding[indices]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self.padding = None if self.padding is None else self.padding[beam_idx.to(self.padding.device)]


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
    if header["fingerprint"] != fingerprint(model):
        raise T2RError(f"{path} is the state of another model (or of this one with other weights)")
    cache = model.make_cache()
    with safe_open(path, framework="pt", device=str(model.device)) as file:
        names = set(file.keys())
        for part, layers in cache.parts().items():
            for i, layer in enumerate(layers):
                prefix = f"{part}.{i}."
                held = {n.removeprefix(prefix): file.get_tensor(n) for n in names if n.startswith(prefix)}
                try:
                    fill_layer(layer, held, header["lengths"][f"{part}.{i}"])
                except (KeyError, TypeError) as error:
                    raise T2RError(f"{path} is damaged: it lacks a part of layer {i}") from error
        if "padding" in names:
            cache.padding = file.get_tensor("padding")
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
    except SafetensorError as error:
        raise T2RError(f"{path} is not a saved state, or was cut off ({error})") from error
    if "t2r_state" not in metadata:
        raise T2RError(f"{path} is a safetensors file, but not a saved state")
    try:
        header: dict[str, Any] = json.loads(metadata["t2r_state"])
        newer = header["format"] > FORMAT
    except (ValueError, KeyError, TypeError) as error:
        raise T2RError(f"{path} is not a saved state: its header is damaged") from error
    if newer:
        raise T2RError(f"{path} has state format {header['format']}; this t2r reads up to {FORMAT}: upgrade t2r")
    return header


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """Tells models apart: the names and shapes of all their tensors, and a few values of each."""
    digest = hashlib.sha256()
    config: Any = getattr(model, "t2r_config", None)
    if config is not None:  # options that leave no trace in the names and shapes of tensors
        kept = config.softmax_every, config.softmax_layers
        digest.update(f"{config.feature_map} {config.activation} {kept}".encode())
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
