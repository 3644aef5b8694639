"""T2RConfig: what was swapped and how. It is the only configuration that is saved with the weights."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from t2r.errors import T2RError
from t2r.storage import write_text

FORMAT = 2
"""The number of the saved format. A newer one is refused; older ones keep loading. Format 2 has the guard below."""

GUARD = "this folder holds a t2r model: import t2r, and load it with an Auto class"
"""Saved as the base configuration's dtype. `GPT2LMHeadModel.from_pretrained` finds that configuration in any folder,
whatever its `model_type`, and would build softmax attention; with this it fails in these words. The weights' dtype
is `T2RConfig.dtype`."""

OF_GENERATION = {name for name in GenerationConfig().to_dict() if not name.endswith("_token_id")} - {"use_cache"}
"""Names of generation options. FSMT's configuration has some, which transformers refuses in any that it saves."""


class T2RConfig(PreTrainedConfig):
    """Which attention a swapped model has, and the configuration of the model it was made from.

    Args:
        feature_map: one of `t2r.feature_maps.FEATURE_MAPS`.
        feature_size: the size of the features, the rows of the state. None: the map's own default.
        cross_feature_size: the same for cross attention. None: as `feature_size`.
        softmax_layers: decoder layers (from 0) that keep their softmax attention, cross attention included.
        softmax_every: keep every n-th layer counted from the top, the top one included (4: the paper's T2R-75%).
        shared: queries and keys share one map.
        grouped: with grouped-query attention, one key map and one state per key/value head; otherwise one
            per query head: a larger state with more capacity.
        decay: each feature of causal attention forgets, at a learned rate of its own.
        rotary: with rotary positions, the map sees queries and keys after their rotation; False: before it, so that
            only `decay` tells what is near.
        init: how the map starts, `paper` or `identity`. None: the map's own default.
        activation: of the `t2r` map.
        key_weights: of a learned map (t2r, hedgehog): each key counts by a learned weight, whoever asks.
        freeze_feature_map: do not train the map.
        seed: of the map's initialization and random vectors.
        merged: the map's affine part is folded into the projections: for inference only.
        base_config: the configuration of the base model.
    """

    model_type = "t2r"

    feature_map: str = "t2r"
    feature_size: int | None = None
    cross_feature_size: int | None = None
    softmax_layers: list[int] | None = None
    softmax_every: int | None = None
    shared: bool = True
    grouped: bool = True
    decay: bool = False
    rotary: bool = True
    init: str | None = None
    activation: str = "relu"
    key_weights: bool = False
    freeze_feature_map: bool = False
    seed: int = 0
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
        if isinstance(self.base_config, dict):
            fields = dict(self.base_config)
            if "model_type" not in fields:
                raise T2RError("the configuration's base_config names no model_type: it was not saved by t2r")
            if fields.get("dtype") == GUARD:
                fields["dtype"] = self.dtype
            self.base_config = AutoConfig.for_model(fields.pop("model_type"), **fields)
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
        of_base = isinstance(base, PreTrainedConfig) and name in vars(base) and name not in vars(self)
        if of_base and not name.startswith("_"):
            setattr(base, name, value)
        else:
            super().__setattr__(name, value)

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
            if self.softmax_every < 1:
                raise T2RError(f"softmax_every={self.softmax_every}: keep every n-th layer, n at least 1")
            return [i for i in range(layers) if (layers - 1 - i) % self.softmax_every == 0]
        chosen = self.softmax_layers or []
        if isinstance(chosen, str) or not all(type(layer) is int for layer in chosen):
            raise T2RError(f"softmax_layers: give numbers, not {chosen!r}; only convert can find them (auto:N)")
        kept = sorted(set(chosen))
        for layer in kept:
            if not 0 <= layer < layers:
                raise T2RError(f"softmax_layers: there is no layer {layer}; the model has layers 0 to {layers - 1}")
        return kept

    def map_options(self, cross: bool = False) -> dict[str, Any]:
        """What the feature map of a site is made from, apart from the site's own shape."""
        size = self.feature_size
        if cross and self.cross_feature_size is not None:
            size = self.cross_feature_size
        options: dict[str, Any] = {
            "feature_size": size,
            "shared": self.shared,
            "grouped": self.grouped,
            "decay": self.decay and not cross,
            "trainable": not self.freeze_feature_map,
            "seed": self.seed,
        }
        if self.init is not None:
            options["init"] = self.init
        if self.activation != "relu":
            options["activation"] = self.activation
        if self.key_weights:
            options["key_weights"] = True
        return options

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


OPTIONS = (
    "feature_map",
    "feature_size",
    "cross_feature_size",
    "softmax_layers",
    "softmax_every",
    "shared",
    "grouped",
    "decay",
    "rotary",
    "init",
    "activation",
    "key_weights",
    "freeze_feature_map",
    "seed",
)
"""What a user chooses: the same names in `swap`, on the command line and in the saved file."""

AutoConfig.register("t2r", T2RConfig, exist_ok=True)
