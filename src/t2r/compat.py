"""The only module that uses names that are private in transformers, or that differ between its versions.

Each name has a test in `tests/test_compat.py`, which runs with the oldest and the newest supported transformers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizer,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from t2r.errors import T2RError

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


def record_outputs_as(new: type[nn.Module], old: type[nn.Module]) -> None:
    """Let models of a class return hidden states as those of another class do.

    transformers looks for the class by its text, in a table that has those that were built. For others it returns None,
    without a message. Older versions have no such table."""
    recorded = getattr(old, "_can_record_outputs", None)
    table = getattr(sys.modules.get("transformers.utils.output_capturing"), "_CAN_RECORD_REGISTRY", None)
    if recorded is not None and table is not None:
        table[str(new)] = recorded


def is_watched(model: nn.Module) -> bool:
    """Return whether hooks or modes see the calls of a model's modules, or the forward of one is replaced."""
    modes = torch.overrides._get_current_function_mode_stack() or _get_current_dispatch_mode_stack()
    if modes or hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        return True
    return any(part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__ for part in model.modules())


# --- Several processes --------------------------------------------------------------------------------------


DISTRIBUTES = ("maybe_distribute_model", "is_distributed_loading_by_transformers")
"""Attributes of models of a transformers that divides them and trains them so."""


def distributed_config(size: int) -> Any:
    """Return the configuration with which transformers divides a model among `size` processes by FSDP 2.

    Raises T2RError if this version of transformers does not do so, or not as `Trainer` requires."""
    try:
        from transformers.distributed import DistributedConfig

        config = DistributedConfig(fsdp_size=size)
    except (ImportError, TypeError):
        config = None
    if config is None or not all(hasattr(PreTrainedModel, name) for name in DISTRIBUTES):
        raise T2RError(
            f"fsdp_size requires a newer transformers than {transformers.__version__}, which does not train models "
            "with FSDP 2: update it, or leave fsdp_size out"
        )
    return config


class Sharded:
    """Mixin for classes of models that `from_pretrained(distributed_config=...)` divides among processes."""

    def layer_names(self) -> list[str]:
        """Return the names of the modules that gather their weights one at a time."""
        raise NotImplementedError

    def without_maps(self) -> AbstractContextManager[None]:
        """Remove what is not divided from the model, for the duration of a block."""
        raise NotImplementedError

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, mesh_manager: Any) -> Any:
        """Divide the model. Called by `from_pretrained` before it loads the weights."""
        model._fsdp_plan = dict.fromkeys(model.layer_names(), "free_full_weight")
        # transformers ties weights after it has divided them. If the vocabulary is not a multiple of the processes, the
        # embeddings and the head would then be two parameters, of which one would keep its first values.
        model.tie_weights()
        with model.without_maps():
            return super().maybe_distribute_model(model, distributed_config, mesh_manager)  # type: ignore[misc]


def stock_class(config: Any, auto_class: Any) -> Any:
    """Return the class of transformers that an Auto class builds for a configuration, or None if there is none."""
    known: Any = auto_class._model_mapping
    found = known.get(type(config), None)
    return found[0] if isinstance(found, tuple) else found


class WrapsModel:
    """For a module around a model: Trainer asks it how the model is divided among processes."""

    @property
    def wrapped(self) -> nn.Module:
        raise NotImplementedError

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        return bool(getattr(self.wrapped, "is_distributed_loading_by_transformers", False))

    @property
    def fsdp_size(self) -> int | None:
        return getattr(self.wrapped, "fsdp_size", None)


# --- Models by name -----------------------------------------------------------------------------------------


def has_language_model(config_class: Any) -> bool:
    """Return whether transformers has a causal language model for this configuration class or, for the configuration of
    an encoder-decoder, a sequence-to-sequence model."""
    known: Any = AutoModelForSeq2SeqLM if config_class.is_encoder_decoder else AutoModelForCausalLM
    return config_class in known._model_mapping


def build_from_config(model_class: Any, config: Any, **kwargs: Any) -> Any:
    """Build a model with random weights, as the Auto classes do."""
    return model_class._from_config(config, **kwargs)


def reads_images(model_class: Any) -> bool:
    """Return whether a language model of this class reads images too."""
    return model_class.__name__ in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()


