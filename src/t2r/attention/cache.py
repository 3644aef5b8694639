"""The recurrent state as a transformers cache, which can be saved, loaded, forked, stacked and cropped."""

from __future__ import annotations

import copy
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

from t2r.attention.contents import Contents, Damaged, OfAnotherModel
from t2r.attention.layers import SiteLayer
from t2r.attention.masks import Padding
from t2r.attention.memories import KeyValueMemory
from t2r.attention.state_file import FORMAT, STATE, fingerprint, read_header
from t2r.errors import T2RError
from t2r.storage import whole_file

__all__ = [
    "SiteLayer",
    "StateMixin",
    "T2RCache",
    "T2REncoderDecoderCache",
    "adopt",
    "cache_bytes",
    "load_state",
]


class ModelReference:
    """A weak reference to a model. Unlike that of the standard library it can be pickled, and then refers to none."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.reference = None if model is None else weakref.ref(model)

    def __call__(self) -> nn.Module | None:
        return None if self.reference is None else self.reference()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelReference:
        return self

    def __reduce__(self) -> tuple[type[ModelReference], tuple[()]]:
        return ModelReference, ()


class StateMixin:
    """Operations on the state of a model, shared by `T2RCache` and `T2REncoderDecoderCache`."""

    padding: Padding | None = None
    """The padding of each row, or None without padding."""
    unseen: int = 0
    """Number of processed tokens that are not in the input of `generate` (see `continue_from`)."""
    chat: dict[str, Any] | None = None
    """What a conversation has said (`t2r.generation.turns`), if this is a state in one. It is saved with the state."""
    is_static: bool = False
    """Whether rows are at fixed addresses and have lengths of their own (`StaticT2RCache`)."""
    model: Callable[[], nn.Module | None] = staticmethod(lambda: None)
    """A weak reference to the model of this cache."""

    def parts(self) -> dict[str, list[Any]]:
        """Return the layers of self attention and, for an encoder-decoder, of cross attention."""
        raise NotImplementedError

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(layer.nbytes for layer in self.all_layers())

    def all_layers(self) -> list[Any]:
        return [layer for layers in self.parts().values() for layer in layers]

    @property
    def is_recurrent(self) -> bool:
        """Whether the size does not depend on the sequence length: no layer has all keys and values."""
        return not any(layer.grows for layer in self.all_layers())

    @property
    def rows(self) -> int:
        """The number of sequences in the batch."""
        rows: int = self.all_layers()[0].batch_size
        return max(0, rows)

    def attention_mask(self, new_tokens: int = 0) -> Tensor:
        """Return the padding mask over the processed tokens and `new_tokens` more."""
        length = self.get_seq_length() + new_tokens
        return torch.ones(self.rows, length, dtype=torch.long) if self.padding is None else self.padding.mask(length)

    def checked(self, model: Any) -> Contents:
        """Return the contents. Raises T2RError if this model cannot continue from them."""
        self.refuse_static("continued from")
        try:
            contents, own = Contents.of(self), self.model()
            contents.into(model)
            if own is not None and own is not model and fingerprint(own) != fingerprint(model):
                raise OfAnotherModel("the weights differ")
        except OfAnotherModel as error:
            raise T2RError(f"the state is of another model: {error}. Read the text again with this model") from error
        except Damaged as error:
            raise T2RError(f"the state is damaged: {error}. Read the text again") from error
        return contents

    def check_prompts(self, prompts: int, model: Any = None) -> None:
        """Raise T2RError if this many prompts cannot continue from this state: one for each row, or any for one row.

        With a model, the state is checked too."""
        if model is not None:
            self.checked(model)
        if not self.rows:
            raise T2RError("the state is empty: the model must read at least one token first")
        if self.rows not in (1, prompts):
            raise T2RError(f"{prompts} prompts for a state of {self.rows} sequences: fork or stack the state to match")

    def refuse_static(self, what: str) -> None:
        if self.is_static:
            raise T2RError(f"a static cache cannot be {what}: use take() to get its rows as separate caches")

    def copied(self) -> Self:
        """Return a copy with cloned and detached tensors."""
        self.refuse_static("copied")
        held = [x for layer in self.all_layers() for x in layer.held_tensors()]
        return copy.deepcopy(self, {id(x): x.detach().clone() for x in held})

    def fork(self, copies: int = 1) -> Self:
        """Return an independent copy with each row repeated `copies` times, to continue one state in several ways."""
        new = self.copied()
        new.batch_repeat_interleave(copies)  # type: ignore[attr-defined]
        return new

    def take(self, row: int) -> Self:
        """Return a copy of one row of the batch, without its padding."""
        new = self.copied()
        new.batch_select_indices(torch.tensor([row]))  # type: ignore[attr-defined]
        if self.padding is None:
            return new
        real = self.attention_mask()[row].bool()
        new.padding = None
        for layer in new.parts()["self"]:
            layer.drop_padding(real)
        return new

    @classmethod
    def stack(cls, caches: Sequence[Self]) -> Self:
        """Combine several caches into one batch. Shorter sequences count as padded on the left.

        Raises T2RError if the caches cannot be combined."""
        if not caches:
            raise T2RError("stack requires at least one cache")
        kinds = [cache.kinds() for cache in caches]
        if not all(cache.rows for cache in caches):
            raise T2RError("an empty cache cannot be stacked")
        if any(other != kinds[0] for other in kinds):
            raise T2RError("states of different models cannot be stacked")
        new, lengths = caches[0].copied(), [cache.get_seq_length() for cache in caches]
        longest = max(lengths)
        if "cross" in new.parts() and longest != min(lengths):
            raise T2RError(
                f"states of an encoder-decoder must be stacked at equal lengths, because its positions are those of "
                f"the whole batch; these decoders have generated {min(lengths)} to {longest} tokens"
            )
        counts = []
        for cache, length in zip(caches, lengths, strict=True):
            own = torch.zeros(cache.rows, dtype=torch.long)
            if cache.padding is not None:
                own = cache.padding.tokens.cpu()
                if bool((cache.padding.start.cpu() != 0).any()) and not cache.is_recurrent:
                    raise T2RError(
                        "states padded on the right cannot be stacked if the model has softmax layers: take() each "
                        "row and stack the rows"
                    )
            counts.append(own + longest - length)
        count = torch.cat(counts)
        new.padding = Padding(torch.zeros_like(count), count) if bool(count.any()) else None
        new.chat = same_chat(caches, longest)
        for name, layers in new.parts().items():
            for i, layer in enumerate(layers):
                layer.stack([cache.parts()[name][i] for cache in caches], align=name != "cross")
        return new

    def kinds(self) -> dict[str, list[Any]]:
        """Return the memories of every layer, and the shapes of their tensors without rows and tokens."""
        return {name: [layer.kind() for layer in layers] for name, layers in self.parts().items()}

    def save(self, path: str | Path) -> None:
        """Save to a safetensors file, with the fingerprint of the model. Raises T2RError if it cannot be written."""
        self.refuse_static("saved")
        STATE.check(path)
        model = self.model()
        if model is None:
            raise T2RError(
                "this cache has no model: create it with model.make_cache(), or pass it to model.generate() first"
            )
        self.checked(model)
        tensors, header = self.as_saved(fingerprint(model))
        try:
            with whole_file(path) as temporary:
                save_file(tensors, temporary, metadata={"t2r_state": json.dumps(header)})
        except (OSError, SafetensorError) as error:
            raise T2RError(f"{path} cannot be written: {error}") from error

    def as_saved(self, identity: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and the header of a saved state. `identity` is the fingerprint of its model."""
        if self.padding is not None:
            self.padding.check()
        rows, lengths, tensors = Contents.of(self)
        tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
        header = {"format": FORMAT, "fingerprint": identity, "lengths": lengths, "rows": rows}
        if self.chat is not None:
            header["chat"] = self.chat
        return tensors, header


