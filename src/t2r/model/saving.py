"""How a swapped model is saved and loaded: under our own `model_type`, with the base model's configuration within.

A plain load under the base model's type would rebuild softmax attention, so the configuration says `t2r`, and the base
model's own class refuses the folder (see `T2RConfig.to_json_file`).
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
from pathlib import Path
from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig, PreTrainedModel

from t2r import __version__, compat
from t2r.attention.interface import NAME
from t2r.config import OPTIONS, T2RConfig
from t2r.errors import T2RError
from t2r.model.card import model_card
from t2r.storage import write_text

logger = logging.getLogger(__name__)

REMOTE_CODE = "modeling_t2r.py"
"""Saved beside the weights, so that `trust_remote_code=True` finds t2r without an `import t2r`."""


class SavedModel:
    """Saving and loading, for `T2RModel`."""

    base_class: ClassVar[type[PreTrainedModel]]
    auto_class: ClassVar[str]
    task_name: ClassVar[str]
    t2r_config: T2RConfig
    config: Any

    @classmethod
    def class_named(cls, architectures: list[str]) -> type[SavedModel]:
        """The swapped class of the first of these base model classes that exists."""
        raise NotImplementedError

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """As any model's, but the configuration says that this is a t2r model and what it was made from."""
        folder = Path(save_directory)
        if folder.is_file():
            raise T2RError(f"{save_directory} is a file: name a folder to save to")
        folder.mkdir(parents=True, exist_ok=True)
        code = f'from t2r import T2RConfig, {self.task_name}\n\n__all__ = ["T2RConfig", "{self.task_name}"]\n'
        write_text(folder / REMOTE_CODE, f'"""Loads this model by t2r: pip install t2r."""\n\n{code}')
        if not (folder / "README.md").exists():
            write_text(folder / "README.md", model_card(self))
        # transformers saves `model.config`. The model itself keeps its own: a second object with the same weights has
        # the configuration to save, so that other threads see nothing of it.
        twin = copy.copy(self)
        twin.config = self.saved_config()
        super(SavedModel, twin).save_pretrained(save_directory, **kwargs)  # type: ignore[misc]

    def saved_config(self) -> T2RConfig:
        """The configuration to save: our options, and the base model's configuration within."""
        base = self.config.to_dict()
        for name in [name for name in base if name.startswith("_") or name in ("attn_implementation", "t2r")]:
            del base[name]  # of this process, not of the model
        base["architectures"] = [self.base_class.__name__]
        module = Path(REMOTE_CODE).stem
        config = T2RConfig(
            **{name: getattr(self.t2r_config, name) for name in (*OPTIONS, "merged")},
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
        """Load a saved model. Strict: a tensor that is missing, unexpected or misshaped is an error."""
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
                "tp_plan: tensor parallelism would divide the heads, but not their feature maps; use device_map, or "
                "FSDP to train"
            )
        kwargs.pop("trust_remote_code", None)
        kwargs["ignore_mismatched_sizes"] = True  # the refusal of transformers does not name the tensor; ours does
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
        return (model, info) if wants_info else model  # type: ignore[return-value]

    @classmethod
    def described(cls, config: Any, source: Any) -> T2RConfig:
        """The configuration of a swapped model from that of its base model, which has the options as `config.t2r`.

        Without a source (the weights are given as `state_dict`) options that are not there have their defaults."""
        if not hasattr(config, "t2r") and source is not None:
            raise T2RError(
                f"config is a plain {type(config).__name__}: give a T2RConfig, the config of a swapped model, or none"
            )
        base = config.to_dict()
        if hasattr(cls, "base_class"):
            base["architectures"] = [cls.base_class.__name__]
        return T2RConfig(**base.pop("t2r", {}), base_config=base)

    @classmethod
    def building(cls, config: Any, options: dict[str, Any]) -> tuple[Any, PreTrainedConfig]:
        """The class to build, and the base configuration to build it from; `t2r_config` is added to the options.

        Options that are fields of the base configuration (`use_cache=False`) are taken out and set there."""
        attention = options.pop("attn_implementation", None)
        if isinstance(config, T2RConfig):
            attention = attention or compat.requested_attention(config)
        if attention not in (None, NAME):
            logger.warning("attn_implementation=%r has no effect: the attention of this model is recurrent", attention)
        if not isinstance(config, T2RConfig):
            return cls, config
        options["t2r_config"] = config
        base = copy.deepcopy(config.base_config)
        recurrent = cls.class_named(base.architectures or [])
        if not issubclass(recurrent, cls):
            raise T2RError(f"this is a {recurrent.task_name}, not a {cls.__name__}")
        known = {field.name for field in dataclasses.fields(base)} | set(base.attribute_map)
        for name in (known & set(options)) - {"dtype"}:
            setattr(base, name, options.pop(name))
        if base.dtype is None:
            base.dtype = config.dtype
        return recurrent, base


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
