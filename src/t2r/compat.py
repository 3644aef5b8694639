"""The only module that uses names that are private in transformers, or that differ between its versions.

Each name has a test in `tests/test_compat.py`, which runs with the oldest and the newest supported transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

# --- Attention ----------------------------------------------------------------------------------------------


def attention_implementation(model: PreTrainedModel) -> str | None:
    """Return the name of the attention function that a model uses."""
    return model.config._attn_implementation


def requested_attention(config: Any) -> str | None:
    """Return the attention function requested at loading, which the Auto classes store in the configuration."""
    return config._attn_implementation


def set_attention_implementation(model: nn.Module, name: str | None) -> None:
    """Set the attention function of every submodel. T5's encoder and decoder each have their own configuration.

    `set_attn_implementation` of transformers is not used because it rejects models that are not on the attention
    interface, such as FSMT."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.config._attn_implementation = name


def on_attention_interface(model: PreTrainedModel) -> bool:
    return bool(model._supports_attention_backend)


# --- Models ---------------------------------------------------------------------------------------------------


class ModelHooks:
    """Overrides of private methods of transformers' models, which call public methods defined by t2r."""

    @classmethod
    def building(cls, config: Any, options: dict[str, Any]) -> tuple[Any, Any]:
        """Return the class to build for a configuration, and the configuration to build it from."""
        raise NotImplementedError

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        """Build a model with random weights. Called by the Auto classes."""
        model_class, base = cls.building(config, kwargs)
        return super(ModelHooks, model_class)._from_config(base, **kwargs)  # type: ignore[misc]

    def start_cache(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], rows: int, length: int
    ) -> bool:
        """Put a cache for `rows` sequences of `length` tokens into `model_kwargs`.

        Returns False to let transformers create the cache."""
        raise NotImplementedError

    def check_generated_length(self, length: int) -> None:
        """Check the maximum sequence length. Called before the first token is generated."""
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
    """Return the length of the attention mask passed to `generate`, or None if it is unknown.

    transformers drops a mask of ones before the cache is created, and stores its length in the generation
    configuration."""
    mask = model_kwargs.get("attention_mask")
    if mask is not None:
        return int(mask.shape[1])
    length: int | None = getattr(generation_config, "_mask_length", None)
    return length


def is_assistant(generation_config: GenerationConfig) -> bool:
    """Return whether the model is the assistant in assisted decoding, so that some of its tokens may be rejected."""
    return bool(getattr(generation_config, "is_assistant", False))


class BeamSearch(GenerationMixin):
    """transformers' beam search, which gets logits from methods instead of a model.

    It also takes the place of the cache: beam search asks the cache to reorder its rows."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def first_logits(self) -> Tensor:
        """Return the logits `[rows, vocabulary]` after the prompts."""
        raise NotImplementedError

    def next_logits(self, tokens: Tensor) -> Tensor:
        """Return the logits after one more token per row, `tokens [rows]`."""
        raise NotImplementedError

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row `i` continue the sequence of row `beam_idx[i]`."""
        raise NotImplementedError

    def search(self, ids: Tensor, processors: Any, criteria: Any, generation_config: GenerationConfig) -> Tensor:
        """Return prompts and continuations. `ids` has a row for each beam."""
        how: dict[str, Any] = {"past_key_values": self, "use_cache": True}
        sequences: Any = self._beam_search(ids, processors, criteria, generation_config, **how)  # type: ignore[arg-type,misc]
        return sequences

    def _prefill(self, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(logits=self.first_logits()[:, None])

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        return {"tokens": input_ids[:, -1]}

    def __call__(self, tokens: Tensor, **kwargs: Any) -> Any:
        return SimpleNamespace(logits=self.next_logits(tokens)[:, None])

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        return model_kwargs


def tied_weights(model: PreTrainedModel) -> set[str]:
    """Return the names of parameters that are tied to others, which a saved file does not contain."""
    return set(model._tied_weights_keys or ()) | set(getattr(model, "all_tied_weights_keys", None) or ())


def forget_renamings(model: PreTrainedModel) -> None:
    """Let a model be saved with the names of its own tensors.

    transformers renames tensors of some files when it loads them (`embed_out` of GPT-NeoX), and names them back when it
    saves. It knows the renamings by the class of the model, and a swapped model is of another class."""
    model._weight_conversions = None  # type: ignore[assignment]


class WrapsModel:
    """For a module around a model: FSDP asks it for the classes of modules that it must not split."""

    @property
    def wrapped(self) -> nn.Module:
        raise NotImplementedError

    @property
    def _no_split_modules(self) -> Any:
        return getattr(self.wrapped, "_no_split_modules", None)


# --- Models by name -----------------------------------------------------------------------------------------


def has_language_model(config_class: Any) -> bool:
    """Return whether transformers has a causal language model for this configuration class or, for the configuration of
    an encoder-decoder, a sequence-to-sequence model."""
    known: Any = AutoModelForSeq2SeqLM if config_class.is_encoder_decoder else AutoModelForCausalLM
    return config_class in known._model_mapping


def build_from_config(model_class: Any, config: Any, **kwargs: Any) -> Any:
    """Build a model with random weights, as the Auto classes do."""
    return model_class._from_config(config, **kwargs)


def announce_to_pipelines(class_name: str, seq2seq: bool) -> None:
    """Register a model class name with `pipeline()`, which otherwise prints that the model is not supported."""
    names = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if seq2seq else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    names.setdefault(class_name, class_name)


# --- Trainer ------------------------------------------------------------------------------------------------


class TrainerHooks:
    """Overrides of private checkpoint methods of Trainer, which call public methods defined by t2r."""

    args: Any

    def save_checkpoint(self, save: Callable[[], None]) -> None:
        """Write a checkpoint by calling `save`."""
        raise NotImplementedError

    def save_weights(self, folder: Path) -> bool:
        """Write the model weights of a checkpoint. Returns False to let Trainer do it."""
        raise NotImplementedError

    def load_weights(self, folder: Path) -> bool:
        """Read the weights written by `save_weights`. Returns False to let Trainer do it."""
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
    """Train on one GPU if there is no launcher: DataParallel on all GPUs would multiply the batch size."""
    arguments._n_gpu = min(1, arguments.n_gpu)