class T2RCache(DynamicCache, StateMixin):
    """The cache of a swapped model: recurrent states, and keys and values of softmax layers."""

    known: Padding | None = None
    """The padding, unless `noted` is newer."""
    noted: Tensor | None = None
    """A mask of all tokens, from which the padding is computed when it is needed."""

    def __init__(self, layers: list[Any], model: nn.Module | None = None) -> None:
        Cache.__init__(self, layers=layers)
        if model is not None:
            self.model = ModelReference(model)

    def parts(self) -> dict[str, list[Any]]:
        return {"self": self.layers}

    def crop(self, tokens_to_remove: int) -> None:
        # With an early exit, the layers after it are empty.
        layers: list[Any] = self.layers
        filled = [layer for layer in layers if layer.is_initialized] or layers
        for layer in filled:  # check all layers before any is cropped
            layer.check_crop(tokens_to_remove)
        for layer in filled:
            layer.crop(tokens_to_remove)
        if self.padding is not None:
            self.padding = self.padding.cropped(self.get_seq_length())

    def reset(self) -> None:
        super().reset()
        self.padding, self.unseen, self.chat = None, 0, None

    @property
    def padding(self) -> Padding | None:
        if self.noted is not None:
            self.padding = Padding.of(self.noted)
        return self.known

    @padding.setter
    def padding(self, padding: Padding | None) -> None:
        self.known, self.noted = padding, None

    def note_padding(self, mask: Tensor, tokens: int) -> None:
        """Store the padding of `tokens` new tokens, the last columns of a mask. They are not yet in the layers."""
        length = int(self.get_seq_length())
        if mask.shape[1] == length + tokens:
            if tokens == 1:  # in every step of `generate`: it must cost nothing
                self.noted = mask
            else:  # the mask may be changed by its owner
                self.padding = Padding.of(mask)
            return
        new = Padding.of(mask[:, -tokens:])
        before = self.padding or Padding(*(torch.zeros_like(x) for x in new))
        self.padding = before.followed_by(new, length)

    # Operations that rearrange the batch also rearrange its padding.

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.refuse_static("repeated")
        super().batch_repeat_interleave(repeats)
        self.padding = None if self.padding is None else self.padding.map(lambda x: x.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.refuse_static("divided")
        super().batch_select_indices(indices)
        self.padding = None if self.padding is None else self.padding.map(lambda x: x[indices])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self.padding = None if self.padding is None else self.padding.map(lambda x: x[beam_idx.to(x.device)])


class T2REncoderDecoderCache(EncoderDecoderCache, StateMixin):
    """The cache of a swapped encoder-decoder: one cache for self attention and one for cross attention."""

    def __init__(self, own: T2RCache, cross: T2RCache, model: nn.Module | None = None) -> None:
        EncoderDecoderCache.__init__(self, own, cross)
        if model is not None:
            self.model = ModelReference(model)

    def parts(self) -> dict[str, list[Any]]:
        return {"self": self.self_attention_cache.layers, "cross": self.cross_attention_cache.layers}

    @property
    def is_static(self) -> bool:  # type: ignore[override]
        return bool(getattr(self.self_attention_cache, "is_static", False))


def same_chat(caches: Sequence[StateMixin], length: int) -> dict[str, Any] | None:
    """Return the conversation of states that are stacked to this length, if it is the same in all of them."""
    chats = [cache.chat for cache in caches if cache.chat and cache.chat["tokens"] == cache.get_seq_length()]
    chats = [chat | {"tokens": length} for chat in chats]
    return chats[0] if len(chats) == len(caches) and all(chat == chats[0] for chat in chats) else None


def load_state(path: str | Path, model: Any, identity: str | None = None) -> Any:
    """Load a saved cache for this model, on its device. `identity` is the model's fingerprint, if it is known.

    Raises T2RError if the file is damaged, or was saved by another model or a newer format."""
    header = read_header(path)
    if header["fingerprint"] != identity and header["fingerprint"] != fingerprint(model, header["format"]):
        raise T2RError(f"{path} is the state of another model (or of this model with other weights)")
    with safe_open(path, framework="pt", device=str(model.device)) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
    try:
        cache = Contents(header["rows"], header["lengths"], tensors).into(model)
    except (Damaged, OfAnotherModel) as error:
        raise T2RError(f"{path} is damaged: {error}") from error
    cache.chat = header.get("chat")
    if isinstance(cache, T2REncoderDecoderCache):
        cache.is_updated = {i: layer.get_seq_length() > 0 for i, layer in enumerate(cache.parts()["cross"])}
    return cache


def adopt(cache: Cache | None, layer_idx: int, make: Callable[[], SiteLayer] | None, cross: bool = False) -> Any:
    """Return the cache layer of a site.

    Caches created by `generate`, by users or by the base model may have other layers. An empty one is replaced. Raises
    T2RError if the layer is not empty or not supported.

    Args:
        make: makes a layer with the memories of the site. None: softmax attention to all tokens, for which layers of
            transformers serve too.
        cross: the site is cross attention.
    """
    if cache is None:
        return None
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.cross_attention_cache if cross else cache.self_attention_cache
    layers: list[Any] = cache.layers
    while len(layers) <= layer_idx:
        layers.append(DynamicLayer())
    layer = layers[layer_idx]
    ours = isinstance(layer, SiteLayer)
    if make is None and (not ours or layer.find(KeyValueMemory) is not None):
        return layer
    if make is not None and ours and layer.find(KeyValueMemory) is None:
        return layer
    if not ours and type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise T2RError(
            f"a recurrent model cannot use a {type(cache).__name__} with layers of type {type(layer).__name__}: "
            "leave cache_implementation unset"
        )
    if layer.is_initialized:
        raise T2RError(
            "this cache was filled by a model with other attention (softmax attention where this model is recurrent, "
            "or the reverse): start from an empty cache"
        )
    layers[layer_idx] = SiteLayer(KeyValueMemory()) if make is None else make()
    return layers[layer_idx]


def cache_bytes(cache: Cache) -> int:
    """Return the size of a cache in bytes, for recurrent states and for keys and values."""
    if isinstance(cache, EncoderDecoderCache):
        return cache_bytes(cache.self_attention_cache) + cache_bytes(cache.cross_attention_cache)
    return sum(layer_bytes(layer) for layer in cache.layers)


def layer_bytes(layer: Any) -> int:
    """Return the size of a layer of t2r or of transformers."""
    if isinstance(layer, SiteLayer):
        return layer.nbytes
    held = (getattr(layer, name, None) for name in ("keys", "values"))
    return sum(x.numel() * x.element_size() for x in held if isinstance(x, Tensor))
