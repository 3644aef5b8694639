"""Detection of the attention in other language models on the attention interface of transformers.

The detection may be wrong, so `t2r.model.proof` checks it on the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from t2r import compat
from t2r.surgery.adapters.base import Family, Shape, Site
from t2r.surgery.adapters.names import refusal

LAYER_TYPES = {None, "full_attention", "sliding_attention"}


class GenericFamily(Family):
    def shape(self, module: Any) -> Shape:
        heads = module.config.num_attention_heads
        groups, size = getattr(module, "num_key_value_groups", 1), head_dim(module)
        assert size is not None  # checked by `discover`
        return Shape(heads, heads // groups, size)

    def notices(self, model: PreTrainedModel, swapped: Sequence[Site]) -> Iterator[str]:
        yield from super().notices(model, swapped)
        yield (
            f"{self.model_type} is not a tested model type; its attention was detected automatically and is checked "
            "when a model is swapped"
        )


def discover(model: PreTrainedModel) -> Family:
    """Detect the attention of a model without an adapter. Raises T2RError if the model cannot be swapped."""
    config: Any = model.config
    if config.is_encoder_decoder:
        raise refusal(
            config.model_type,
            "it is an encoder-decoder without an adapter, and the projections of its cross attention cannot be "
            "detected; write an adapter (one file)",
        )
    if config.get_text_config(decoder=True) is not config:
        raise refusal(
            config.model_type,
            "its language model is part of a larger model and cannot be detected without an adapter; if transformers "
            "provides the language model as a separate model, swap that one",
        )
    if not compat.on_attention_interface(model):
        raise refusal(config.model_type, "it does not use the attention interface of transformers")
    if strange := set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES:
        raise refusal(config.model_type, f"it has unsupported layers of type {', '.join(sorted(strange))}")
    found = [(name, m) for name, m in model.base_model.named_modules() if attends(m)]
    # For example layers.3.self_attn: the list of layers, the index of a layer, and its attention.
    parts = [re.fullmatch(r"(.+?)\.(\d+)\.(.+)", name) for name, _ in found]
    places = {(part[1], part[3]) for part in parts if part is not None}
    if len(places) != 1 or None in parts:
        raise refusal(config.model_type, "its layers do not have exactly one causal attention each")
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
        raise refusal(config.model_type, "its queries, keys and values do not have one common head size")
    return family


def attends(module: Any) -> bool:
    """Return whether a module looks like the causal attention of a layer."""
    return isinstance(getattr(module, "layer_idx", None), int) and getattr(module, "is_causal", None) is True


def head_dim(module: Any) -> int | None:
    return getattr(module, "head_dim", None) or getattr(module, "head_size", None)


def has_position_table(base: nn.Module) -> bool:
    return any(isinstance(m, nn.Embedding) and re.search("pos|wpe", n) for n, m in base.named_modules())
