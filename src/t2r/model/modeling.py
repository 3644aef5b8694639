"""A swapped model is in every way a Hugging Face model: it generates, saves and loads as one.

Its class inherits the base model's class and `T2RModel`. `swap` gives it to a model in place; loading a saved folder
builds it.
"""

from __future__ import annotations

import functools
import inspect
import os
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from t2r import __version__, architectures
from t2r.attention.cache import RecurrentLayer, T2RCache, T2REncoderDecoderCache, load_state
from t2r.attention.masks import refuse_full_mask
from t2r.attention.recurrence import NAME
from t2r.config import OPTIONS, T2RConfig
from t2r.errors import T2RError
from t2r.model.card import model_card
from t2r.storage import write_text
from t2r.surgery.adapters import family_of, model_mixins
from t2r.surgery.install import install

REMOTE_CODE = "modeling_t2r.py"
"""Saved beside the weights, so that `trust_remote_code=True` finds us without an `import t2r`."""


class T2RModel:
    """What a swapped model has beyond its base class. Never used alone: see `t2r_class`."""

    config_class: ClassVar[type[PreTrainedConfig]] = T2RConfig
    base_class: ClassVar[type[PreTrainedModel]]
    auto_class: ClassVar[str]
    t2r_config: T2RConfig
    config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        """Called while loading: `config` is the base model's, with ours attached for the passage."""
        t2r_config = config.__dict__.pop("_t2r_config")
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        install(self, t2r_config)  # type: ignore[arg-type]
        self.t2r_config = t2r_config

    # --- Forward --------------------------------------------------------------------------------------------

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The base model's forward, with a cache of the right kind and what cannot be done refused."""
        inputs = dict(zip(self._forward_names, args, strict=False)) | kwargs
        for name in ("attention_mask", "decoder_attention_mask"):
            refuse_full_mask(inputs.get(name))
        if inputs.get("output_attentions"):
            raise T2RError("output_attentions: a recurrent layer never forms attention weights")
        if inputs.get("past_key_values") is None:
            packed = is_packed(inputs)
            if inputs.get("use_cache") is None:
                # In training a cache would only keep every state alive for nothing.
                inputs["use_cache"] = bool(getattr(self.config, "use_cache", True)) and not (self.training or packed)
            if inputs["use_cache"]:
                if packed:
                    raise T2RError("packed documents (position_ids that restart) need use_cache=False")
                inputs["past_key_values"] = self.make_cache()
        note_padding(inputs)
        return super().forward(**inputs)  # type: ignore[misc]

    _forward_names: ClassVar[tuple[str, ...]]
    training: bool

    def make_cache(self) -> T2RCache | T2REncoderDecoderCache:
        """An empty cache: recurrent layers, and growing ones where softmax attention was kept."""
        model: Any = self
        stock: list[Any] = DynamicCache(config=self.config.get_text_config(decoder=True)).layers
        count = len(family_of(model).decoder_layers(model))
        kept = self.t2r_config.kept_layers(count)
        own = T2RCache([stock[i] if i in kept else RecurrentLayer() for i in range(count)], model)
        if not self.config.is_encoder_decoder:
            return own
        cross = T2RCache([DynamicLayer() if i in kept else RecurrentLayer() for i in range(count)], model)
        return T2REncoderDecoderCache(own, cross, model)

    def load_state(self, path: str | os.PathLike[str]) -> T2RCache | T2REncoderDecoderCache:
        """A cache that was saved with `cache.save`, to generate on from."""
        return load_state(Path(path), self)

    @torch.no_grad()
    def continue_from(self, cache: T2RCache, input_ids: Tensor, **options: Any) -> Tensor:
        """Generate from a state and new tokens alone: what made the state need not be there any more.

        `generate` itself wants to see every token since the first. The state is left as it is: ask it again. Returns
        the new tokens and their continuation; options are those of `generate`.
        """
        if self.config.is_encoder_decoder:
            raise T2RError("continue_from is for language models; give an encoder-decoder's cache to generate")
        rows, past, model = input_ids.shape[0], cache.get_seq_length(), cast(Any, self)
        if rows != cache.rows:
            cache = cache.fork(rows) if cache.rows == 1 else cache
        if rows != cache.rows:
            raise T2RError(f"{rows} prompts for a state of {cache.rows} sequences: fork or stack the state to match")
        defaults = options.get("generation_config") or model.generation_config
        ways = [options.get(n) or getattr(defaults, n, None) or 1 for n in ("num_beams", "num_return_sequences")]
        cache = cache.fork(max(ways))
        unseen = input_ids.new_full((rows, past), int(self.config.pad_token_id or 0))  # never looked at
        mask = options.pop("attention_mask", torch.ones_like(input_ids))
        mask = torch.cat([cache.attention_mask()[:: max(ways)].to(mask), mask], dim=1)
        for name in {"max_length", "min_length"} & set(options):
            options[name] += past
        ids = torch.cat([unseen, input_ids], dim=1)
        out = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
        if not isinstance(out, Tensor):  # return_dict_in_generate
            out.sequences = out.sequences[:, past:]
            return out
        return out[:, past:]

    def train(self, mode: bool = True) -> Self:
        if mode and getattr(self, "t2r_config", None) is not None and self.t2r_config.merged:
            raise T2RError(
                "a merged model does not train: its queries and keys are folded into the features, and what they "
                "shared is gone. Train the model it was merged from, then merge again"
            )
        return super().train(mode)  # type: ignore[misc]

    # --- Generation -----------------------------------------------------------------------------------------

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise T2RError(
                f"cache_implementation={generation_config.cache_implementation!r} is for keys and values; a "
                "recurrent state is of fixed size already: leave it unset"
            )
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = cache = self.make_cache()
            if getattr(generation_config, "is_assistant", False):  # its guesses will be taken back
                cache.activate_past_recording()
            return None
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Continuing an encoder-decoder from a cache, transformers feeds all tokens again, not the new ones."""
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)  # type: ignore[misc]
        cache, tokens = inputs.get("past_key_values"), inputs.get("decoder_input_ids")
        if cache is not None and tokens is not None:
            new = input_ids.shape[1] - cache.get_seq_length()
            if 0 < new < tokens.shape[1]:
                inputs["decoder_input_ids"] = tokens[:, -new:]
        return inputs

    def _validate_generated_length(
        self, generation_config: GenerationConfig, input_ids_length: int, has_default_max_length: bool
    ) -> None:
        """Called before the first token: the last moment to say that there are not enough positions."""
        super()._validate_generated_length(generation_config, input_ids_length, has_default_max_length)  # type: ignore[misc]
        family, length = family_of(self), generation_config.max_length  # type: ignore[arg-type]
        limit = family.max_positions(self)  # type: ignore[arg-type]
        if limit is not None and length is not None and length > limit:
            raise T2RError(
                f"max_length {length} is beyond the {limit} positions that this {family.model_type} model has learned"
            )
        if length is not None:
            family.extend_positions(self, length)  # type: ignore[arg-type]

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        if attn_implementation != NAME:
            raise T2RError(
                f"attn_implementation={attn_implementation!r} would put softmax attention back into a recurrent "
                "model; to compare with it, use t2r.exact_attention(model)"
            )

    # --- Save and load --------------------------------------------------------------------------------------

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """As any model's, but the configuration says that this is a t2r model and what it was made from.

        A plain load under the base model's type would rebuild softmax attention."""
        if Path(save_directory).is_file():
            raise T2RError(f"{save_directory} is a file: name a folder to save to")
        # transformers asks the configuration to save itself, before the weights are written and anything is uploaded.
        fields = vars(self.config)
        fields["save_pretrained"] = lambda folder, **_: self.describe(Path(folder))
        try:
            super().save_pretrained(save_directory, **kwargs)  # type: ignore[misc]
        finally:
            del fields["save_pretrained"]

    def describe(self, folder: Path) -> None:
        """Write everything but the weights into a folder."""
        write_text(folder / "config.json", self.saved_config().to_json_string(use_diff=False))
        task = self.task_class().__name__
        code = f'from t2r import T2RConfig, {task}\n\n__all__ = ["T2RConfig", "{task}"]\n'
        write_text(folder / REMOTE_CODE, f'"""Loads this model by t2r: pip install t2r."""\n\n{code}')
        if not (folder / "README.md").exists():
            write_text(folder / "README.md", model_card(self))

    def saved_config(self) -> T2RConfig:
        """The configuration to save: our options, and the base model's configuration within."""
        base = self.config.to_dict()
        passing = {"attn_implementation", "save_pretrained"}
        for name in [name for name in base if name.startswith("_") or name in passing]:
            del base[name]  # of this process and machine, not of the model
        base["architectures"] = [self.base_class.__name__]
        options = {name: getattr(self.t2r_config, name) for name in (*OPTIONS, "merged")}
        task = self.task_class().__name__
        module = Path(REMOTE_CODE).stem
        config = T2RConfig(
            **options,
            base_config=base,
            t2r_version=__version__,
            architectures=[task],
            dtype=self.dtype,  # type: ignore[attr-defined]
        )
        config.auto_map = {"AutoConfig": f"{module}.T2RConfig", self.auto_class: f"{module}.{task}"}
        return config

    @classmethod
    def task_class(cls) -> type[T2RModel]:
        return T2RForSeq2SeqLM if issubclass(cls, T2RForSeq2SeqLM) else T2RForCausalLM

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *args: Any,
        config: Any = None,
        **kwargs: Any,
    ) -> Self:
        """Load a saved model. Strict: a tensor that is missing, unexpected or misshaped is an error."""
        source = pretrained_model_name_or_path
        if not isinstance(config, T2RConfig):
            hub = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
            config = T2RConfig.from_pretrained(source, **{k: kwargs[k] for k in hub if k in kwargs})
        if config.base_config is None:
            raise T2RError(f"{source} is not a saved t2r model: its configuration has no base_config")
        for name in ("trust_remote_code", "attn_implementation"):
            kwargs.pop(name, None)
        kwargs["ignore_mismatched_sizes"] = True  # transformers' refusal would not say which; ours does
        wants_info = kwargs.pop("output_loading_info", False)
        recurrent, base = cls.building(config)
        load = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]
        try:
            model, info = load(recurrent, source, *args, config=base, output_loading_info=True, **kwargs)
        except (RuntimeError, OSError, ValueError) as error:
            raise T2RError(f"{source} cannot be loaded: {error}") from error
        except Exception as error:
            if (
                type(error).__module__.split(".")[0] != "safetensors"
                and "safetensors" not in type(error).__name__.lower()
            ):
                raise
            raise T2RError(f"{source} cannot be loaded: its weights are damaged ({error})") from error
        refuse_incomplete(str(source), info)
        return (model, info) if wants_info else model  # type: ignore[return-value]

    @classmethod
    def _from_config(cls, config: T2RConfig, **kwargs: Any) -> Self:
        """A model of this shape with random weights."""
        kwargs.pop("attn_implementation", None)
        recurrent, base = cls.building(config)
        return PreTrainedModel._from_config.__func__(recurrent, base, **kwargs)  # type: ignore[attr-defined]

    @classmethod
    def building(cls, config: T2RConfig) -> tuple[type[T2RModel], PreTrainedConfig]:
        """The class to build and the configuration to build it from."""
        base = config.base_config
        names = base.architectures or []
        base_class = next((found for found in map(model_class, names) if found is not None), None)
        if base_class is None:
            raise T2RError(f"this transformers has no model class {' or '.join(names) or '(none is named)'}")
        recurrent = t2r_class(base_class)
        if not issubclass(recurrent, cls):
            raise T2RError(f"this is a {recurrent.task_class().__name__}, not a {cls.__name__}")
        if base.dtype is None:
            base.dtype = config.dtype
        base.__dict__["_t2r_config"] = config
        return recurrent, base


