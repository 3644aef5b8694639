"""What we must know of a family of models to swap it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from torch import nn
from transformers import PreTrainedModel

from t2r.attention.interface import InterfaceAttention
from t2r.attention.recurrence import Recurrence


class Shape(NamedTuple):
    """The heads of one attention module."""

    num_heads: int
    num_key_value_heads: int
    head_dim: int


class Site(NamedTuple):
    """One attention module of a decoder that can become recurrent."""

    name: str  # from the model's root, e.g. model.layers.3.self_attn
    module: nn.Module
    layer: int
    cross: bool


@dataclass(frozen=True)
class Family:
    """Where a family keeps its attention, and which class a swapped module gets.

    `recurrent` maps the stock attention class to the class that takes its place; None: the stock module's forward
    stays, and takes part through the attention interface.
    """

    model_type: str
    layers: str = "layers"  # the decoder's layers, from the base model
    self_attention: str = "self_attn"  # in a layer
    cross_attention: str | None = None
    recurrent: type[Recurrence] | None = None
    positions: str = "rotary"  # or learned (a table that ends), sinusoidal, relative, none
    lacks: frozenset[str] = frozenset()  # what the base model cannot do, and its recurrent form neither
    positions_by_row: bool = False  # the decoder of an encoder-decoder takes a count of tokens for each row [rows, 1]
    plain_projections: bool = False  # a linear one each, with nothing but the rotation between them and the map
    tested: bool = True  # false: found by looking, so each model must prove itself when it is swapped

    dropouts: ClassVar[tuple[str, ...]] = ("attention_dropout", "attn_pdrop")
    """Where a configuration says how much of the attention weights is dropped in training."""

    @property
    def merges(self) -> bool:
        """Can the feature map be folded into the projections? Not where something stands between the two."""
        return self.recurrent is not None

    def check(self, model: PreTrainedModel) -> None:
        """Raise `T2RError` for a model of this family that cannot be swapped."""

    def sites(self, model: PreTrainedModel) -> Iterator[Site]:
        names = {id(module): name for name, module in model.named_modules()}
        for i, layer in enumerate(self.decoder_layers(model)):
            for path, cross in ((self.self_attention, False), (self.cross_attention, True)):
                module = None if path is None else submodule(layer, path)
                if module is not None:
                    yield Site(names[id(module)], module, i, cross)

    def decoder_layers(self, model: PreTrainedModel) -> nn.ModuleList:
        layers = model.base_model.get_submodule(self.layers)
        assert isinstance(layers, nn.ModuleList)
        return layers

    def shape(self, module: Any) -> Shape:
        heads = getattr(module, "num_heads", None) or module.config.num_attention_heads
        return Shape(heads, heads // getattr(module, "num_key_value_groups", 1), module.head_dim)

    def recurrent_class(self, module: nn.Module) -> type[nn.Module]:
        """The class of a swapped module: ours first, then the stock class, so that it is still one of those."""
        stock = type(module)
        ours = InterfaceAttention if self.recurrent is None else self.recurrent
        return swapped_class(ours, stock)

    def finish(self, model: PreTrainedModel, swapped: Sequence[Site], kept: Sequence[Site]) -> None:
        """What else must change in a model for its swapped sites, and for those kept as softmax attention."""

    def notices(self, model: PreTrainedModel, swapped: Sequence[Site]) -> Iterator[str]:
        """What a recurrence does not take over, a sentence each."""
        config: Any = model.config.get_text_config(decoder=True)
        dropout = next((getattr(config, n) for n in self.dropouts if getattr(config, n, 0)), 0)
        if dropout:
            yield (
                f"attention dropout ({dropout}) applies to softmax attention only: "
                f"{len(swapped)} recurrent sites have none"
            )
        window, count = windowed(config, swapped)
        if count:
            which = "its recurrent layers" if count == len(swapped) else f"{count} of its recurrent layers"
            yield (
                f"the base model attends to a window of {window} tokens in {which}, "
                "which now remember from the beginning"
            )

    def max_positions(self, model: PreTrainedModel) -> int | None:
        """How many positions the model has; None: as many as one likes."""
        return model.config.max_position_embeddings if self.positions == "learned" else None

    def extend_positions(self, model: PreTrainedModel, length: int) -> None:
        """Make room for so many positions, where they are computed rather than learned."""


def change_class(module: nn.Module, new: type[nn.Module]) -> None:
    """Exchange the class of a module. On a dispatched model, accelerate's hook wraps the new forward as it did the old.

    Removing the hook leaves the old class's forward behind as an attribute of the module, which would win over the new
    class's: it goes too."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        remove_hook_from_module(module)
        vars(module).pop("forward", None)
    module.__class__ = new
    if hook is not None:
        add_hook_to_module(module, hook)


def submodule(module: nn.Module, path: str) -> nn.Module | None:
    """The module at this path; None where there is none (a decoder without cross attention)."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def windowed(config: Any, sites: Sequence[Site]) -> tuple[int | None, int]:
    """The size of the sliding window, and how many of these sites look through it."""
    window = getattr(config, "sliding_window", None)
    if window is None:
        return None, 0
    types = getattr(config, "layer_types", None)  # None: all layers are alike
    return window, sum(types is None or types[site.layer] == "sliding_attention" for site in sites)


_CLASSES: dict[tuple[type, type], type] = {}


def swapped_class(ours: type, stock: type) -> type[nn.Module]:
    key = (ours, stock)
    if key not in _CLASSES:
        _CLASSES[key] = type(f"T2R{stock.__name__}", key, {"__module__": __name__, "__reduce__": _reduce})
    return _CLASSES[key]


# Pickle looks for classes by name, and these have none that it could find: it is told the two they are made of.


def _reduce(module: nn.Module) -> tuple[Any, ...]:
    return _blank, type(module).__bases__, module.__dict__


def _blank(ours: type, stock: type) -> nn.Module:
    made = swapped_class(ours, stock)
    return made.__new__(made)
