"""T2RConfig, the configuration of a swapped model. It is the only configuration saved with the weights."""

from __future__ import annotations

import functools
import json
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PreTrainedConfig

from t2r.errors import T2RError
from t2r.options import BOTH, SwapOptions, check, options_of
from t2r.plans import MemoryPlan
from t2r.storage import shortened, write_text
from t2r.storage.saved_sizes import check_sizes

OPTIONS = tuple(options_of(SwapOptions))
"""Names of the swap options, the same in `swap`, on the command line and in the saved file."""
SWAP = (*OPTIONS, "plan")
"""Names of all fields that describe a swap."""
KEPT = (*SWAP, "merged", "base_model", "base_weights")
"""Fields that are saved with a swapped model, besides the base model's configuration."""
FORMAT, WITHOUT_PLAN = 3, 2
"""Version of the saved format. Newer formats are rejected; older ones keep loading. Format 2 adds the guard below, and
format 3 the plan; a model without a plan is saved in format 2."""

GUARD = "this folder holds a t2r model: import t2r, and load it with an Auto class"
"""Saved as the dtype of the base configuration. `GPT2LMHeadModel.from_pretrained` accepts the base configuration
regardless of the saved `model_type` and would build softmax attention. With this value it fails with this message. The
dtype of the weights is `T2RConfig.dtype`."""

