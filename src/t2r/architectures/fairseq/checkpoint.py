"""Reading settings and tensors of a fairseq checkpoint, without running code from its pickle.

Besides the weights, such a file holds objects of argparse, omegaconf, numpy and fairseq. None of these packages is
imported. Each name is replaced by a `StandIn`, which only stores its arguments. All other names that torch does not
allow in a weights-only file are refused.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import zipfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.serialization import safe_globals
from transformers import PreTrainedModel

from t2r.errors import T2RError

STOOD_IN_FOR = re.compile(r"(argparse|fairseq|numpy|omegaconf|typing|_operator)\..+")
TYPES = ("bool", "dict", "float", "int", "list", "str", "tuple")
"""Built-in types that omegaconf uses to declare the type of a value."""
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_fast": "gelu_new",
    "gelu_accurate": "gelu_new",
    "tanh": "tanh",
    "swish": "silu",
}
LAYER_NORMS = {  # indices of layer norms in old checkpoints
    "encoder": {"0": "self_attn_layer_norm", "1": "final_layer_norm"},
    "decoder": {"0": "self_attn_layer_norm", "1": "encoder_attn_layer_norm", "2": "final_layer_norm"},
}


class StandIn:
    """Replacement of a class or function named in a checkpoint. It stores its arguments and does nothing else."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


def new_dict(*arguments: Any) -> dict[Any, Any]:
    """Replacement of defaultdict. The pickle then adds items to it."""
    return {}


class Checkpoint(NamedTuple):
    path: str
    settings: dict[str, Any]
    tensors: Tensors

    def need(self, name: str) -> Any:
        if self.settings.get(name) is None:
            raise T2RError(f"{self.path} has no setting {name}: it is not a checkpoint of a fairseq transformer")
        return self.settings[name]

    def number(self, name: str) -> float:
        """Return a setting as a number, 0 if it is not there."""
        return float(self.converted(name, float, self.settings.get(name) or 0.0))

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a setting as a whole number. Without a default, it is needed."""
        value = self.need(name) if default is None else self.settings.get(name) or default
        return int(self.converted(name, int, value))

    def wholes(self, name: str) -> list[int]:
        """Return a setting as a list of whole numbers, for example "20000,60000"."""
        value = self.settings.get(name) or ()
        parts = value.strip("[]() ").split(",") if isinstance(value, str) else value
        return [int(self.converted(name, int, part)) for part in parts if part != ""]

    def converted(self, name: str, kind: type, value: Any) -> Any:
        try:
            return kind(value)
        except (TypeError, ValueError) as error:
            raise T2RError(f"{self.path} has {name}={self.settings.get(name)}, which is not a number") from error

    def refuse(self, names: tuple[str, ...], target: str) -> None:
        """Raise T2RError for settings that the target model does not support."""
        for name in names:
            if self.settings.get(name):
                raise T2RError(
                    f"{self.path} was trained with {name}={self.settings[name]}: {target} does not support it"
                )

    def layers(self, part: str) -> int:
        """Return the number of layers. Raises T2RError if it differs from the settings."""
        found = len({match[1] for name in self.tensors.left if (match := re.match(rf"{part}\.layers\.(\d+)\.", name))})
        if found != self.settings.get(f"{part}_layers", found):
            raise T2RError(
                f"{self.path} has {found} {part} layers, but its settings say {self.settings[f'{part}_layers']}: "
                "the checkpoint is incomplete or was pruned"
            )
        return found

    def activation(self) -> str:
        name = self.settings.get("activation_fn") or "relu"
        if name not in ACTIVATIONS:
            raise T2RError(f"{self.path} was trained with activation_fn={name}: supported are {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def activation_dropout(self) -> float:
        return self.number("activation_dropout") or self.number("relu_dropout")


class Tensors:
    """The weights of a checkpoint. Each is taken once, and `finish` raises an error if some were not taken."""

    def __init__(self, path: str, named: Mapping[str, Tensor]) -> None:
        self.path = path
        self.left = upgraded(named)
        # From matrices only, because version markers are always float32.
        matrices = [t.dtype for t in self.left.values() if t.is_floating_point() and t.dim() == 2]
        self.dtype = reduce(torch.promote_types, matrices or [torch.float32])

    def __contains__(self, name: str) -> bool:
        return name in self.left

    def take(self, name: str) -> Tensor:
        if name not in self.left:
            raise T2RError(f"{self.path} has no tensor {name}: it is damaged, or of another architecture")
        return self.left.pop(name)

    def take_equal(self, name: str, to: Tensor, why: str) -> None:
        """Take a tied tensor, which is in the file under each of its names, and check that it is equal."""
        if name in self.left and not torch.equal(self.left.pop(name), to):
            raise T2RError(f"{self.path} uses {why}, but {name} differs from the tensor that it is tied to")

    def take_layer(self, prefix: str, *attentions: str) -> dict[str, Tensor]:
        """Take the tensors of a layer. Their names are the same in the target models."""
        modules = [f"{attention}.{side}_proj" for attention in attentions for side in ("q", "k", "v", "out")]
        modules += [f"{attention}_layer_norm" for attention in attentions] + ["fc1", "fc2", "final_layer_norm"]
        names = [f"{prefix}.{module}.{part}" for module in modules for part in ("weight", "bias")]
        return {name: self.take(name) for name in names}

    def finish(self, *ignored: str) -> None:
        """Raise T2RError if a tensor was not taken, except for those in `ignored`."""
        lost = sorted(name for name in self.left if name not in ignored)
        if lost:
            named = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
            raise T2RError(
                f"{self.path} has tensors that the model does not use ({named}): it has another architecture"
            )


def upgraded(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert old names of tensors to current ones: split fused projections, and name numbered layer norms."""
    new: dict[str, Tensor] = {}
    for name, tensor in named.items():
        if (match := re.fullmatch(r"(.+\.)in_proj_(weight|bias)", name)) and len(parts := tensor.chunk(3)) == 3:
            for side, part in zip("qkv", parts, strict=True):
                new[f"{match[1]}{side}_proj.{match[2]}"] = part
        elif match := re.fullmatch(r"((encoder|decoder)\.layers\.\d+)\.layer_norms\.(\d)\.(weight|bias)", name):
            norm = LAYER_NORMS[match[2]].get(match[3], f"layer_norms.{match[3]}")
            new[f"{match[1]}.{norm}.{match[4]}"] = tensor
        else:
            new[name] = tensor
    return new


