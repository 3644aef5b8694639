"""The base class of adapters: what t2r must know about a model family to swap it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn
from transformers import PreTrainedModel

from t2r import compat
from t2r.attention.interface import InterfaceAttention
from t2r.attention.merged import Mergeable
from t2r.attention.softmax import sliding_window_of


class Shape(NamedTuple):
    """The heads of an attention module."""

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
    """The adapter of a model family: where its attention modules are, and which class a swapped module gets.

    `recurrent` is the class that replaces the stock attention class. If it is None, the stock forward stays and calls
    the recurrence through the attention interface.
    """

    model_type: str
    about: str = ""  # what it is, in the list of models; of a family with a module of its own, its docstring
    layers: str = "layers"  # path of the decoder layers, from the base model
    self_attention: str = "self_attn"  # path within a layer
    cross_attention: str | None = None
    recurrent: type[Mergeable] | None = None
    positions: str = "rotary"  # or learned (a table of fixed length), sinusoidal, relative, none
    lacks: frozenset[str] = frozenset()  # features that neither the base model nor the swapped model supports
    positions_by_row: bool = False  # the decoder of an encoder-decoder accepts past lengths per row, [rows, 1]
    plain_projections: bool = False  # separate linear projections, with only the rotation between them and the map
    tested: bool = True  # if False, the attention is detected and each swapped model is checked

    dropouts: ClassVar[tuple[str, ...]] = ("attention_dropout", "attn_pdrop")
    """Names of the attention dropout in a configuration."""
    layer_drops: ClassVar[tuple[str, ...]] = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
    """Names of the probability that a layer is skipped in training, in a configuration."""
    projections: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Names of the projections of queries, keys, values and outputs where they are separate."""
    joint_projections: ClassVar[tuple[str, ...]] = ("c_attn", "c_proj")
    """The same where one layer projects queries, keys and values."""
    gated_layer: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj", "act_fn", "down_proj")
    """Names of the parts of a feed-forward layer with a gate."""
    plain_layers: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("c_fc", "act", "c_proj"),
        ("dense_h_to_4h", "act", "dense_4h_to_h"),
        ("fc1", "activation_fn", "fc2"),
    )
    """The same without a gate: first product, activation, second product."""
    norms: ClassVar[tuple[str, ...]] = ("RMSNorm", "T5LayerNorm")
    """Ends of the names of the classes of root mean square norms."""
    tables: ClassVar[str] = "Sinusoidal"
    """A part of the names of the classes whose parameters are a computed table of positions."""

    @property
    def merges(self) -> bool:
        """Whether every model of the family can be merged, whatever the options of its swap."""
        return self.recurrent is not None and self.recurrent.merge_obstacle is None

    def check(self, model: PreTrainedModel) -> None:
        """Raise T2RError if this model of the family cannot be swapped."""

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

    def encoder_layers(self, model: Any) -> Sequence[nn.Module]:
        """Return the layers of the encoder; none for a language model."""
        if not model.config.is_encoder_decoder:
            return []
        encoder = model.get_encoder()
        layers: nn.ModuleList = encoder.block if hasattr(encoder, "block") else encoder.layers  # T5's name
        return list(layers)

    def shape(self, module: Any) -> Shape:
        heads = getattr(module, "num_heads", None) or module.config.num_attention_heads
        return Shape(heads, heads // getattr(module, "num_key_value_groups", 1), module.head_dim)

    def recurrent_class(self, module: nn.Module) -> type[nn.Module]:
        """Return the class of a swapped module. It inherits the recurrent class and the stock class, in this order."""
        stock = type(module)
        ours = InterfaceAttention if self.recurrent is None else self.recurrent
        return swapped_class(ours, stock)

    def repair(self, model: PreTrainedModel) -> None:
        """Repair what a base model computes wrongly with some versions of transformers, in place."""

    def finish(self, model: PreTrainedModel, swapped: Sequence[Site], kept: Sequence[Site]) -> None:
        """Make further changes to a model that its swapped sites or softmax layers require."""

    def notices(self, model: PreTrainedModel, swapped: Sequence[Site]) -> Iterator[str]:
        """Yield notices about behavior of the base model that recurrent layers do not have."""
        config: Any = model.config.get_text_config(decoder=True)
        dropout = next((getattr(config, n) for n in self.dropouts if getattr(config, n, 0)), 0)
        if dropout:
            yield (
                f"attention dropout ({dropout}) applies to softmax attention only: "
                f"the {len(swapped)} recurrent sites do not use it"
            )
        # A memory plan gives windows to the layers.
        alone = [site for site in swapped if getattr(site.module, "window", None) is None]
        windows = [window for site in alone if (window := sliding_window_of(config, site.layer)) is not None]
        if windows:
            count = len(windows)
            which = "its recurrent layers" if count == len(swapped) else f"{count} of its recurrent layers"
            yield (
                f"the base model attends to a sliding window of {windows[0]} tokens in {which}; "
                "recurrent layers have no window and process the whole sequence"
            )

    def max_positions(self, model: PreTrainedModel) -> int | None:
        """Return the number of positions of the model, or None if there is no limit."""
        return model.config.max_position_embeddings if self.positions == "learned" else None

    def extend_positions(self, model: PreTrainedModel, length: int) -> None:
        """Extend the table of positions at least to this length, if positions are computed and not learned."""

    def position_table(self, model: PreTrainedModel) -> Tensor | None:
        """Return the table that `extend_positions` replaces by a longer one, or None if it replaces none."""
        return None


def change_class(module: nn.Module, new: type[nn.Module]) -> None:
    """Change the class of a module. On a dispatched model, accelerate's hook wraps the new forward.

    Removing the hook leaves the forward of the old class as an attribute of the module, which would take precedence
    over the new class. It is removed too."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        remove_hook_from_module(module)
        vars(module).pop("forward", None)
    compat.record_outputs_as(new, type(module))
    module.__class__ = new
    if hook is not None:
        add_hook_to_module(module, hook)


def submodule(module: nn.Module, path: str) -> nn.Module | None:
    """Return the module at this path, or None if there is none (a decoder without cross attention)."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


_CLASSES: dict[tuple[type, type], type] = {}


def swapped_class(ours: type, stock: type) -> type[nn.Module]:
    key = (ours, stock)
    if key not in _CLASSES:
        _CLASSES[key] = type(f"T2R{stock.__name__}", key, {"__module__": __name__, "__reduce__": _reduce})
    return _CLASSES[key]


# Pickle finds classes by name, which fails for these dynamic classes. They are pickled as their two base classes.


def _reduce(module: nn.Module) -> tuple[Any, ...]:
    return _blank, type(module).__bases__, module.__dict__


def _blank(ours: type, stock: type) -> nn.Module:
    made = swapped_class(ours, stock)
    return made.__new__(made)
