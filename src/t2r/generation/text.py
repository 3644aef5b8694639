"""Batched completion and translation of texts, with swapped and other models."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from t2r import ops
from t2r.attention.cache import T2RCache, cache_bytes
from t2r.capacity import refuse_beyond_memory
from t2r.data.languages import set_languages
from t2r.data.text import check_unicode
from t2r.errors import T2RError
from t2r.generation.engine import Engine, ForGenerate, engine_for
from t2r.generation.engine.arguments import check_options, check_texts, refuse
from t2r.generation.engine.request import option_value, token_list
from t2r.generation.state import check_source_length, check_vocabulary, refuse_stateless
from t2r.generation.turns import by_user, next_turn, refuse_no_template, rendered, transcript_of
from t2r.hub import load_model, need_tokenizer
from t2r.model.modeling import T2RModel
from t2r.options import GenerationOptions, RunOptions, check, options_of
from t2r.options.entrance import entrance
from t2r.surgery.adapters import FAMILIES, family_of, repaired

# Options that have no effect without sampling or beam search. transformers would only warn.
NEEDS_SAMPLING = ("temperature", "top_p", "top_k")
NEEDS_BEAMS = ("length_penalty",)


@dataclass(frozen=True)
class Completion:
    """The generated text of one prompt, with statistics."""

    prompt: str
    text: str
    """The generated text, without the prompt."""
    alternatives: list[str]
    """Further generated texts, if `num_return_sequences` is above 1."""
    prompt_tokens: int
    new_tokens: int
    """Tokens in the text and its alternatives."""
    tokens_per_second: float
    """Speed of the whole batch, including the prefill."""
    state_bytes: int
    """Size of the cache at the end, for this prompt with all its beams."""
    dtype: str
    device: str
    backend: str | None
    """The backend used for the prompt; None if only softmax attention reads it."""


@entrance(RunOptions)
def generate(
    model: str | Path | PreTrainedModel,
    prompts: str | Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: str = RunOptions.dtype,
    device: str = RunOptions.device,
    revision: str | None = None,
    trust_remote_code: bool = False,
    state: T2RCache | str | Path | None = None,
    source_language: str | None = None,
    target_language: str | None = None,
    on_completion: Callable[[Completion], None] | None = None,
    **options: Any,
) -> list[Completion]:
    """Complete prompts, or translate them if the model is an encoder-decoder.

        t2r.generate("gpt2-rnn", "Once upon a time", do_sample=True)[0].text

    Args:
        model: a folder, a name on the Hub, or a model object.
        prompts: one prompt or several. The completion of a blank prompt is empty.
        tokenizer: the tokenizer. Required if `model` is a model object.
        dtype, device, revision, trust_remote_code: how to load a model given by name; see `t2r.load`.
        state: a state, or the path of a saved state, from which each prompt continues. It has one sequence, or as many
            as there are prompts.
        source_language, target_language: for multilingual translation models, codes of the model's tokenizer. They stay
            set in the tokenizer and in the model's generation configuration.
        on_completion: called with each completion as soon as it is finished.
        options: options of `complete` (`batch_size`, `chat`, `seed`, `on_text`) and of `model.generate`.

    Returns a `Completion` for each prompt, in order.
    """
    if not isinstance(model, PreTrainedModel):
        hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        source = str(model)
        model = load_model(source, dtype=dtype, device=device, **hub)
        tokenizer = tokenizer or need_tokenizer(source, **hub)
    model = repaired(model)
    if tokenizer is None:
        raise T2RError("a model given as an object requires the tokenizer argument")
    set_languages(model, tokenizer, source_language, target_language)
    if isinstance(state, str | Path):
        refuse_stateless(model)
        state = cast(T2RCache, cast(T2RModel, model).load_state(state))
    texts = [prompts] if isinstance(prompts, str) else prompts
    done = []
    for completion in complete(model, tokenizer, texts, state=state, **options):
        done.append(completion)
        if on_completion is not None:
            on_completion(completion)
    return done


def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    batch_size: int = RunOptions.batch_size,
    chat: bool = False,
    seed: int | None = None,
    on_text: Callable[[str], None] | None = None,
    state: T2RCache | None = None,
    **options: Any,
) -> Iterator[Completion]:
    """Yield a `Completion` for each prompt, in order.

    The completion of a blank prompt is empty, so that lines of output correspond to lines of input.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        prompts: the prompts.
        batch_size: prompts per batch.
        chat: whether each prompt is a user message, to be formatted with the tokenizer's chat template. After a state,
            it continues the conversation that the state is in, or begins one.
        seed: random seed for sampling.
        on_text: called with each piece of text as it is generated. Requires a single prompt and no beam search.
        state: a state from which each prompt continues, of one sequence or of as many as there are prompts. It is not
            modified.
        options: options of `model.generate`.
    """
    check_texts("prompts", prompts)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        refuse("tokenizer", "a tokenizer of transformers", tokenizer)
    if state is not None:
        refuse_stateless(model)
        if not isinstance(state, T2RCache):
            refuse("state", "a T2RCache, or the path of a saved state", state)
        state.check_prompts(len(prompts))
    check(RunOptions, {"batch_size": batch_size, "seed": seed})
    options = checked_options(model, options)
    ids = [encode(tokenizer, prompt, chat, state) if prompt.strip() else [] for prompt in prompts]
    for row in ids:
        check_vocabulary(model, row)
    check_lengths(model, ids, options)
    check_rows(model, min(batch_size, max(1, len(ids))), options)
    if seed is not None:
        torch.manual_seed(seed)
    if on_text is not None:
        options["streamer"] = Stream(tokenizer, on_text)
    engine = engine_for(model)
    several = option(model, options, "num_return_sequences") or 1
    for start in range(0, len(prompts), batch_size):
        batch = range(len(prompts))[start : start + batch_size]
        real = [i for i in batch if ids[i]]
        done: dict[int, Completion] = {}
        if real:
            given = [prompts[i] for i in real], [ids[i] for i in real]
            own = state
            if state is not None and state.rows > 1:
                own = state.fork()
                own.batch_select_indices(torch.tensor(real))
            run = complete_batch(model, tokenizer, *given, options, own, engine)
            done = dict(zip(real, run, strict=True))
        for i in batch:
            yield done.get(i) or Completion(prompts[i], "", [""] * (several - 1), 0, 0, 0.0, 0, *setting(model))


def complete_batch(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    rows: list[list[int]],
    options: dict[str, Any],
    state: T2RCache | None = None,
    engine: Engine | None = None,
) -> list[Completion]:
    """Complete one batch of prompts, given as texts and as token ids."""
    seq2seq = model.config.is_encoder_decoder
    stops, pad = special_tokens(model, tokenizer, options)
    input_ids, mask = (x.to(model.device) for x in padded(rows, pad, left=not seq2seq))
    options = {"attention_mask": mask, "pad_token_id": pad, "tokenizer": tokenizer, **options}
    began = time.perf_counter()
    with refused_options():
        sequences, held = run(model, engine, input_ids, state, options)
    new = sequences[:, 1 if seq2seq else input_ids.shape[1] :].tolist()  # a decoder starts with one token
    seconds = time.perf_counter() - began
    new = [until_stop(row, stops) for row in new]
    texts = tokenizer.batch_decode(new, skip_special_tokens=True)
    each = len(new) // len(rows)
    how, completions = setting(model), []
    for i, prompt in enumerate(prompts):
        own = slice(i * each, (i + 1) * each)
        completions.append(
            Completion(
                prompt,
                texts[own][0],
                texts[own][1:],
                len(rows[i]),
                sum(map(len, new[own])),
                sum(map(len, new)) / seconds,
                held // len(rows),
                *how,
            )
        )
    return completions


@contextmanager
def refused_options() -> Iterator[None]:
    """Turn the errors of transformers for incompatible options into T2RError."""
    try:
        yield
    except T2RError:
        raise
    except ValueError as error:
        raise T2RError(f"cannot generate: {error}") from error


def run(
    model: Any, engine: Engine | None, input_ids: Tensor, state: T2RCache | None, options: dict[str, Any]
) -> tuple[Tensor, int]:
    """Return the sequences and the size of the cache in bytes. Uses the engine if it supports the options."""
    if engine is not None:
        try:
            done = engine._attempt(input_ids, state=state, **options)
            return done.result(), engine._state_bytes(done, state)
        except ForGenerate as reason:
            engine._say_elsewhere(reason)
    options = {"return_dict_in_generate": True, **options}
    if state is None:
        out = model.generate(input_ids, **options)
    else:
        out = model.continue_from(state, input_ids, **options)
    return out.sequences, 0 if out.past_key_values is None else cache_bytes(out.past_key_values)


def setting(model: Any) -> tuple[str, str, str | None]:
    """Return the dtype, the device, and the backend for prompts."""
    return str(model.dtype).removeprefix("torch."), str(model.device), backend_of(model)


def backend_of(model: Any) -> str | None:
    """Return the backend that reads prompts, in the cross attention of an encoder-decoder. None: softmax reads them."""
    if not isinstance(model, T2RModel):
        return None
    swapped = cast(Any, model)
    family, source = model.t2r_family, swapped.config.is_encoder_decoder
    for site in family.sites(swapped):
        feature_map = getattr(site.module, "feature_map", None)
        if feature_map is not None and site.cross == source:
            return ops.choose(
                swapped.device,
                causal=not source,
                dtype=swapped.dtype,
                feature=feature_map.feature_size,
                value=family.shape(site.module).head_dim,
                decay=feature_map.decay is not None,
                signed=feature_map.signed,
            )
    return None


def option(model: Any, options: Mapping[str, Any], name: str) -> Any:
    """Return the value of an option of `generate`, or its default in the given configuration or the model's."""
    return option_value(model, options.get("generation_config"), options, name)


