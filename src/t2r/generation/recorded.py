"""`generate()` of a swapped model with a recorded step.

On a CPU, `model.generate()` decodes as `Engine` does where nothing forbids it, with the same tokens. A call has an
engine of its own: nothing is kept between calls, so weights, adapters and options may change.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import GenerationMixin

from t2r import compat
from t2r.context import current
from t2r.errors import T2RError
from t2r.model.modeling import T2RModel, option_value

logger = logging.getLogger(__name__)

LEAST = {"cpu": 32}
"""The fewest new tokens for which a recording is worth its time, by device. On a GPU, a capture takes longer."""
INPUTS = ("inputs", "input_ids")
"""The names of prompts in a call of `generate`."""
NAMES = tuple(inspect.signature(GenerationMixin.generate).parameters)[1:]
unrecorded: WeakSet[Any] = WeakSet()
"""Models whose step cannot be recorded, which was said in the log."""


def generate(model: T2RModel, args: tuple[Any, ...], options: Mapping[str, Any]) -> Tensor | None:
    """Return what `generate` returns for these arguments, or None if the call must be decoded by transformers."""
    options = dict(zip(NAMES, args, strict=False)) | dict(options)
    given = [options.pop(name) for name in INPUTS if options.get(name) is not None]
    reason = why_not(model, given[0], options) if len(given) == 1 else "there is not exactly one input"
    if reason is not None:
        logger.debug("generate() runs the modules of the model: %s", reason)
        return None
    # Imported here, because they take as long to import as everything else of a model together.
    from t2r.generation.engine import Engine
    from t2r.generation.engine.beams import uses_beams

    streamer = options.pop("streamer", None)
    try:
        engine = Engine(model)
        request = engine._prepared(given[0], options)
    except T2RError as error:  # transformers has its own words for what it does not take
        logger.info("generate() runs the modules of the model: %s", error)
        return None
    if streamer is not None and uses_beams(request):
        return None
    done = engine._answer(request, streamer=streamer)
    if not engine._is_captured:
        unrecorded.add(model)
    return done.result()


def why_not(model: Any, ids: Any, options: Mapping[str, Any]) -> str | None:
    """Return why a call must be decoded by transformers, or None."""
    least = LEAST.get(model.device.type)
    if least is None or model in unrecorded:
        return "the step cannot be recorded"
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        return "there are no prompts of token ids"
    if options.get("custom_generate") is not None or options.get("past_key_values") is not None:
        return "another method decodes the call, or it continues from a cache"
    if options.get("streamer") is not None and len(ids) > 1:
        return "a streamer receives one sequence"
    if (count := new_tokens(model, ids, options)) is None or count < least:
        return "there are few tokens"
    if current("observer") is not None or torch.compiler.is_compiling() or compat.is_watched(model):
        return "hooks, modes or an observer would miss the replayed steps"
    return None


def new_tokens(model: Any, ids: Tensor, options: Mapping[str, Any]) -> int | None:
    """Return the largest number of tokens that a call generates. None: that is not a number."""
    config = options.get("generation_config")
    count = option_value(model, config, options, "max_new_tokens")
    if count is None:
        longest = option_value(model, config, options, "max_length")
        read = 1 if model.config.is_encoder_decoder else ids.shape[1]
        count = None if not isinstance(longest, int) else longest - read
    return count if isinstance(count, int) else None


T2RModel.recorded = staticmethod(generate)