class T2RForCausalLM(T2RModel):
    """A swapped language model."""

    auto_class = "AutoModelForCausalLM"


class T2RForSeq2SeqLM(T2RModel):
    """A swapped encoder-decoder: its decoder is recurrent, its encoder stays as it was."""

    auto_class = "AutoModelForSeq2SeqLM"


def model_class(name: str) -> Any:
    """The model class of this name, transformers' or our own; None if there is none."""
    return getattr(transformers, name, None) or getattr(architectures, name, None)


@functools.cache
def t2r_class(base: Any) -> type[T2RModel]:
    """The class of a swapped `base` model class: everything that it is, and recurrent."""
    if not base.can_generate():
        raise T2RError(
            f"{base.__name__} does not generate text: load the model with AutoModelForCausalLM or AutoModelForSeq2SeqLM"
        )
    bases = (*model_mixins(base), base)
    parameters = [p.name for p in inspect.signature(bases[0].forward).parameters.values()][1:]
    seq2seq = "decoder_input_ids" in parameters

    @functools.wraps(bases[0].forward)  # Trainer and generate read the signature
    def forward(self: T2RModel, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    members = {
        "__module__": __name__,
        "__doc__": f"{base.__name__}, with recurrent attention.",
        "base_class": base,
        "config_class": base.config_class,
        "forward": forward,
        "_forward_names": tuple(parameters),
    }
    task = T2RForSeq2SeqLM if seq2seq else T2RForCausalLM
    return type(f"T2R{base.__name__}", (task, *bases), members)


def __getattr__(name: str) -> Any:
    """Pickle finds the classes that `t2r_class` makes by name, in a process that has not made them yet."""
    base = model_class(name.removeprefix("T2R")) if name.startswith("T2R") else None
    if base is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return t2r_class(base)


def is_packed(inputs: dict[str, Any]) -> bool:
    """Are these documents one after another in a row, told apart by position ids that restart?"""
    positions = inputs.get("position_ids")
    if positions is None or inputs.get("attention_mask") is not None or positions.shape[-1] == 1:
        return False
    return torch.compiler.is_compiling() or bool((positions.diff(dim=-1) != 1).any())


def note_padding(inputs: dict[str, Any]) -> None:
    """An empty cache of ours learns how much of what it is about to read is padding."""
    cache, mask = inputs.get("past_key_values"), inputs.get("attention_mask")
    if isinstance(cache, T2RCache) and mask is not None and cache.get_seq_length() == 0:
        cache.padding = mask.shape[1] - mask.sum(dim=1)


def refuse_incomplete(source: str, info: Any) -> None:
    """transformers only warns of tensors that do not fit; a model that is not what was saved is an error."""
    problems = []
    for key, words in (
        ("missing_keys", "missing"),
        ("unexpected_keys", "unexpected"),
        ("mismatched_keys", "of another shape"),
        ("error_msgs", "not readable"),
    ):
        found = sorted(str(x[0] if isinstance(x, tuple) else x) for x in (info.get(key) or ()))
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            problems.append(f"{words}: {', '.join(found[:3])}{more}")
    if problems:
        raise T2RError(f"{source} does not hold the model that its configuration describes; {'; '.join(problems)}")


def register() -> None:
    """Make `AutoConfig` and the Auto models know us."""
    transformers.AutoConfig.register("t2r", T2RConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(T2RConfig, T2RForCausalLM, exist_ok=True)
    transformers.AutoModelForSeq2SeqLM.register(T2RConfig, T2RForSeq2SeqLM, exist_ok=True)