def special_tokens(
    model: Any, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None
) -> tuple[list[int], int]:
    """Return the stop tokens and a padding token. Any padding token works, because padding is masked."""
    options = options or {}
    stops, pad = token_list(option(model, options, "eos_token_id")), option(model, options, "pad_token_id")
    return stops, next((p for p in (pad, tokenizer.pad_token_id, *stops) if p is not None), 0)


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool, state: T2RCache | None = None) -> list[int]:
    """Return the token ids of a prompt, after a state. Special tokens are added only if it begins a text."""
    check_unicode(prompt, "the prompt")
    if not chat:
        return list(tokenizer(prompt, add_special_tokens=state is None).input_ids)
    refuse_no_template(tokenizer)
    said = transcript_of(state, tokenizer)
    text = rendered(tokenizer, said.messages, prompt, "the prompt")
    new = next_turn(tokenizer, said, text, [by_user(prompt)])
    return list(tokenizer(new, add_special_tokens=False).input_ids)  # the template has added them


def padded(rows: Sequence[list[int]], pad: int, left: bool) -> tuple[Tensor, Tensor]:
    """Return padded token ids and their mask `[batch, longest]`. Prompts of a decoder are padded on the left."""
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    longest = int(lengths.max())
    column = torch.arange(longest)
    real = column >= longest - lengths if left else column < lengths
    ids = torch.full(real.shape, pad)
    ids[real] = torch.tensor([token for row in rows for token in row])
    return ids, real.long()


