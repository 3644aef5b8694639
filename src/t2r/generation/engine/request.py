"""Preparation of a `generate` call by transformers, and the check whether the engine supports it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, StopStringCriteria
from transformers.generation import MaxLengthCriteria
from transformers.generation.configuration_utils import GenerationMode

from t2r.attention.cache import T2RCache
from t2r.attention.recurrence import computes_exactly
from t2r.errors import T2RError
from t2r.generation.engine.arguments import is_whole_dtype
from t2r.generation.state import check_source_length, check_vocabulary
from t2r.model.modeling import option_value

MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)
UNSUPPORTED = {
    "output_scores": "scores are returned",
    "output_logits": "logits are returned",
    "output_attentions": "attention weights are returned",
    "output_hidden_states": "hidden states are returned",
    "return_dict_in_generate": "return_dict_in_generate is set",
    "cache_implementation": "cache_implementation is set",
    "prefill_chunk_size": "prefill_chunk_size is set",
}
"""Options of a GenerationConfig that only `generate()` supports, with the reason to report."""
GIVEN = (
    "assistant_model",
    "inputs_embeds",
    "past_key_values",
    "custom_generate",
    "negative_prompt_ids",
    "position_ids",  # the engine computes them from the mask
)
"""Arguments of a call that only `generate()` supports."""
READ = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "encoder_outputs",
    "decoder_attention_mask",
}
"""Inputs of the forward pass that the engine supports. Calls with any other input are for `generate()`."""


class ForGenerate(T2RError):
    """Raised for calls that `generate()` supports and the engine does not. The message is the reason."""


class Request(NamedTuple):
    """A prepared call of `generate`, before the first forward pass."""

    ids: Tensor
    """The prompts, padded on the left; for an encoder-decoder, the first tokens of the decoder."""
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    inputs: dict[str, Any]
    """Further inputs of the forward pass: masks, positions, an empty cache, encoder outputs."""
    read: int = 0
    """The number of first tokens of `ids` that the state has read. They are there for processors and criteria."""

    @property
    def new_ids(self) -> Tensor:
        """The tokens to read."""
        return self.ids[:, self.read :]

    @property
    def max_length(self) -> int:
        """The maximum number of tokens. A stopping criterion that the user gives replaces that of transformers.

        `generate()` asks a criterion after a token, so one token is generated even if the prompt is longer."""
        given = [c.max_length for c in self.criteria if isinstance(c, MaxLengthCriteria)]
        return max(int(min(given, default=self.config.max_length)), self.ids.shape[1] + 1)

    @property
    def source(self) -> Tensor | None:
        """The encoded source `[rows, tokens, hidden]` of an encoder-decoder."""
        encoded = self.inputs.get("encoder_outputs")
        return None if encoded is None else encoded[0]

    @property
    def source_mask(self) -> Tensor | None:
        """The padding mask of the source."""
        if self.source is None:
            return None
        mask: Tensor | None = self.inputs.get("attention_mask")
        return torch.ones(self.source.shape[:2], device=self.source.device) if mask is None else mask


def prepare(
    model: Any, input_ids: Tensor | None, options: dict[str, Any], generation_config: GenerationConfig | None
) -> Request:
    """Prepare a call of `generate` with transformers. Its own `generation_config`, if any, is among the options.

    transformers merges and checks the options, builds the logits processors and stopping criteria, and encodes the
    source.

    Raises:
        ForGenerate: if the engine does not support the call.
        T2RError: if there are no prompts, or they have no tokens.
    """
    options = dict(options)
    for name in GIVEN:
        if options.get(name) is not None:
            raise ForGenerate(f"{name} is given")
    if input_ids is None and (not model.config.is_encoder_decoder or options.get("encoder_outputs") is None):
        raise T2RError("there are no prompts: give input_ids, or encoder_outputs of an encoder-decoder")
    tokenizer = options.pop("tokenizer", None)
    generation_config = options.pop("generation_config", None) or generation_config
    # transformers does not pass the tokenizer to custom decoding methods.
    if (strings := option_value(model, generation_config, options, "stop_strings")) is not None:
        if tokenizer is None:
            raise ValueError("stop_strings requires the tokenizer: pass tokenizer=")
        criteria = StoppingCriteriaList(options.get("stopping_criteria") or [])
        options["stopping_criteria"] = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, strings)])
        options["stop_strings"] = None
    if generation_config is not None:
        generation_config = copy.deepcopy(generation_config)
        # transformers takes the model's values where a configuration has None, but not where an option is None.
        empty = {name: value for name, value in options.items() if value is None}
        options = generation_config.update(**{n: v for n, v in options.items() if v is not None}) | empty

    def taken(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **inputs: Any,
    ) -> Request:
        return Request(input_ids, logits_processor, stopping_criteria, generation_config, inputs)

    request: Request = model.generate(input_ids, generation_config=generation_config, custom_generate=taken, **options)
    if (reason := why_not(request.config) or why_not_read(request.inputs)) is not None:
        raise ForGenerate(reason)
    return request


def check_tokens(model: Any, input_ids: Any) -> None:
    """Raise T2RError if these are not prompts that the model can read."""
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
        shape = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else None
        what = f"a {type(input_ids).__name__}" if shape is None else f"one of shape {shape}"
        raise T2RError(
            f"input_ids must be a tensor [batch, tokens]; got {what} (tokenizer(texts, return_tensors='pt') makes one)"
        )
    if not is_whole_dtype(input_ids):
        raise T2RError(f"input_ids must be tokens (whole numbers); got {str(input_ids.dtype).removeprefix('torch.')}")
    if input_ids.shape[0] == 0:
        raise T2RError("the batch has no prompts: give at least one")
    if input_ids.shape[1] == 0:
        raise T2RError("a prompt has no tokens: give at least one, for example the BOS token")
    least, most = (int(x) for x in input_ids.aminmax())
    if least < 0:
        raise T2RError(f"input_ids has token {least}: tokens are not negative")
    check_vocabulary(model, [most])
    check_source_length(model, input_ids.shape[1])


def checked_history(model: Any, history: Any, state: Any) -> Tensor:
    """Return the tokens that a state has read, `[1, tokens]`. Raises T2RError if there are more or fewer."""
    history = history[None] if isinstance(history, Tensor) and history.dim() == 1 else history
    check_tokens(model, history)
    read = state.get_seq_length() if isinstance(state, T2RCache) else 0
    if history.shape != (1, read):
        raise T2RError(
            f"history has shape {tuple(history.shape)}: it must be the {read} tokens that the state has read"
        )
    return history.to(model.device, torch.long)


def check_padding(request: Request) -> None:
    """Raise T2RError for prompts that end with padding, after which `generate` would continue the padding."""
    mask = request.inputs.get("attention_mask")
    if mask is None or request.source is not None or bool(mask[:, -1].all()):
        return
    row = int((mask[:, -1] == 0).nonzero()[0])
    if not bool(mask[row].any()):
        raise T2RError("a prompt has padding only: give at least one token, for example the BOS token")
    raise T2RError("a prompt ends with padding: pad prompts on the left (padding_side='left' of a tokenizer)")


def token_list(tokens: int | list[int] | None) -> list[int]:
    """Return the tokens of an option such as `eos_token_id` as a list."""
    return [] if tokens is None else [tokens] if isinstance(tokens, int) else list(tokens)


def why_not(config: GenerationConfig) -> str | None:
    """Return why the engine does not support this configuration, or None if it does."""
    mode = config.get_generation_mode()
    if mode not in MODES:
        return f"{mode.value.replace('_', ' ')} is requested"
    if config.use_cache is False:
        return "use_cache is False"
    return next((why for name, why in UNSUPPORTED.items() if getattr(config, name, None)), None)


def why_not_read(inputs: dict[str, Any]) -> str | None:
    """Return why the engine does not support these inputs of the forward pass, or None if it does."""
    for name, value in inputs.items():
        # Models that read images have an empty dictionary of encoded images for text.
        if name not in READ and value is not None and not (isinstance(value, dict) and not value):
            return f"{name} is given"
    mask = inputs.get("decoder_attention_mask")
    if mask is not None and not bool(mask.all()):
        return "decoder_attention_mask has padding"  # a step has no mask of its own for each row
    return None


def not_now(model: Any) -> str | None:
    """Return why the engine does not support the model in its current state, or None if it does."""
    if model.training:
        return "the model is in training mode"
    if torch.is_autocast_enabled(model.device.type):  # a captured step would keep its dtype
        return "autocast is enabled"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "the model is on several devices"
    return "recurrent layers compute exact attention" if computes_exactly(model) else None


def no_static_cache(model: Any) -> str | None:
    """Return why the model has no static cache, or None if it has one."""
    if not model.grows() and not model.grows(cross=True):
        return None
    try:
        model.make_static_cache(rows=1, max_length=1, source_length=1)
    except T2RError as reason:
        return str(reason)
    return None


def accepts(model: Any, name: str) -> bool:
    """Return whether the model's forward has an argument of this name."""
    return name in inspect.signature(model.forward).parameters


def counts_tokens(model: Any) -> bool:
    """Return whether positions are not an input of the model: it counts the tokens of its cache, padding too."""
    return bool(model.config.is_encoder_decoder) or not accepts(model, "position_ids")


def seeded(seed: int | None, device: torch.device) -> torch.Generator | None:
    return None if seed is None else torch.Generator(device).manual_seed(seed)


@contextmanager
def seeding(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seed torch's default generator inside the `with` block, and restore it afterwards. None: leave it as it is."""
    with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        yield