def fill(model: PreTrainedModel, weights: Mapping[str, Tensor], path: str) -> None:
    """Load all weights into a model, except computed tables of positions. Raises T2RError if a shape is wrong."""
    expected = {name: tensor for name, tensor in model.state_dict().items() if "embed_positions" not in name}
    assert set(expected) == set(weights), sorted(set(expected) ^ set(weights))
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            raise T2RError(
                f"{path} does not match its settings: {name.removeprefix('model.')} has shape {list(tensor.shape)}, "
                f"expected {list(expected[name].shape)}"
            )
    model.load_state_dict(dict(weights), strict=False)


# --- Reading ------------------------------------------------------------------------------------------------


def read_checkpoint(path: str) -> Checkpoint:
    """Read a checkpoint. Raises T2RError if the file is missing, damaged, or not a fairseq checkpoint."""
    if not Path(path).is_file():
        raise T2RError(f"there is no file {path}")
    state = load(path)
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise T2RError(f"{path} is not a fairseq checkpoint: it has no 'model'")
    named = state["model"]
    if not named or not all(isinstance(name, str) and isinstance(t, Tensor) for name, t in named.items()):
        raise T2RError(f"{path} is not a fairseq checkpoint: its 'model' is not a dictionary of tensors")
    return Checkpoint(path, settings_of(path, state), Tensors(path, named))


def load(path: str) -> Any:
    """Call torch.load with `weights_only`, with stand-ins for names of fairseq and its dependencies."""
    try:
        allowed: list[Any] = [(StandIn, name) for name in names_in(path) if STOOD_IN_FOR.fullmatch(name)]
        allowed += [(StandIn, f"builtins.{name}") for name in TYPES] + [(new_dict, "collections.defaultdict")]
        with safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it requests {name[1]}, which is not allowed" if name else str(error).splitlines()[-1]
        raise T2RError(f"{path} is refused: {reason}") from error
    except Exception as error:  # damaged bytes cause errors of every type in the unpickler
        raise T2RError(f"{path} is not a checkpoint, or is damaged or truncated") from error


def names_in(path: str) -> set[str]:
    """Return the names of classes and functions in the pickle of a file, without running it."""
    with ExitStack() as stack:
        if zipfile.is_zipfile(path):
            archive = stack.enter_context(zipfile.ZipFile(path))
            inside = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            pickles: list[IO[bytes]] = [stack.enter_context(archive.open(inside[0]))]
        else:  # before torch 1.6: a magic number, a version, system information, and then the saved object
            pickles = [stack.enter_context(open(path, "rb"))] * 4
        found = [str(name) for file in pickles for code, name, _ in pickletools.genops(file) if code.name == "GLOBAL"]
    return {name.replace(" ", ".") for name in found}


# --- Settings -----------------------------------------------------------------------------------------------


def settings_of(path: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings. Old files have a flat `args`. New ones have a `cfg` with sections for model and task."""
    if state.get("args") is not None:
        sections = [plain(state["args"])]
    else:
        config = plain(state.get("cfg"))
        config = config if isinstance(config, dict) else {}
        sections = [config.get("task"), config.get("model")]
    settings: dict[str, Any] = {}
    for section in sections:
        if isinstance(section, dict):
            settings |= flat(section)
    if not settings:
        raise T2RError(f"{path} is not a fairseq checkpoint: it has neither 'args' nor a 'cfg' with a model")
    return settings


def flat(section: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a section: `encoder: {layers: 6}` becomes `encoder_layers: 6`. References to other values are skipped."""
    out: dict[str, Any] = {}
    for name, value in section.items():
        if isinstance(value, dict):
            out |= {f"{name}_{inner}": v for inner, v in flat(value).items()}
        elif not (isinstance(value, str) and value.startswith("${")):
            out[str(name)] = value
    return out


def plain(value: Any) -> Any:
    """Convert namespaces, enumerations, and containers and nodes of omegaconf to dicts, lists and values."""
    if isinstance(value, StandIn):
        state = value.state
        if not isinstance(state, dict):
            return plain(value.arguments[0]) if len(value.arguments) == 1 else None
        return plain(state["_content"] if "_content" in state else state.get("_val", state))
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value