def until_stop(row: list[int], stops: list[int]) -> list[int]:
    """Return a row up to and including the first stop token."""
    ends = [i + 1 for i, token in enumerate(row) if token in stops]
    return row[: ends[0]] if ends else row


def checked_options(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options for `model.generate`, with a default length.

    Raises T2RError for options of another type, or without effect."""
    check_options(model, options)
    known = options_of(GenerationOptions)
    for name, value in options.items():
        if name in known:  # transformers checks the others
            known[name].check(value)
    if given_length(options) is None:
        options = {"max_new_tokens": GenerationOptions.max_new_tokens} | options
    if not option(model, options, "do_sample"):
        for name in NEEDS_SAMPLING:
            if name in options:
                raise T2RError(f"{name} is for sampling: set do_sample too (--do-sample)")
    if (option(model, options, "num_beams") or 1) < 2:
        for name in NEEDS_BEAMS:
            if name in options:
                raise T2RError(f"{name} is for beam search: set num_beams to 2 or more too (--num-beams)")
    return options


def check_rows(model: Any, count: int, options: Mapping[str, Any]) -> None:
    """Raise T2RError if the sequences of a batch, with all beams, need more memory than there is."""
    beams, several = (option(model, options, name) or 1 for name in ("num_beams", "num_return_sequences"))
    rows, size = count * max(beams, several), getattr(model.config.get_text_config(), "vocab_size", None) or 1
    # Logits and their logarithms, in float32.
    refuse_beyond_memory(rows * 8 * size, model.device, f"{rows:,} sequences (num_beams={beams:,}) need")


def given_length(options: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the name and value of the option, or the field of the given configuration, that limits the length."""
    config = options.get("generation_config")
    for name in ("max_new_tokens", "max_length"):  # as in transformers, the first has precedence
        for value in (options.get(name), getattr(config, name, None)):
            if value is not None:
                return name, value
    return None


def check_lengths(model: Any, ids: list[list[int]], options: Mapping[str, Any]) -> None:
    """Raise T2RError if the model has too few positions, instead of an index error during generation."""
    longest = max(map(len, ids), default=0)
    check_source_length(model, longest)
    if isinstance(model, T2RModel) or model.config.model_type not in FAMILIES:
        return  # a swapped model has its own check
    limit = family_of(model).max_positions(model)
    name, wanted = given_length(options) or ("max_length", 0)
    if name == "max_new_tokens":
        wanted += 1 if model.config.is_encoder_decoder else longest
    if limit is not None and wanted > limit:
        raise T2RError(f"{wanted} tokens are beyond the {limit} positions of this model: generate fewer tokens")
    family_of(model).extend_positions(model, wanted)


class Stream(TextStreamer):
    """Calls `on_text` with each piece of text once it is final."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.on_text(text)
