"""Any other language model on transformers' attention interface: its attention is found by looking.

What is found here is a guess, which `t2r.surgery.install` then checks on the model itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from t2r import compat
from t2r.surgery.adapters.base import Family, Shape, Site
from t2r.surgery.adapters.registry import refusal

LAYER_TYPES = {None, "full_attention", "sliding_attention"}


class GenericFamily(Family):
    def shape(self, module: Any) -> Shape:
        heads = module.config.num_attention_heads
        groups, size = getattr(module, "num_key_value_groups", 1), head_dim(module)
        assert size is not None  # `discover` has seen to it
        return Shape(heads, heads // groups, size)

    def notices(self, model: PreTrainedModel, swapped: Sequence[Site]) -> Iterator[str]:
        yield from super().notices(model, swapped)
        yield (
            f"{self.model_type} is not among the families that t2r is tested with; its attention was found by "
            "looking, and is checked when a model is swapped"
        )


def discover(model: PreTrainedModel) -> Family:
    """The family of a model that has no file here, or the reason why it cannot be swapped."""
    config: Any = model.config
    if config.is_encoder_decoder:
        raise refusal(
            config.model_type,
            "it is an encoder-decoder of a family that has no adapter. Its cross attention would become recurrent too, "
            "and that is done on a module's own projections, which cannot be found by looking; an adapter is one file",
        )
    if config.get_text_config(decoder=True) is not config:
        raise refusal(
            config.model_type,
            "its language model is one part of a larger model, and which of its attentions are the language model's "
            "is not known without an adapter; if transformers has the language model as a model of its own, swap that",
        )
    if not compat.on_attention_interface(model):
        raise refusal(config.model_type, "it is not on the attention interface of transformers")
    if strange := set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES:
        raise refusal(config.model_type, f"it has layers of {', '.join(sorted(strange))}")
    found = [(name, m) for name, m in model.base_model.named_modules() if attends(m)]
    # layers.3.self_attn: the list of layers, the number of one of them, and the attention within.
    parts = [re.fullmatch(r"(.+?)\.(\d+)\.(.+)", name) for name, _ in found]
    places = {(part[1], part[3]) for part in parts if part is not None}
    if len(places) != 1 or None in parts:
        raise refusal(config.model_type, "no single causal attention was found in its layers")
    layers, attention = places.pop()
    family = GenericFamily(
        config.model_type,
        layers=layers,
        self_attention=attention,
        positions="learned" if has_position_table(model.base_model) else "rotary",
        tested=False,
    )
    if [module.layer_idx for _, module in found] != list(range(len(family.decoder_layers(model)))):
        raise refusal(config.model_type, "some of its layers have no softmax attention")
    if any(head_dim(module) is None for _, module in found):
        raise refusal(config.model_type, "its queries, keys and values are not heads of one size")
    return family


def attends(module: Any) -> bool:
    """Does this look like the causal attention of one layer?"""
    return isinstance(getattr(module, "layer_idx", None), int) and getattr(module, "is_causal", None) is True


def head_dim(module: Any) -> int | None:
    return getattr(module, "head_dim", None) or getattr(module, "head_size", None)


def has_position_table(base: nn.Module) -> bool:
    return any(isinstance(m, nn.Embedding) and re.search("pos|wpe", n) for n, m in base.named_modules())
