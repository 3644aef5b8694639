"""A fairseq checkpoint: settings and tensors out of a pickle, without running anything that is in it.

Beside the weights such a file holds objects of argparse, omegaconf, numpy and fairseq itself. None of these is
imported: each name becomes a `StandIn`, which keeps what it is given. All else that torch does not itself allow in a
file of weights is refused.
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
"""Of Python itself, mentioned by omegaconf where it says of what type a value is."""
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_fast": "gelu_new",
    "gelu_accurate": "gelu_new",
    "tanh": "tanh",
    "swish": "silu",
}
LAYER_NORMS = {  # what a list of them was called before each had a name
    "encoder": {"0": "self_attn_layer_norm", "1": "final_layer_norm"},
    "decoder": {"0": "self_attn_layer_norm", "1": "encoder_attn_layer_norm", "2": "final_layer_norm"},
}


class StandIn:
    """Takes the place of any class or function that a checkpoint names: it keeps what it is given, and does nothing."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


def new_dict(*arguments: Any) -> dict[Any, Any]:
    """Stands in for defaultdict: what comes next in the file puts items into it."""
    return {}


class Checkpoint(NamedTuple):
    path: str
    settings: dict[str, Any]
    tensors: Tensors

    def need(self, name: str) -> Any:
        if self.settings.get(name) is None:
            raise T2RError(f"{self.path} does not say its {name}: it is not a checkpoint of a fairseq transformer")
        return self.settings[name]

    def refuse(self, names: tuple[str, ...], target: str) -> None:
        """Settings that change the computation, and that the model we make could not follow."""
        for name in names:
            if self.settings.get(name):
                raise T2RError(f"{self.path} was trained with {name}={self.settings[name]}: {target} cannot do that")

    def layers(self, part: str) -> int:
        """How many there are. The settings must agree, or the last ones may have been lost."""
        found = len({match[1] for name in self.tensors.left if (match := re.match(rf"{part}\.layers\.(\d+)\.", name))})
        if found != self.settings.get(f"{part}_layers", found):
            raise T2RError(
                f"{self.path} holds {found} layers of its {part}, and its settings say "
                f"{self.settings[f'{part}_layers']}: it is a part of a checkpoint, or was pruned"
            )
        return found

    def activation(self) -> str:
        name = self.settings.get("activation_fn") or "relu"
        if name not in ACTIVATIONS:
            raise T2RError(f"{self.path} was trained with activation_fn={name}: known are {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def activation_dropout(self) -> float:
        return float(self.settings.get("activation_dropout") or self.settings.get("relu_dropout") or 0.0)


class Tensors:
    """The weights of a checkpoint. Each is taken once; what nobody takes is an error, because it would be lost."""

    def __init__(self, path: str, named: Mapping[str, Tensor]) -> None:
        self.path = path
        self.left = upgraded(named)
        # Of the matrices: markers of versions are float32 whatever the model is.
        matrices = [t.dtype for t in self.left.values() if t.is_floating_point() and t.dim() == 2]
        self.dtype = reduce(torch.promote_types, matrices or [torch.float32])

    def __contains__(self, name: str) -> bool:
        return name in self.left

    def take(self, name: str) -> Tensor:
        if name not in self.left:
            raise T2RError(f"{self.path} has no tensor {name}: it is damaged, or of another architecture")
        return self.left.pop(name)

    def take_equal(self, name: str, to: Tensor, why: str) -> None:
        """A tied tensor is in the file under each of its names."""
        if name in self.left and not torch.equal(self.left.pop(name), to):
            raise T2RError(f"{self.path} says {why}, but {name} is not the tensor it should be tied to")

    def take_layer(self, prefix: str, *attentions: str) -> dict[str, Tensor]:
        """One block of the transformer, whose parts are called the same in the models that we make."""
        modules = [f"{attention}.{side}_proj" for attention in attentions for side in ("q", "k", "v", "out")]
        modules += [f"{attention}_layer_norm" for attention in attentions] + ["fc1", "fc2", "final_layer_norm"]
        names = [f"{prefix}.{module}.{part}" for module in modules for part in ("weight", "bias")]
        return {name: self.take(name) for name in names}

    def finish(self, *ignored: str) -> None:
        """Every tensor must have been taken, but for some that hold no knowledge."""
        lost = sorted(name for name in self.left if name not in ignored)
        if lost:
            named = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
            raise T2RError(
                f"{self.path} has tensors that the model would not use ({named}): its architecture is another"
            )


def upgraded(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names of today for the tensors of old files: fused projections, and norms that had only numbers."""
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
    """Give a model all its weights; tables of positions it computes itself."""
    expected = {name: tensor for name, tensor in model.state_dict().items() if "embed_positions" not in name}
    assert set(expected) == set(weights), sorted(set(expected) ^ set(weights))
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            raise T2RError(
                f"{path} does not fit its own settings: {name.removeprefix('model.')} is {list(tensor.shape)}, "
                f"not {list(expected[name].shape)}"
            )
    model.load_state_dict(dict(weights), strict=False)


# --- Reading ------------------------------------------------------------------------------------------------


def read_checkpoint(path: str) -> Checkpoint:
    if not Path(path).is_file():
        raise T2RError(f"there is no file {path}")
    state = load(path)
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise T2RError(f"{path} is not a fairseq checkpoint: it has no 'model'")
    named = state["model"]
    if not named or not all(isinstance(name, str) and isinstance(t, Tensor) for name, t in named.items()):
        raise T2RError(f"{path} is not a fairseq checkpoint: its 'model' is not a table of tensors")
    return Checkpoint(path, settings_of(path, state), Tensors(path, named))


def load(path: str) -> Any:
    """What torch.load gives under `weights_only`, with stand-ins for the names that fairseq leaves in its files."""
    try:
        allowed: list[Any] = [(StandIn, name) for name in names_in(path) if STOOD_IN_FOR.fullmatch(name)]
        allowed += [(StandIn, f"builtins.{name}") for name in TYPES] + [(new_dict, "collections.defaultdict")]
        with safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it asks for {name[1]}, which no model needs" if name else str(error).splitlines()[-1]
        raise T2RError(f"{path} is refused: {reason}") from error
    except (OSError, EOFError, ValueError, KeyError, IndexError, RuntimeError, zipfile.BadZipFile) as error:
        raise T2RError(f"{path} is not a checkpoint, or is damaged or cut off") from error


def names_in(path: str) -> set[str]:
    """The classes and functions that a file's pickle mentions, found by reading it and not by running it."""
    with ExitStack() as stack:
        if zipfile.is_zipfile(path):
            archive = stack.enter_context(zipfile.ZipFile(path))
            inside = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            pickles: list[IO[bytes]] = [stack.enter_context(archive.open(inside[0]))]
        else:  # before torch 1.6: a magic number, a version, facts of the machine, and then what was saved
            pickles = [stack.enter_context(open(path, "rb"))] * 4
        found = [str(name) for file in pickles for code, name, _ in pickletools.genops(file) if code.name == "GLOBAL"]
    return {name.replace(" ", ".") for name in found}


# --- Settings -----------------------------------------------------------------------------------------------


def settings_of(path: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Old files have one flat `args`; new ones a `cfg` of sections, of which model and task matter."""
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
    """encoder: {layers: 6} is the same as encoder_layers: 6. References to other sections stand there themselves."""
    out: dict[str, Any] = {}
    for name, value in section.items():
        if isinstance(value, dict):
            out |= {f"{name}_{inner}": v for inner, v in flat(value).items()}
        elif not (isinstance(value, str) and value.startswith("${")):
            out[str(name)] = value
    return out


def plain(value: Any) -> Any:
    """Namespaces, enumerations, and the containers and nodes of omegaconf, as dicts, lists and values."""
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