TOKENS = {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"}
OF_GENERATION = set(GenerationConfig().to_dict()) - TOKENS - {"use_cache"}
"""Names of generation options. FSMT's configuration has some, but transformers rejects them in saved configurations."""


class T2RConfig(PreTrainedConfig, SwapOptions):
    """Configuration of a swapped model: the swap options and the configuration of the base model.

    The swap options are the fields of `t2r.options.SwapOptions`, where each is documented.

    Args:
        plan: the windows and states of causal attention, by layer and head (`t2r.plans.MemoryPlan`). None: every layer
            is recurrent, or softmax by the options.
        merged: whether the affine part of the feature maps is merged into the projections (inference only).
        base_model: the folder or hub name of the base model, which is the teacher if a conversion is continued. None:
            not known.
        base_weights: the fingerprint of the base model's weights (`t2r.data.fingerprint.of_weights`).
        base_config: the configuration of the base model.
    """

    model_type = "t2r"

    plan: Any = None
    merged: bool = False
    base_model: str | None = None
    base_weights: str | None = None
    base_config: Any = None
    format: int = WITHOUT_PLAN
    t2r_version: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.format, int) or self.format > FORMAT:
            raise T2RError(
                f"this model was saved in format {self.format} by t2r {self.t2r_version}; "
                f"this t2r reads up to format {FORMAT}: upgrade t2r"
            )
        check(SwapOptions, {name: getattr(self, name) for name in OPTIONS})
        self.recurrent = options_of(SwapOptions)["recurrent"].named(self.recurrent)
        if self.plan is not None:
            self.plan = MemoryPlan.of(self.plan).to_dict()
            self.format = FORMAT
            self.check_plan()
        if self.base_config is not None and not isinstance(self.base_config, PreTrainedConfig):
            self.base_config = read_base_config(self.base_config, self.dtype)
        if self.base_config is not None:
            self.is_encoder_decoder = self.base_config.is_encoder_decoder
        super().__post_init__(**kwargs)

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | PathLike[str], **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read the fields of a saved configuration. Raises T2RError if it claims more layers than the weights have."""
        fields, rest = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        check_sizes(str(pretrained_model_name_or_path), fields)
        return fields, rest

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read a saved configuration. Without the option `recurrent`, which is newer, it is that of a model with
        recurrent causal and cross attention.

        Raises T2RError if it claims more layers than the weights have."""
        if (source := kwargs.get("name_or_path")) is not None:  # AutoConfig has read the fields
            check_sizes(str(source), config_dict)
        return super().from_dict({"recurrent": BOTH} | config_dict, **kwargs)

    # Attributes such as `vocab_size`, `hidden_size` and `use_cache` are read from and set on the base configuration.

    def __getattr__(self, name: str) -> Any:
        base = vars(self).get("base_config")
        if name.startswith("_") or name in OF_GENERATION or not isinstance(base, PreTrainedConfig):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(base, name)
        except AttributeError:
            raise
        except Exception as error:  # Gemma 4 has values by layer, and another error for who asks for one of all layers
            raise AttributeError(str(error)) from error

    def __setattr__(self, name: str, value: Any) -> None:
        base = vars(self).get("base_config")
        of_base = isinstance(base, PreTrainedConfig) and (name in vars(base) or name in base.attribute_map)
        if of_base and name not in vars(self) and not name.startswith("_"):
            setattr(base, name, value)
        else:
            super().__setattr__(name, value)

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Do nothing, because the base configuration has already converted its parameters.

        transformers 5.17 would add `rope_theta` to gemma3's parameters, which are stored per layer type, and then fail
        to save them."""
        return kwargs

    def get_text_config(self, *args: Any, **kwargs: Any) -> PreTrainedConfig:
        """Return the text configuration of the base model, which holds the model sizes."""
        if self.base_config is None:
            return self
        return self.base_config.get_text_config(*args, **kwargs)

    def kept_layers(self, layers: int) -> list[int]:
        """Return the softmax layers of a model with this number of layers."""
        if self.softmax_every is not None and self.softmax_layers is not None:
            raise T2RError("give softmax_layers or softmax_every, not both")
        if self.softmax_every is not None:
            return [i for i in range(layers) if (layers - 1 - i) % self.softmax_every == 0]
        chosen = self.softmax_layers or []
        if isinstance(chosen, str) or not all(type(layer) is int for layer in chosen):
            raise T2RError(
                f"softmax_layers must be a list of layer numbers; got {chosen!r}; only convert accepts auto:N"
            )
        kept = sorted(set(chosen))
        for layer in kept:
            if not 0 <= layer < layers:
                raise T2RError(f"softmax_layers: there is no layer {layer}; the model has layers 0 to {layers - 1}")
        return kept

    @property
    def memory_plan(self) -> MemoryPlan | None:
        return None if self.plan is None else MemoryPlan.of(self.plan)

    def check_plan(self) -> None:
        """Raise T2RError for options that a plan excludes."""
        if self.softmax_layers or self.softmax_every is not None:
            raise T2RError("a plan says which heads keep which tokens: do not give softmax_layers or softmax_every too")
        if not self.rotary:
            raise T2RError("a plan requires rotary=True: the keys of a window are rotated, and the state reads them")

    def keeps_some(self) -> bool:
        """Return whether causal attention stays softmax in at least one layer, whatever the number of layers."""
        return bool(self.softmax_layers) or self.softmax_every is not None or self.keeps(cross=False)

    def keeps(self, cross: bool) -> bool:
        """Return whether cross attention, or causal attention, stays softmax in every layer."""
        return self.recurrent not in (BOTH, "cross" if cross else "causal")

    def refuse_idle(self) -> None:
        """Raise T2RError for an option of an encoder-decoder that changes nothing."""
        if self.cross_feature_size is not None and self.keeps(cross=True):
            raise T2RError(
                f"cross_feature_size={self.cross_feature_size} changes nothing: cross attention stays exact; make it "
                "recurrent too, as in the paper (recurrent=both, --recurrent both), or leave the size out"
            )

    def map_options(self, cross: bool = False) -> dict[str, Any]:
        """Return the feature map options of a site, except those that depend on the shape of the site."""
        size = self.feature_size
        if cross and self.cross_feature_size is not None:
            size = self.cross_feature_size
        options = {
            name: getattr(self, name)
            for name, option in options_of(SwapOptions).items()
            if option.of_map == "always" or (option.of_map == "given" and getattr(self, name) != option.default)
        }
        return options | {
            "feature_size": size,
            "decay": self.decay and not cross,
            "trainable": not self.freeze_feature_map,
        }

    def to_json_file(self, json_file_path: str | PathLike[str], use_diff: bool = True) -> None:
        """Write the configuration saved with the weights, which only t2r can load (see `GUARD`)."""
        fields = json.loads(self.to_json_string(use_diff=False))
        if fields.get("base_config"):
            fields["base_config"]["dtype"] = GUARD
        # transformers writes the name of a class that is created by the swap and exists only in this process.
        classes = {key: name.partition(".")[2] for key, name in (fields.get("auto_map") or {}).items()}
        fields["architectures"] = [name for key, name in classes.items() if key != "AutoConfig"]
        write_text(Path(json_file_path), json.dumps(fields, indent=2, sort_keys=True) + "\n")

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        if self.base_config is not None:
            output["base_config"] = self.base_config.to_dict()
        return output


def read_base_config(fields: Any, dtype: Any) -> PreTrainedConfig:
    """Build the configuration of the base model from its saved fields. `dtype` is the dtype of the weights."""
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise T2RError("the configuration's base_config has no model_type: it was not saved by t2r")
    fields = dict(fields)
    if fields.get("dtype") == GUARD:
        fields["dtype"] = dtype
    if (kind := fields.pop("model_type")) not in CONFIG_MAPPING:  # transformers would list all that it knows
        raise T2RError(
            f"the configuration's base_config is damaged, or newer: this version of transformers has no model type "
            f"{shortened(kind)!r}"
        )
    try:
        config: PreTrainedConfig = AutoConfig.for_model(kind, **fields)
    except Exception as error:  # configuration classes raise different exceptions for invalid fields
        reason = shortened(" ".join(str(error).split()) or type(error).__name__)
        raise T2RError(f"the configuration's base_config is damaged: {reason}") from error
    return config


class ReadsT2R:
    """Mixin of the configuration classes of swapped models, whose `from_pretrained` reads t2r folders too.

    PEFT calls `type(model.config).from_pretrained(folder)` when it saves an adapter, which `GUARD` would reject. The
    stock class still rejects the folder, because a stock model would be built from what it returns."""

    base_class: type[PreTrainedConfig]

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        fields, rest = super().get_config_dict(*args, **kwargs)  # type: ignore[misc]
        if fields.get("model_type") == T2RConfig.model_type and isinstance(fields.get("base_config"), dict):
            fields = fields["base_config"] | {"dtype": fields.get("dtype")}
        return fields, rest

    def __reduce__(self) -> tuple[Any, ...]:  # pickle does not find a dynamic class by its name
        return _blank, (self.base_class,), self.__dict__


@functools.cache
def reading_class(base: Any) -> Any:
    """Return the configuration class of swapped models whose base model has a configuration of the class `base`.

    It has the name of `base`, by which the Auto classes of transformers find the class of a model or tokenizer."""
    if issubclass(base, ReadsT2R):
        return base
    names = ("__module__", "__qualname__", "__doc__", "__init__", "__eq__")  # a dataclass would define the last two
    members = {name: getattr(base, name) for name in names}
    return type(base.__name__, (ReadsT2R, base), {**members, "base_class": base})


def _blank(base: Any) -> Any:
    made = reading_class(base)
    return made.__new__(made)


AutoConfig.register("t2r", T2RConfig, exist_ok=True)
