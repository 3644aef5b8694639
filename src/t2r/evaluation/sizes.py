"""The memory of a model for one sequence: states, and keys and values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from transformers import EncoderDecoderCache, PreTrainedModel

from t2r.attention.layers import SiteLayer
from t2r.evaluation.variants import DTYPES, Variant
from t2r.model.logits import evaluating
from t2r.ops.stored import AS_THEY_ARE, token_bytes

KEY_BYTES = 2
"""Bytes per number in keys and values, counted as bfloat16 regardless of the dtype of the evaluation."""


class Memory(NamedTuple):
    """The memory of a model for one sequence.

    `state` is the size of the recurrent states in bytes, `token` that of the keys and values of one token in bfloat16,
    and `tokens` the maximum number of tokens with keys and values (None: all). `sliding` has the same two numbers for
    each layer that has a sliding window of its own."""

    state: int
    token: int
    tokens: int | None = None
    sliding: tuple[tuple[int, int], ...] = ()

    def at(self, context: int) -> int:
        """Return the number of bytes for this number of tokens."""
        own = sum(token * min(context, tokens) for token, tokens in self.sliding)
        return self.state + self.token * (context if self.tokens is None else min(context, self.tokens)) + own


def memory_of(model: PreTrainedModel, variant: Variant | None = None) -> Memory | None:
    """Measure the memory of a language model with a cache of two tokens. Returns None for unknown kinds of cache."""
    return _of_layers(getattr(_filled(model), "layers", None) or (), variant)


def translation_memory(model: PreTrainedModel) -> tuple[Memory, Memory] | None:
    """Measure the memory of causal attention and of cross attention of an encoder-decoder, each by its own tokens.

    Returns None for unknown kinds of cache."""
    cache = _filled(model)
    if not isinstance(cache, EncoderDecoderCache):
        return None
    causal, cross = (_of_layers(part.layers) for part in (cache.self_attention_cache, cache.cross_attention_cache))
    return None if causal is None or cross is None else (causal, cross)


READ = 2
"""Tokens in the cache that is measured; in the source, too."""


def _filled(model: PreTrainedModel) -> Any:
    ids = torch.zeros(1, READ, dtype=torch.long, device=model.device)
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with evaluating(model):
        return getattr(model(input_ids=ids, use_cache=True, **more), "past_key_values", None)


def _of_layers(layers: Iterable[Any], variant: Variant | None = None) -> Memory | None:
    state = token = 0
    longest = None if variant is None or variant.window is None else variant.window + variant.sinks
    sliding: list[tuple[int, int]] = []
    for layer in layers:
        ours = isinstance(layer, SiteLayer)
        held = [x for name in ("keys", "values") if (x := getattr(layer, name, None)) is not None]
        if ours and not layer.grows:
            stored = None if variant is None or variant.state is None else DTYPES[variant.state].itemsize
            for name, x in layer.tensors().items():
                if name in ("keys", "values", "scales"):  # of a window, whose buffers are as long as it is
                    state += x.numel() * (KEY_BYTES if x.is_floating_point() else x.element_size())
                elif name != "seen":
                    state += x.numel() * (stored or x.element_size())
        elif not held:
            return None
        else:
            size = sum(token_size(x, variant) for x in held) // READ
            if not ours and getattr(layer, "is_sliding", False) and longest is None:
                own = getattr(layer, "sliding_window", None)
                if own is None:
                    return None
                sliding.append((size, own))
            else:
                token += size
    if not state and not token and not sliding:
        return None
    return Memory(state, token, longest, tuple(sliding))


def token_size(x: torch.Tensor, variant: Variant | None) -> int:
    """Return the bytes of keys or values `[rows, heads, tokens, dim]`, as the variant stores them."""
    bits = AS_THEY_ARE if variant is None else variant.nbits
    return x[..., 0].numel() * token_bytes(x.shape[-1], x.shape[-1], bits) // 2
