"""The types of what a user gives: one check for every entrance of generation.

transformers checks some values and computes with others, until an operation fails or the result is wrong. Here, every
value that has a type is checked before the first forward pass. What is given and what the model's own generation
configuration says are checked alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from t2r.errors import T2RError
from t2r.model.modeling import option_value

LARGEST = 2**31 - 1
"""Of lengths and numbers of sequences."""
COLDEST = 1e-30
"""The smallest temperature: divided by less, logits are infinite."""


def is_whole(value: Any, least: int = 0) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= LARGEST


def is_seed(value: Any) -> bool:
    """Return whether torch takes this seed."""
    return isinstance(value, Integral) and not isinstance(value, bool) and -(2**63) <= int(value) < 2**64


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_token(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def are_tokens(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() <= 1 and is_whole_dtype(value)
    return is_token(value) or (isinstance(value, list | tuple | set) and all(map(is_token, value)))


def are_words(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(word, list | tuple) and word and are_tokens(word) for word in value
    )


def is_whole_dtype(x: Tensor) -> bool:
    return not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool


def are_functions(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(callable(part) and not isinstance(part, type) for part in value)


POSITIVE = "a whole number, at least 1 and at most 2,147,483,647", lambda value: is_whole(value, 1)
COUNT = "a whole number, at least 0 and at most 2,147,483,647", is_whole
NUMBER = "a number", is_number
YES_NO = "true or false", lambda value: isinstance(value, bool)
TOKEN = "a token (a whole number)", are_tokens
TOKENS = "a token or a list of tokens (whole numbers)", are_tokens
FUNCTIONS = "a list of functions", are_functions
TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "max_new_tokens": POSITIVE,
    "num_beams": POSITIVE,
    "num_return_sequences": POSITIVE,
    "max_length": COUNT,
    "min_length": COUNT,
    "min_new_tokens": COUNT,
    "top_k": COUNT,
    "no_repeat_ngram_size": COUNT,
    "encoder_no_repeat_ngram_size": COUNT,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "min_p": NUMBER,
    "typical_p": NUMBER,
    "epsilon_cutoff": NUMBER,
    "eta_cutoff": NUMBER,
    "length_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "do_sample": YES_NO,
    "use_cache": YES_NO,
    "renormalize_logits": YES_NO,
    "remove_invalid_values": YES_NO,
    "eos_token_id": TOKENS,
    "pad_token_id": TOKEN,
    "bos_token_id": TOKEN,
    "decoder_start_token_id": TOKENS,
    "forced_bos_token_id": TOKEN,
    "forced_eos_token_id": TOKENS,
    "suppress_tokens": TOKENS,
    "begin_suppress_tokens": TOKENS,
    "bad_words_ids": ("a list of lists of tokens", are_words),
    "early_stopping": ('true, false or "never"', lambda value: isinstance(value, bool) or value == "never"),
}
"""The options of `generate` whose type is checked. They may be None. transformers checks what they have to do with each
other."""
OBJECTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "generation_config": ("a GenerationConfig", lambda value: isinstance(value, GenerationConfig)),
    "logits_processor": FUNCTIONS,
    "stopping_criteria": FUNCTIONS,
    "prefix_allowed_tokens_fn": ("a function", callable),
    "attention_mask": (
        "a tensor of zeros and ones",
        lambda value: isinstance(value, Tensor) and not value.is_complex(),
    ),
    "decoder_input_ids": ("a tensor of tokens", lambda value: isinstance(value, Tensor) and is_whole_dtype(value)),
    "streamer": ("a streamer, with put and end", lambda value: hasattr(value, "put") and hasattr(value, "end")),
}
"""Arguments of a call that are no options."""


def refuse(name: str, allowed: str, value: Any) -> None:
    shown = f"a {type(value).__name__}" if isinstance(value, Tensor | dict) else repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    raise T2RError(f"{name} must be {allowed}; got {shown}".replace("\n", " "))


def check_options(model: Any, options: Mapping[str, Any], generation_config: Any = None, seed: Any = None) -> None:
    """Raise T2RError for an option of `generate` of another type, given or in a configuration.

    Args:
        model: the model, whose generation configuration has the values that are not given.
        options: the options of the call.
        generation_config: the default options of the caller.
        seed: a seed, or None.
    """
    if seed is not None and not is_seed(seed):
        refuse("seed", "a whole number of 64 bits", seed)
    for name, (allowed, is_allowed) in OBJECTS.items():
        if (value := options.get(name)) is not None and not is_allowed(value):
            refuse(name, allowed, value)
    config = options.get("generation_config") or generation_config
    for name, (allowed, is_allowed) in TYPES.items():
        if (value := option_value(model, config, options, name)) is not None and not is_allowed(value):
            refuse(name, allowed, value)
    temperature = option_value(model, config, options, "temperature")
    if option_value(model, config, options, "do_sample") and temperature is not None and 0 < temperature < COLDEST:
        raise T2RError(
            f"temperature must be at least {COLDEST:g}; got {temperature:g}: do_sample=False is greedy search"
        )


def own_tensors(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with copies of tensors, which the caller may change while a sequence waits."""

    def copied(value: Any) -> Any:
        if isinstance(value, ModelOutput):
            return type(value)(**{name: copied(x) for name, x in value.items()})
        return value.clone() if isinstance(value, Tensor) else value

    return {name: copied(value) for name, value in options.items()}


def check_texts(name: str, texts: Any) -> None:
    """Raise T2RError unless these are texts."""
    if isinstance(texts, str | bytes) or not hasattr(texts, "__len__") or not hasattr(texts, "__getitem__"):
        refuse(name, "a list of texts", texts)
    for text in texts:
        if not isinstance(text, str):
            refuse(f"each of {name}", "a text", text)


def check_sizes(**sizes: Any) -> None:
    """Raise T2RError unless each size is None or a positive whole number."""
    for name, number in sizes.items():
        if number is not None and not is_whole(number, 1):
            at_least = is_whole(number, -LARGEST)
            refuse(name, "at least 1" if at_least else POSITIVE[0], number)
