"""Saving and loading of swapped models.

The saved `model_type` is `t2r`, and the base model's configuration is nested in `base_config`. Loading the weights with
the base model's class would build softmax attention; it fails instead (see `T2RConfig.to_json_file`).
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
from pathlib import Path
from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig, PreTrainedModel

from t2r import compat
from t2r._version import __version__
from t2r.attention.interface import NAME
from t2r.attention.joint import refuse_quantized_layers
from t2r.attention.recurrence import Recurrence
from t2r.config import KEPT, T2RConfig
from t2r.errors import T2RError
from t2r.model.card import model_card
from t2r.storage import write_text
from t2r.surgery.frozen import freeze

logger = logging.getLogger(__name__)

REMOTE_CODE = "modeling_t2r.py"
"""Saved with the weights, so that `trust_remote_code=True` works without `import t2r`."""


class SavedModel:
    """Mixin of `T2RModel` for saving and loading."""

    base_class: ClassVar[type[PreTrainedModel]]
    auto_class: ClassVar[str]
    task_name: ClassVar[str]
    t2r_config: T2RConfig
    config: Any

    @classmethod
    def class_named(cls, architectures: list[str]) -> type[SavedModel]:
        """Return the swapped class of the first of these base model classes that exists."""
        raise NotImplementedError

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save the model with its T2RConfig and a model card. `kwargs` are those of `PreTrainedModel`."""
        folder = Path(save_directory)
        if folder.is_file():
            raise T2RError(f"{save_directory} is a file: give a folder to save to")
        refuse_quantized_layers(self, "save")  # type: ignore[arg-type]
        folder.mkdir(parents=True, exist_ok=True)
        code = f'from t2r import T2RConfig, {self.task_name}\n\n__all__ = ["T2RConfig", "{self.task_name}"]\n'
        write_text(folder / REMOTE_CODE, f'"""Loads this model by t2r: pip install t2r."""\n\n{code}')
        if not (folder / "README.md").exists():
            write_text(folder / "README.md", model_card(self))
        # transformers saves `model.config`. A shallow copy of the model gets the configuration to save, so that other
        # threads that use the model are not affected.
        twin = copy.copy(self)
        twin.config = self.saved_config()
        compat.forget_renamings(twin)  # type: ignore[arg-type]
        super(SavedModel, twin).save_pretrained(save_directory, **kwargs)  # type: ignore[misc]

    def saved_config(self) -> T2RConfig:
        """Return the configuration to save: the swap options and the base model's configuration."""
        base = self.config.to_dict()
        for name in [name for name in base if name.startswith("_") or name in ("attn_implementation", "t2r")]:
            del base[name]  # belongs to this process, not to the model
        base["architectures"] = [self.base_class.__name__]
        module = Path(REMOTE_CODE).stem
        config = T2RConfig(
            **{name: getattr(self.t2r_config, name) for name in KEPT},
            base_config=base,
            t2r_version=__version__,
            architectures=[self.task_name],
            dtype=self.dtype,  # type: ignore[attr-defined]
        )
        config.auto_map = {"AutoConfig": f"{module}.T2RConfig", self.auto_class: f"{module}.{self.task_name}"}
        return config

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *args: Any,
        config: Any = None,
        **kwargs: Any,
    ) -> Self:
        """Load a saved model. Raises T2RError if a tensor is missing, unexpected or has the wrong shape."""
        source = pretrained_model_name_or_path
        if config is None or isinstance(config, str | os.PathLike):
            hub = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
            config = T2RConfig.from_pretrained(config or source, **{k: kwargs[k] for k in hub if k in kwargs})
        elif not isinstance(config, T2RConfig):
            config = cls.described(config, source)
        if config.base_config is None:
            raise T2RError(f"{source} is not a saved t2r model: its configuration has no base_config")
        if kwargs.get("tp_plan") is not None:
            raise T2RError(
                "tp_plan is not supported: tensor parallelism would split the heads, but not their feature maps; use "
                "device_map, or FSDP for training"
            )
        kwargs.pop("trust_remote_code", None)
        kwargs["ignore_mismatched_sizes"] = True  # the error of transformers does not name the tensor
        wants_info = kwargs.pop("output_loading_info", False)
        recurrent, base = cls.building(config, kwargs)
        kwargs |= {"config": base, "output_loading_info": True}
        try:
            model, info = super(SavedModel, recurrent).from_pretrained(source, *args, **kwargs)  # type: ignore[misc]
        except (RuntimeError, OSError, ValueError) as error:
            raise T2RError(f"{source} cannot be loaded: {error}") from error
        except Exception as error:
            if "safetensor" not in f"{type(error).__module__} {type(error).__name__}".lower():
                raise
            raise T2RError(f"{source} cannot be loaded: its weights are damaged ({error})") from error
        refuse_incomplete(str(source), info)
        freeze(model)  # loading replaces parameters, and sets `requires_grad` of all of them
        for module in model.modules():  # models are built without values, and windows are not saved as tensors
            if isinstance(module, Recurrence) and module.window is not None:
                module.give_window(module.window, module.window_sizes.device)
        return (model, info) if wants_info else model  # type: ignore[return-value]

    @classmethod
    def described(cls, config: Any, source: Any) -> T2RConfig:
        """Build a T2RConfig from a base model's configuration that has the swap options in `config.t2r`.

        Without a source (the weights are given as `state_dict`), missing options take their defaults."""
        if not hasattr(config, "t2r") and source is not None:
            raise T2RError(
                f"config is a {type(config).__name__}: give a T2RConfig or the config of a swapped model, or omit it"
            )
        base = config.to_dict()
        if hasattr(cls, "base_class"):
            base["architectures"] = [cls.base_class.__name__]
        return T2RConfig(**base.pop("t2r", {}), base_config=base)

    @classmethod
    def building(cls, config: Any, options: dict[str, Any]) -> tuple[Any, PreTrainedConfig]:
        """Return the class to build, and the base configuration to build it from. Adds `t2r_config` to the options.

        Options that are fields of the base configuration (`use_cache=False`) are moved to it."""
        attention = options.pop("attn_implementation", None)
        if isinstance(config, T2RConfig):
            attention = attention or compat.requested_attention(config)
        if attention not in (None, NAME):
            logger.warning("attn_implementation=%r has no effect: this model has recurrent attention", attention)
        if not isinstance(config, T2RConfig):
            return cls, config
        options["t2r_config"] = config
        base = copy.deepcopy(config.base_config)
        recurrent = cls.class_named(base.architectures or [])
        if not issubclass(recurrent, cls):
            raise T2RError(f"the model is a {recurrent.task_name}, not a {cls.__name__}")
        known = {field.name for field in dataclasses.fields(base)} | set(base.attribute_map)
        for name in (known & set(options)) - {"dtype"}:
            setattr(base, name, options.pop(name))
        if base.dtype is None:
            base.dtype = config.dtype
        return recurrent, base


def refuse_incomplete(source: str, info: Any) -> None:
    """Raise T2RError if tensors do not match the model; transformers only warns."""
    problems = []
    for key, words in (
        ("missing_keys", "missing"),
        ("unexpected_keys", "unexpected"),
        ("mismatched_keys", "wrong shape"),
        ("error_msgs", "not readable"),
    ):
        found = sorted(str(x[0] if isinstance(x, tuple) else x) for x in (info.get(key) or ()))
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            problems.append(f"{words}: {', '.join(found[:3])}{more}")
    if problems:
        raise T2RError(f"the weights of {source} do not match its configuration; {'; '.join(problems)}")
