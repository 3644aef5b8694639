"""T2RConfig: what was swapped and how. It is the only configuration that is saved with the weights."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from t2r.errors import T2RError
from t2r.options import SwapOptions, check, options_of
from t2r.storage import write_text

OPTIONS = tuple(options_of(SwapOptions))
"""What a user chooses: the same names in `swap`, on the command line and in the saved file."""
FORMAT = 2
"""The number of the saved format. A newer one is refused; older ones keep loading. Format 2 has the guard below."""

GUARD = "this folder holds a t2r model: import t2r, and load it with an Auto class"
"""Saved as the base configuration's dtype. `GPT2LMHeadModel.from_pretrained` finds that configuration in any folder,
whatever its `model_type`, and would build softmax attention; with this it fails in these words. The weights' dtype
is `T2RConfig.dtype`."""

TOKENS = {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"}
OF_GENERATION = set(GenerationConfig().to_dict()) - TOKENS - {"use_cache"}
"""Names of generation options. FSMT's configuration has some, which transformers refuses in any that it saves."""


class T2RConfig(PreTrainedConfig, SwapOptions):
    """Which attention a swapped model has, and the configuration of the model it was made from.

    The options of the swap are the fields of `t2r.options.SwapOptions`, which says what each means and what it may be.

    Args:
        merged: the map's affine part is folded into the projections: for inference only.
        base_config: the configuration of the base model.
    """

    model_type = "t2r"

    merged: bool = False
    base_config: Any = None
    format: int = FORMAT
    t2r_version: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.format, int) or self.format > FORMAT:
            raise T2RError(
                f"this model was saved in format {self.format} by t2r {self.t2r_version}; "
                f"this t2r reads up to format {FORMAT}: upgrade t2r"
            )
        check(SwapOptions, {name: getattr(self, name) for name in OPTIONS})
        if self.base_config is not None and not isinstance(self.base_config, PreTrainedConfig):
            self.base_config = read_base_config(self.base_config, self.dtype)
        if self.base_config is not None:
            self.is_encoder_decoder = self.base_config.is_encoder_decoder
        super().__post_init__(**kwargs)

    # A tool that asks for `vocab_size`, `hidden_size` or `use_cache` means the base model's.

    def __getattr__(self, name: str) -> Any:
        base = vars(self).get("base_config")
        if name.startswith("_") or name in OF_GENERATION or not isinstance(base, PreTrainedConfig):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(base, name)

    def __setattr__(self, name: str, value: Any) -> None:
        base = vars(self).get("base_config")
        of_base = isinstance(base, PreTrainedConfig) and (name in vars(base) or name in base.attribute_map)
        if of_base and name not in vars(self) and not name.startswith("_"):
            setattr(base, name, value)
        else:
            super().__setattr__(name, value)

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Nothing: the base configuration has done this. transformers 5.17 would write a `rope_theta` into the
        parameters of gemma3, which are kept by type of layer, and then refuse to save them."""
        return kwargs

    def get_text_config(self, *args: Any, **kwargs: Any) -> PreTrainedConfig:
        """Tools that ask a configuration for sizes mean the base model's."""
        if self.base_config is None:
            return self
        return self.base_config.get_text_config(*args, **kwargs)

    def kept_layers(self, layers: int) -> list[int]:
        """The layers, of so many, that stay softmax attention."""
        if self.softmax_every is not None and self.softmax_layers is not None:
            raise T2RError("give softmax_layers or softmax_every, not both")
        if self.softmax_every is not None:
            return [i for i in range(layers) if (layers - 1 - i) % self.softmax_every == 0]
        chosen = self.softmax_layers or []
        if isinstance(chosen, str) or not all(type(layer) is int for layer in chosen):
            raise T2RError(f"softmax_layers: give numbers, not {chosen!r}; only convert can find them (auto:N)")
        kept = sorted(set(chosen))
        for layer in kept:
            if not 0 <= layer < layers:
                raise T2RError(f"softmax_layers: there is no layer {layer}; the model has layers 0 to {layers - 1}")
        return kept

    def keeps(self, cross: bool) -> bool:
        """Whether cross attention, or causal attention, stays softmax in every layer."""
        return ("cross" if cross else "causal") not in self.recurrent.split(",")

    def map_options(self, cross: bool = False) -> dict[str, Any]:
        """What the feature map of a site is made from, apart from the site's own shape."""
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
        """Write the file that is saved with the weights, from which no other class can be built (see `GUARD`)."""
        fields = json.loads(self.to_json_string(use_diff=False))
        if fields.get("base_config"):
            fields["base_config"]["dtype"] = GUARD
        # transformers has put the class of this process here, which exists only after a swap.
        classes = {key: name.partition(".")[2] for key, name in (fields.get("auto_map") or {}).items()}
        fields["architectures"] = [name for key, name in classes.items() if key != "AutoConfig"]
        write_text(Path(json_file_path), json.dumps(fields, indent=2, sort_keys=True) + "\n")

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        if self.base_config is not None:
            output["base_config"] = self.base_config.to_dict()
        return output


def read_base_config(fields: Any, dtype: Any) -> PreTrainedConfig:
    """The base model's configuration from its saved fields; `dtype` is that of the weights."""
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise T2RError("the configuration's base_config names no model_type: it was not saved by t2r")
    fields = dict(fields)
    if fields.get("dtype") == GUARD:
        fields["dtype"] = dtype
    try:
        config: PreTrainedConfig = AutoConfig.for_model(fields.pop("model_type"), **fields)
    except Exception as error:  # each configuration checks its fields in its own way
        reason = " ".join(str(error).split()) or type(error).__name__
        raise T2RError(f"the configuration's base_config is damaged: {reason}") from error
    return config


AutoConfig.register("t2r", T2RConfig, exist_ok=True)