def announce_to_pipelines(class_name: str, *, seq2seq: bool, images: bool) -> None:
    """Register a model class name with `pipeline()`, which otherwise prints that the model is not supported."""
    names = [MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if seq2seq else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    for known in names + [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES] * images:
        known.setdefault(class_name, class_name)


def announce_by_name(model_class: type) -> None:
    """Make a class an attribute of `transformers`, where `transformers serve` looks for the class that a saved
    configuration names.

    `transformers.processing_utils` loads the package `transformers` a second time, and modules that were imported
    before refer to the first. The class becomes an attribute of both."""
    import transformers.processing_utils

    users = list(sys.modules.values())
    packages = [transformers, *(vars(user).get("transformers") for user in users if isinstance(user, ModuleType))]
    for package in packages:
        if isinstance(package, ModuleType) and package.__name__ == "transformers":
            setattr(package, model_class.__name__, model_class)


# --- Tokenizers ---------------------------------------------------------------------------------------------

WORTHWHILE = 1 << 14
"""Number of characters from which `encode` makes a lean tokenizer."""
COMPARED = 8, 256
"""Number of texts, and of their first characters, that `encode` tokenizes in both ways."""


def encode(tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool = True, **given: list[str]) -> list[Any]:
    """Return the token ids of a list of texts, which is passed as `text`, or as `text_target` for targets.

    Slow tokenizers, which are written in Python, spend most of their time outside the tokenization itself. A list with
    much text is therefore tokenized by a `LeanTokenizer`. If its ids of the first texts are not those of the tokenizer,
    the tokenizer itself is used."""

    def encode_by(tokenizer: Any, texts: list[str]) -> list[Any]:
        options = {"add_special_tokens": add_special_tokens, "return_attention_mask": False, "verbose": False}
        return tokenizer(**{name: texts}, **options)["input_ids"]

    ((name, texts),) = given.items()
    if sum(map(len, texts)) < WORTHWHILE or not has_stock_steps(tokenizer):
        return encode_by(tokenizer, texts)
    lean = LeanTokenizer.of(tokenizer)
    count, characters = COMPARED
    first = [text[:characters] for text in texts[:count]]
    return encode_by(lean if encode_by(lean, first) == encode_by(tokenizer, first) else tokenizer, texts)


def has_stock_steps(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer has the methods of `PreTrainedTokenizer` that a `LeanTokenizer` replaces. The methods
    that these call may be its own."""
    if not isinstance(tokenizer, PreTrainedTokenizer):
        return False
    names = ("__call__", "_encode_plus", "prepare_for_model", "pad", "convert_tokens_to_ids")
    return all(getattr(getattr(tokenizer, n), "__func__", None) is getattr(PreTrainedTokenizer, n) for n in names)


class LeanTokenizer(PreTrainedTokenizer):
    """A slow tokenizer that computes only the `input_ids` of lists of texts, without truncation.

    The tokenizers of transformers search every character of a text for added tokens, look up each token in several
    calls, look up the special tokens for each text, and build masks."""

    looked_up: Computed | None = None

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase) -> LeanTokenizer:
        """Return a copy of a tokenizer. It shares the values of all attributes, but not the attributes, so that nothing
        is set on the tokenizer, which other threads may be using."""
        lean: Any = object.__new__(type("Lean", (LeanTokenizer, type(tokenizer)), {}))
        vars(lean).update(vars(tokenizer))
        lean.tokens_trie = AddedTokens(lean.tokens_trie)
        return lean

    def _encode_plus(  # type: ignore[override]
        self, text: list[str], add_special_tokens: bool, split_special_tokens: bool, **_: Any
    ) -> dict[str, list[Any]]:
        # These are computed for each call, because sources and targets may have different vocabularies.
        ids = Computed(self._convert_token_to_id_with_added_voc)
        self.looked_up = Computed(super().__getattr__, all_special_tokens=super().all_special_tokens)
        try:
            rows = []
            for one in text:
                row = [ids[token] for token in self.tokenize(one, split_special_tokens=split_special_tokens)]
                rows.append(self.build_inputs_with_special_tokens(row) if add_special_tokens else row)
            return {"input_ids": rows}
        finally:
            self.looked_up = None

    @property
    def all_special_tokens(self) -> list[str]:
        return super().all_special_tokens if self.looked_up is None else self.looked_up["all_special_tokens"]

    def __getattr__(self, key: str) -> Any:  # called for `eos_token_id` and the like, which are not attributes
        return super().__getattr__(key) if self.looked_up is None else self.looked_up[key]


class Computed(dict[str, Any]):
    """The values of a function, each computed once."""

    def __init__(self, function: Callable[[str], Any], **known: Any) -> None:
        super().__init__(known)
        self.function = function

    def __missing__(self, key: str) -> Any:
        value = self[key] = self.function(key)
        return value


class AddedTokens:
    """Splits text at added tokens. Text without added tokens, which is nearly all text, is found by one search."""

    def __init__(self, trie: Any) -> None:
        self.trie = trie
        self.find = re.compile("|".join(map(re.escape, trie._tokens)) or "(?!)").search

    def split(self, text: str) -> list[str]:
        if self.find(text):
            return self.trie.split(text)
        return [text] if text else []


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

    def save_optimizer(self, folder: Path) -> bool:
        """Write the states of optimizer and learning rate. Returns False to let Trainer do it."""
        raise NotImplementedError

    def load_optimizer(self, folder: Path) -> bool:
        """Read what `save_optimizer` wrote. Returns False to let Trainer do it."""
        raise NotImplementedError

    def checkpoint_now(self) -> None:
        """Write a checkpoint of the last finished step, outside of the training loop."""
        self._save_checkpoint(self.model_wrapped, None)  # type: ignore[attr-defined]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        save = super()._save_checkpoint  # type: ignore[misc]
        self.save_checkpoint(lambda: save(*args, **kwargs))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if not self.save_weights(Path(output_dir or str(self.args.output_dir))):
            super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.load_weights(Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.save_optimizer(Path(output_dir)):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self.load_optimizer(Path(checkpoint)):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _sync_replicated_trainable_parameters(self, model: Any) -> None:
        """Do nothing: t2r averages the gradients of weights that are not divided. gloo has no such operation."""


def use_one_gpu(arguments: Any) -> None:
    """Train on one GPU if there is no launcher: DataParallel on all GPUs would multiply the batch size."""
    arguments._n_gpu = min(1, arguments.n_gpu)


def constant_rotation(model: Any) -> int | None:
    """Return up to how many tokens the frequencies of rotary positions are constant. None: always.

    With the types `dynamic` and `longrope`, they depend on the longest sequence of a batch beyond this length."""
    limits = []
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        for layer_type, kind in types.items() if isinstance(types, dict) else [(None, types)]:
            if kind == "longrope":
                parameters = module.config.rope_parameters
                own = parameters if layer_type is None else parameters[layer_type]
                limits.append(own["original_max_position_embeddings"])
            elif isinstance(kind, str) and "dynamic" in kind:
                limits.append(module.original_max_seq_len)
    return min(limits, default=None)
