"""Sizes that the configuration of a saved model claims, compared with its weights before the model is built.

A configuration may be a stranger's. A billion layers would be built one after the other, until the memory is full.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from t2r.errors import T2RError

LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_encoder_layers",
    "num_decoder_layers", "attention_types",
)  # fmt: skip
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
FEW = {"layers": 1000, "experts": 10_000}
"""Numbers that are built quickly, and are never refused: parts of a model, such as a vision encoder, may be left out of
a checkpoint."""
LARGEST_HEADER = 100_000_000
"""Bytes of the header of a safetensors file, as in safetensors itself."""


def check_sizes(source: str, fields: Mapping[str, Any]) -> None:
    """Raise T2RError if a configuration has more layers or experts than the weights in its folder have tensors.

    Of a model without weights here, such as one on the Hub, at most as many as are built quickly."""
    claimed = list(counts(fields))
    if all(number <= FEW[kind] for kind, _, number in claimed):
        return
    shapes = saved_shapes(Path(source))
    sides = [size for shape in shapes for size in shape]
    for kind, name, number in claimed:
        # Experts are tensors of their own, or the rows of one.
        most = max(FEW[kind], len(shapes), *(sides if kind == "experts" else ()))
        if number > most:
            has = f"its weights have {len(shapes):,} tensors" if shapes else f"at most {most:,} are supported"
            raise T2RError(f"the config.json of {source} is not valid: {name} is {number:,}, but {has}")


def counts(fields: Any, name: str = "") -> Iterator[tuple[str, str, int]]:
    """Yield the numbers of layers and of experts in a configuration, and in those inside of it, with their names."""
    pairs = fields.items() if isinstance(fields, dict) else ((name, x) for x in fields)
    for key, value in pairs:
        kind = "layers" if key in LAYERS else "experts" if key in EXPERTS else None
        if isinstance(value, dict) or (isinstance(value, list) and kind):
            yield from counts(value, str(key))
        elif kind and isinstance(value, int | float) and value == value:  # not NaN
            yield kind, str(key), int(value) if abs(value) < 2**63 else 2**63


def saved_shapes(folder: Path) -> list[tuple[int, ...]]:
    """Return the shapes of all tensors in the safetensors files of a folder. Files that are damaged have none: loading
    reports them."""
    found = []
    for path in folder.glob("*.safetensors"):
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length)) if length <= LARGEST_HEADER else {}
            found += [tuple(map(int, entry["shape"])) for name, entry in header.items() if name != "__metadata__"]
        except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return found
