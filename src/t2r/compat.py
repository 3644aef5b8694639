"""The boundary to transformers: every name that is private there, or differs between its versions, is used here only.

Each has a test in `tests/test_compat.py`, which runs on the oldest and the newest supported transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

# --- Attention ----------------------------------------------------------------------------------------------


def attention_implementation(model: PreTrainedModel) -> str | None:
    """The name of the attention function that a model uses."""
    return model.config._attn_implementation


def requested_attention(config: Any) -> str | None:
    """The attention function that a model was to be loaded with: the Auto classes put it into the configuration."""
    return config._attn_implementation


def set_attention_implementation(model: nn.Module, name: str | None) -> None:
    """Make every part of a model use this attention function. T5's encoder and decoder have a configuration each.

    `set_attn_implementation` of transformers refuses models that are not on the attention interface (FSMT), whose
    attention is exchanged all the same."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.config._attn_implementation = name


def on_attention_interface(model: PreTrainedModel) -> bool:
    return bool(model._supports_attention_backend)


# --- What a model is asked ------------------------------------------------------------------------------------


class ModelHooks:
    """Private methods of transformers' models, answered by methods of ours with names of their own."""

    @classmethod
    def building(cls, config: Any, options: dict[str, Any]) -> tuple[Any, Any]:
        """The class to build for a configuration, and the configuration to build it from."""
        raise NotImplementedError

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        """A model of this shape with random weights; the Auto classes call it."""
        model_class, base = cls.building(config, kwargs)
        return super(ModelHooks, model_class)._from_config(base, **kwargs)  # type: ignore[misc]

    def start_cache(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], rows: int, length: int
    ) -> bool:
        """Put a cache into `model_kwargs`, for so many rows and tokens. False: leave it to transformers."""
        raise NotImplementedError

    def check_generated_length(self, length: int) -> None:
        """Called before the first token, with the length of the longest sequence that may be generated."""
        raise NotImplementedError

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        if self.start_cache(generation_config, model_kwargs, rows, max_cache_length):
            return None
        rest = (generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        return super()._prepare_cache_for_generation(*rest)  # type: ignore[misc]

    def _validate_generated_length(
        self, generation_config: GenerationConfig, input_ids_length: int, has_default_max_length: bool
    ) -> None:
        super()._validate_generated_length(generation_config, input_ids_length, has_default_max_length)  # type: ignore[misc]
        if generation_config.max_length is not None:
            self.check_generated_length(generation_config.max_length)


def prompt_length(generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> int | None:
    """The length of the attention mask that `generate` was given, None if it is unknown.

    A mask of ones is dropped before the cache is made; its length is then kept in the generation configuration."""
    mask = model_kwargs.get("attention_mask")
    if mask is not None:
        return int(mask.shape[1])
    length: int | None = getattr(generation_config, "_mask_length", None)
    return length


def is_assistant(generation_config: GenerationConfig) -> bool:
    """Whether this call of `generate` guesses for a larger model, so that some of its tokens will be taken back."""
    return bool(getattr(generation_config, "is_assistant", False))


# --- Models by name -----------------------------------------------------------------------------------------


def is_causal_language_model(config_class: type) -> bool:
    """Whether transformers has a language model for this class of configuration."""
    return config_class in AutoModelForCausalLM._model_mapping


def build_from_config(model_class: Any, config: Any, **kwargs: Any) -> Any:
    """A model of this class with random weights, as the Auto classes build it."""
    return model_class._from_config(config, **kwargs)


def announce_to_pipelines(class_name: str, seq2seq: bool) -> None:
    """Make `pipeline()` know a class of model by its name. It would print that the model is not supported."""
    names = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if seq2seq else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    names.setdefault(class_name, class_name)


# --- Trainer ------------------------------------------------------------------------------------------------


class TrainerHooks:
    """Private methods of Trainer around its checkpoints, answered by methods of ours with names of their own."""

    args: Any

    def save_checkpoint(self, save: Callable[[], None]) -> None:
        """Write a checkpoint by calling `save`."""
        raise NotImplementedError

    def save_weights(self, folder: Path) -> bool:
        """Write what a checkpoint needs of the model. False: leave it to Trainer."""
        raise NotImplementedError

    def load_weights(self, folder: Path) -> bool:
        """Read what `save_weights` wrote. False: leave it to Trainer."""
        raise NotImplementedError

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        save = super()._save_checkpoint  # type: ignore[misc]
        self.save_checkpoint(lambda: save(*args, **kwargs))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if not self.save_weights(Path(output_dir or str(self.args.output_dir))):
            super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.load_weights(Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]


def use_one_gpu(arguments: Any) -> None:
    """Without a launcher, train on one GPU: DataParallel on all of them would multiply the batch."""
    arguments._n_gpu = min(1, arguments.n_gpu)
