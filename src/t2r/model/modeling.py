"""The classes of swapped models, which generate, save and load like any Hugging Face model.

The class of a swapped model inherits from the base model's class and from `T2RModel`. `swap` changes the class of a
model in place; loading a saved folder builds a model of that class.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn, Self, cast

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig
from transformers.cache_utils import Cache, EncoderDecoderCache

from t2r import architectures, compat
from t2r.attention.cache import T2RCache, T2REncoderDecoderCache, load_state
from t2r.attention.interface import NAME, PADDED, UNMASKED
from t2r.attention.layers import SiteLayer
from t2r.attention.masks import new_token_mask, refuse_full_mask
from t2r.attention.memories import KeyValueMemory, Memory, StateMemory, WindowMemory
from t2r.attention.recurrence import Recurrence
from t2r.attention.static import StaticT2RCache
from t2r.config import SWAP, T2RConfig, reading_class
from t2r.errors import T2RError
from t2r.model.inputs import is_packed, note_padding, restarts
from t2r.model.saving import SavedModel
from t2r.model.sharded import ShardedByLayer
from t2r.ops import Draws
from t2r.ops.common import HALF
from t2r.ops.constants import constant_weights
from t2r.surgery.adapters import Family, Site, family_of
from t2r.surgery.install import install


class T2RModel(SavedModel, ShardedByLayer, compat.ModelHooks):
    """Mixin with the methods that a swapped model adds to its base class. `t2r_class` builds the combined class."""

    config_class: ClassVar[type[PreTrainedConfig]] = T2RConfig
    t2r_family: Family
    training: bool

    def __init__(self, config: Any, *args: Any, t2r_config: T2RConfig | None = None, **kwargs: Any) -> None:
        """Build a swapped model.

        `config` is a `T2RConfig` or the base model's configuration, which has the swap options in `config.t2r`."""
        if isinstance(config, T2RConfig):
            t2r_config, config = config, config.base_config
        elif t2r_config is None:
            t2r_config = T2RConfig(**getattr(config, "t2r", {}))
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        install(self, t2r_config)  # type: ignore[arg-type]
        self.take_configuration(t2r_config)

    def take_configuration(self, t2r_config: T2RConfig) -> None:
        """Store the swap configuration and the family of the model."""
        self.t2r_config = t2r_config
        self.t2r_family = family_of(self)  # type: ignore[arg-type]
        self.config.__class__ = reading_class(cast(Any, type(self.config)))
        self.config.t2r = {name: getattr(t2r_config, name) for name in (*SWAP, "merged")}

    # --- Forward --------------------------------------------------------------------------------------------

    _forward_names: ClassVar[tuple[str, ...]]

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base model's forward with a recurrent cache. Raises T2RError for unsupported inputs."""
        if torch.jit.is_tracing():
            raise T2RError("torch.jit.trace would fix the length of a text: use torch.export, with dynamic_shapes")
        if len(args) > len(self._forward_names):
            raise TypeError(f"forward() takes {len(self._forward_names)} positional arguments, got {len(args)}")
        inputs = dict(zip(self._forward_names, args, strict=False))
        if twice := inputs.keys() & kwargs.keys():
            raise TypeError(f"forward() got multiple values for argument {min(twice)!r}")
        inputs |= kwargs
        for name in ("attention_mask", "decoder_attention_mask"):
            refuse_full_mask(inputs.get(name))
        wanted = inputs.get("output_attentions")
        if self.config.output_attentions if wanted is None else wanted:
            raise T2RError("output_attentions is not supported: recurrent layers do not compute attention weights")
        if compat.attention_implementation(cast(Any, self)) not in (NAME, UNMASKED, PADDED):
            refuse_other_attention(compat.attention_implementation(cast(Any, self)))
        cache = inputs.get("past_key_values")
        if isinstance(cache, tuple | list):
            raise T2RError("past_key_values is a tuple: give a cache, from model.make_cache() or a forward call")
        packed = is_packed(inputs) if cache is None else restarts(inputs)
        if cache is None and inputs.get("use_cache") is None:
            # In training, a cache would only keep all states in memory.
            inputs["use_cache"] = bool(getattr(self.config, "use_cache", True)) and not (self.training or packed)
        if packed and (cache is not None or inputs["use_cache"]):
            raise T2RError("packed documents (position_ids that restart) require use_cache=False, and no cache")
        if cache is None and inputs["use_cache"]:
            inputs["past_key_values"] = self.make_cache()
        note_padding(inputs)
        return super().forward(**inputs)  # type: ignore[misc]

    def train(self, mode: bool = True) -> Self:
        if mode and getattr(self, "t2r_config", None) is not None and self.t2r_config.merged:
            raise T2RError(
                "a merged model cannot be trained: its feature maps are folded into the projections. Train the model "
                "it was merged from (convert saves one unless --merge, merged=True, is given), then merge again"
            )
        return super().train(mode)  # type: ignore[misc]

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        if attn_implementation != NAME:
            refuse_other_attention(attn_implementation)

    # --- The state ------------------------------------------------------------------------------------------

    def kept_layers(self) -> list[int]:
        """Return the numbers of the layers with softmax attention, causal or cross."""
        config, count = self.t2r_config, self.count_layers()
        partly = config.keeps(cross=False) or (self.config.is_encoder_decoder and config.keeps(cross=True))
        return list(range(count)) if partly else config.kept_layers(count)

    def kept_sites(self, cross: bool) -> list[int]:
        """Return the numbers of the layers whose cross attention, or causal attention, is softmax."""
        config, count = self.t2r_config, self.count_layers()
        return list(range(count)) if config.keeps(cross) else config.kept_layers(count)

    def count_layers(self) -> int:
        return len(self.t2r_family.decoder_layers(self))  # type: ignore[arg-type]

    def grows(self, cross: bool = False) -> bool:
        """Return whether causal attention, or cross attention, keeps all keys and values in some layer."""
        model: Any = self
        return any(site.cross == cross and keeps_everything(site.module) for site in self.t2r_family.sites(model))

    def make_cache(self) -> T2RCache | T2REncoderDecoderCache:
        """Return an empty cache, with the memories of each site: a recurrent state, a window, or growing keys and
        values."""
        model: Any = self
        made = self.by_layer(lambda site: SiteLayer(KeyValueMemory()) if keeps_everything(site.module) else make(site))
        own = T2RCache(made[False], model)
        if not self.config.is_encoder_decoder:
            return own
        return T2REncoderDecoderCache(own, T2RCache(made[True], model), model)

    def memory_kinds(self) -> dict[str, list[Any]]:
        """Return the memories of each layer, and the shapes of their tensors without rows and tokens."""
        made = self.row_without_memory(1, 1)
        parts = {"self": made[False]} | ({"cross": made[True]} if self.config.is_encoder_decoder else {})
        return {part: [layer.kind() for layer in layers] for part, layers in parts.items()}

    def row_bytes(self, tokens: int, source: int, state_dtype: torch.dtype | None = None) -> int:
        """Return the size of a row of a static cache with room for these tokens."""
        made = self.row_without_memory(tokens, source, state_dtype)
        return sum(layer.nbytes for layers in made.values() for layer in layers)

    def row_without_memory(
        self, tokens: int, source: int, state_dtype: torch.dtype | None = None
    ) -> dict[bool, list[SiteLayer]]:
        """Return the layers of one row of a static cache, whose tensors have shapes only."""
        model: Any = self
        device = torch.device("meta")
        room = Room(1, model.dtype, device, state_dtype, torch.zeros(1, dtype=torch.long, device=device))
        return self.by_layer(lambda site: self.allocate(site, room, source if site.cross else tokens))

    def allocate(self, site: Site, room: Room, tokens: int | None) -> SiteLayer:
        """Return the layer of a site with memories at fixed addresses. Keys and values have room for `tokens`; None:
        they grow."""
        shape = self.t2r_family.shape(site.module)
        if not keeps_everything(site.module):
            memories = fixed_memories(cast(Recurrence, site.module), shape.head_dim, room)
        elif tokens is not None:
            size = (room.rows, shape.num_key_value_heads, tokens, shape.head_dim)
            keys, values = (torch.zeros(size, dtype=room.dtype, device=room.device) for _ in range(2))
            memories = (KeyValueMemory(keys, values, fixed=True),)
        else:
            return SiteLayer(KeyValueMemory())
        counts = site.layer == self.count_layers() - 1
        return SiteLayer(*memories, lengths=None if site.cross else room.lengths, counts=counts)

    def make_static_cache(
        self,
        rows: int,
        max_length: int | None = None,
        source_length: int | None = None,
        state_dtype: torch.dtype | None = None,
    ) -> Any:
        """Return an empty cache of fixed size whose tensors keep their addresses (see `t2r.attention.static`).

        Args:
            rows: number of sequences.
            max_length: maximum number of tokens in softmax layers. Required only if the model has softmax layers.
            source_length: maximum number of tokens of a source in softmax cross attention. By default, its keys and
                values are not of fixed size.
            state_dtype: the dtype in which states are stored, torch.bfloat16 or torch.float16, to halve their memory.
                They are rounded after every token, at random (`t2r.ops.rounding`). Defaults to float32."""
        model: Any = self
        if self.grows() and max_length is None:
            raise T2RError(
                f"a static cache requires max_length, because layers {self.kept_layers()} are softmax layers"
            )
        if self.grows() and self.t2r_family.positions == "relative":
            raise T2RError("a static cache does not support softmax layers with a relative bias: use the default cache")
        lengths = torch.zeros(rows, dtype=torch.long, device=model.device)
        room = Room(rows, model.dtype, model.device, state_dtype, lengths)
        made = self.by_layer(lambda site: self.allocate(site, room, source_length if site.cross else max_length))
        cache = StaticT2RCache(made[False], lengths, model)
        if not self.config.is_encoder_decoder:
            return cache
        return T2REncoderDecoderCache(cache, T2RCache(made[True], model), model)

    def by_layer(self, make: Callable[[Site], SiteLayer]) -> dict[bool, list[SiteLayer]]:
        """Return a cache layer for each site: those of causal attention, and those of cross attention."""
        model: Any = self
        made: dict[bool, list[SiteLayer]] = {False: [], True: []}
        for site in self.t2r_family.sites(model):
            made[site.cross].append(make(site))
        return made

    def load_state(self, path: str | os.PathLike[str]) -> T2RCache | T2REncoderDecoderCache:
        """Load a cache that was saved with `cache.save`."""
        return load_state(Path(path), self)

    recorded: ClassVar[Callable[..., Tensor | None] | None] = None
    """Decodes a call of `generate` with a recorded step, or returns None. `t2r.generation.recorded` sets it."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the base model does, where possible with a recorded step. Otherwise, values that depend only on
        the weights are computed once per call."""
        if (recorded := T2RModel.recorded) is not None and (ids := recorded(self, args, kwargs)) is not None:
            return ids
        with constant_weights({}):
            return super().generate(*args, **kwargs)  # type: ignore[misc]

    @torch.no_grad()
    def continue_from(self, cache: T2RCache, input_ids: Tensor, **options: Any) -> Tensor:
        """Generate from a state and new tokens. The tokens that produced the state are not needed.

        The state is not modified, so it can be continued many times. Logits processors receive only the new tokens.

        Args:
            cache: the state, of one sequence or of as many as there are prompts.
            input_ids: the new tokens, at least one per sequence.
            options: options of `generate`.

        Returns the new tokens followed by the generated tokens.
        """
        if self.config.is_encoder_decoder:
            raise T2RError(
                "continue_from supports language models only; pass the cache of an encoder-decoder to generate"
            )
        if not isinstance(cache, T2RCache):
            raise T2RError(
                f"a state is a T2RCache, from model.make_cache() or a forward call; got {type(cache).__name__}"
            )
        if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
            raise T2RError("continue_from requires a tensor of tokens [rows, tokens], which are whole numbers")
        rows, model = input_ids.shape[0], cast(Any, self)
        cache.check_prompts(rows, model)
        if input_ids.shape[1] == 0:
            raise T2RError("continue_from requires at least one new token")
        ways = max(
            option_value(model, options.get("generation_config"), options, name) or 1
            for name in ("num_beams", "num_return_sequences")
        )
        mask = new_token_mask(options.pop("attention_mask", None), input_ids, cache.get_seq_length())
        cache = cache.fork(ways * rows // cache.rows)
        cache.unseen = cache.get_seq_length()
        # From a mask longer than the ids, `generate` infers that the ids are only the new tokens.
        mask = torch.cat([cache.attention_mask()[::ways].to(mask), mask], dim=1)
        return model.generate(input_ids, attention_mask=mask, past_key_values=cache, **options)

    # --- Generation -----------------------------------------------------------------------------------------

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        raise T2RError(
            "continuous batching stores keys and values in pages, which a recurrent model does not have: call generate "
            "with a batch, or use model.make_static_cache(rows)"
        )

    def start_cache(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], rows: int, length: int
    ) -> bool:
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic", "static"):
            raise T2RError(
                f"cache_implementation={kind!r} is for caches of keys and values; a recurrent state has a fixed size: "
                "leave it unset, or use static"
            )
        if generation_config.prefill_chunk_size is not None and self.config.is_encoder_decoder:
            raise T2RError("prefill_chunk_size would split the mask of the source: leave it unset for encoder-decoders")
        given = model_kwargs.get("past_key_values")
        if given is None and generation_config.use_cache is not False:
            cache = self.make_static_cache(rows, length) if kind == "static" else self.make_cache()
            model_kwargs["past_key_values"] = cache
            if compat.is_assistant(generation_config):  # rejected tokens are removed from the cache
                cache.activate_past_recording()
            return True
        if type(given) is T2RCache and given.unseen:
            self.check_generated_length(given.unseen + (generation_config.max_length or 0))
        elif isinstance(given, Cache) and not isinstance(given, EncoderDecoderCache):
            if type(given) is T2RCache and given.rows and not compat.is_assistant(generation_config):
                given.checked(self)  # an assistant may stop before the last layers
            read, prompt = int(given.get_seq_length()), compat.prompt_length(generation_config, model_kwargs)
            if prompt is not None and 0 < read >= prompt:
                static = isinstance(given, StaticT2RCache)
                how = "to continue from a state with only the new tokens, use model.continue_from(cache, input_ids)"
                how = "to use it for another text, call cache.reset()" if static else how
                raise T2RError(f"the cache has read {read} tokens and the input has {prompt}: {how}")
            room = given.max_length if isinstance(given, StaticT2RCache) else None
            if room is not None and (generation_config.max_length or 0) > room:
                raise T2RError(
                    f"the static cache has room for {room} tokens in softmax layers, but max_length is "
                    f"{generation_config.max_length}: make a longer one, or generate fewer tokens"
                )
        return False

    def check_generated_length(self, length: int) -> None:
        """Raise T2RError if the model has too few positions; otherwise extend its position table if necessary."""
        model: Any = self
        limit = self.t2r_family.max_positions(model)
        if limit is not None and length > limit:
            raise T2RError(
                f"max_length {length} is beyond the {limit} positions of this {self.t2r_family.model_type} model: "
                "generate fewer tokens"
            )
        self.t2r_family.extend_positions(model, length)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Pass only the new tokens when an encoder-decoder continues from a cache; transformers would pass all.

        A token that `generate` appended is not padding. A recurrent state needs no mask for it."""
        if inputs_embeds is not None:  # `generate` checks the signature for this name
            kwargs["inputs_embeds"] = inputs_embeds
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)  # type: ignore[misc]
        cache, tokens = inputs.get("past_key_values"), inputs.get("decoder_input_ids")
        if cache is not None and tokens is not None:
            new = input_ids.shape[1] - cache.get_seq_length()
            if 0 < new < tokens.shape[1]:
                inputs["decoder_input_ids"] = tokens[:, -new:]
        generated = kwargs.get("next_sequence_length") == 1 and not kwargs.get("is_first_iteration")
        if generated and type(cache) is T2RCache and cache.is_recurrent and inputs.get("position_ids") is not None:
            inputs["attention_mask"] = None
        return inputs

    @classmethod
    def class_named(cls, architectures: list[str]) -> type[T2RModel]:
        base = next((found for found in map(model_class, architectures) if found is not None), None)
        if base is None:
            missing = " or ".join(architectures) or "(no class is named)"
            raise T2RError(f"this version of transformers has no model class {missing}")
        return t2r_class(base)


class Room(NamedTuple):
    """What the memories of a static cache have in common."""

    rows: int
    dtype: torch.dtype
    device: torch.device
    state_dtype: torch.dtype | None
    lengths: Tensor


def keeps_everything(module: Any) -> bool:
    """Return whether a site has softmax attention to all tokens."""
    return not isinstance(module, Recurrence) or (module.keeps_softmax and module.window is None)


def make(site: Site) -> SiteLayer:
    return cast(Recurrence, site.module).make_layer()


def fixed_memories(module: Recurrence, head_dim: int, room: Room) -> tuple[Memory, ...]:
    """Allocate the memories of a site at fixed addresses."""
    made: list[Memory] = []
    if module.window is not None:
        token = torch.zeros(room.rows, 1, 1, head_dim, dtype=room.dtype, device=room.device)
        made.append(WindowMemory(module.window, held=module.window.empty(token, token), lengths=room.lengths))
    if module.has_map:
        state, draws = module.feature_map.empty_state(room.rows, head_dim, room.dtype, room.device), None
        if room.state_dtype is not None:
            state = state.map(lambda x: x.to(room.state_dtype))
            draws = Draws(room.lengths, module.layer_idx) if room.state_dtype in HALF else None
        made.append(StateMemory(state, fixed=True, draws=draws))
    return tuple(made)


def option_value(model: Any, generation_config: GenerationConfig | None, options: Mapping[str, Any], name: str) -> Any:
    """Return the value of an option of `generate`: as given, or that of the configuration, or that of the model."""
    if name in options:
        return options[name]
    own = getattr(generation_config, name, None)
    return getattr(model.generation_config, name, None) if own is None else own


class T2RForCausalLM(T2RModel):
    """A swapped language model."""

    auto_class = "AutoModelForCausalLM"
    task_name = "T2RForCausalLM"


class T2RForImageTextToText(T2RForCausalLM):
    """A swapped language model that reads images too. It is saved as a T2RForCausalLM."""


class T2RForSeq2SeqLM(T2RModel):
    """A swapped encoder-decoder: the decoder is recurrent, and the encoder is unchanged."""

    auto_class = "AutoModelForSeq2SeqLM"
    task_name = "T2RForSeq2SeqLM"


# --- Classes ------------------------------------------------------------------------------------------------


def model_class(name: str) -> Any:
    """Return the model class of this name from transformers or t2r, or None if there is none."""
    return getattr(transformers, name, None) or getattr(architectures, name, None)


@functools.cache
def t2r_class(base: Any) -> type[T2RModel]:
    """Return the class of swapped models of the class `base`."""
    if not base.can_generate():
        raise T2RError(
            f"{base.__name__} does not generate text: load the model with AutoModelForCausalLM or AutoModelForSeq2SeqLM"
        )
    parameters = list(inspect.signature(base.forward).parameters.values())[1:]
    names = tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
    seq2seq = "decoder_input_ids" in names

    @functools.wraps(base.forward)  # Trainer and generate read the signature
    def forward(self: T2RModel, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    members = {
        "__module__": __name__,
        "__doc__": f"{base.__name__}, with recurrent attention.",
        "base_class": base,
        "config_class": base.config_class,
        "forward": forward,
        "_forward_names": names,
    }
    images = compat.reads_images(base)
    task = T2RForSeq2SeqLM if seq2seq else T2RForImageTextToText if images else T2RForCausalLM
    made = type(f"T2R{base.__name__}", (task, base), members)
    compat.announce_to_pipelines(made.__name__, seq2seq=seq2seq, images=images)
    return made


def __getattr__(name: str) -> Any:
    """Build the class of a swapped model by name, so that pickle finds it in a process that has not built it yet."""
    base = model_class(name.removeprefix("T2R")) if name.startswith("T2R") else None
    if base is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return t2r_class(base)


def refuse_other_attention(name: Any) -> NoReturn:
    raise T2RError(
        f"attn_implementation={name!r} would restore softmax attention in a recurrent model; to compare with softmax "
        "attention, use t2r.exact_attention(model)"
    )


transformers.AutoModelForCausalLM.register(T2RConfig, T2RForCausalLM, exist_ok=True)
transformers.AutoModelForSeq2SeqLM.register(T2RConfig, T2RForSeq2SeqLM, exist_ok=True)
transformers.AutoModelForImageTextToText.register(T2RConfig, T2RForImageTextToText, exist_ok=True)
transformers.AutoModelForMultimodalLM.register(T2RConfig, T2RForImageTextToText, exist_ok=True)
for made in (T2RForCausalLM, T2RForSeq2SeqLM):
    compat.announce_by_name(made)
# The Auto classes find the classes of transformers by the name of the configuration class, but not registered ones.
transformers.AutoModelForCausalLM.register(
    reading_class(architectures.AdaptiveLMConfig), architectures.AdaptiveLMForCausalLM, exist_ok=True
)
