"""The teacher's distribution of a text on disk: the k most likely tokens of every position, made by `t2r teach`.

    header.json          what the folder was made of
    blocks.safetensors   `keys [blocks]`: a hash of the tokens of each block
    00000.safetensors    a shard: `ids` and `log_p [blocks, block_size, k]`, `rest [blocks, block_size]`

A block is found by its tokens, so a conversion may hold out a part of the text, or read its sources in other
proportions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import Dataset

from t2r.data.fingerprint import digest
from t2r.data.mixture import MixedBlocks
from t2r.errors import T2RError
from t2r.model.top_k import TopK
from t2r.storage import kind_of, read_json, whole_file, write_text, writing

FORMAT = 3
"""In format 1, the header lacks `config`; up to format 2, a shard does not have its place."""
HEADER, BLOCKS = "header.json", "blocks.safetensors"
TAUGHT = "taught."
"""How the names of a teacher's tensors in a batch begin."""
SMALL_IDS = 1 << 16
"""The largest vocabulary whose ids are stored in 16 bits."""
WRITTEN = "t2r_teacher"
"""The key in the metadata of a shard."""
SLACK = 0.05
"""How far the probabilities of a position may be from a sum of 1. Half precision is within 0.01."""
OPEN = 128
"""Shards that are kept open."""


@dataclass(frozen=True)
class Header:
    """What a folder was made of. Two processes that write into it must agree in everything but names."""

    model: str
    """The name of the teacher."""
    weights: str
    """The fingerprint of its weights."""
    tokenizer: str
    vocabulary: int
    """The number of its logits."""
    block_size: int
    documents: bool
    top_k: int
    temperature: float
    bf16: bool
    """Whether the logits were computed in bfloat16."""
    blocks: int
    shard: int
    """Blocks of a shard. The last one may have fewer."""
    text: str
    """A hash of all blocks."""
    config: str = ""
    """The fingerprint of its configuration. Folders of format 1 have none."""

    @property
    def shards(self) -> int:
        return -(-self.blocks // self.shard)

    def range(self, number: int) -> range:
        """Return the blocks of a shard."""
        return range(number * self.shard, min(self.blocks, (number + 1) * self.shard))

    def place(self, number: int) -> str:
        """Return a hash of the teacher, the text, and the place of a shard in it."""
        return digest([self.weights, self.text, self.block_size, self.shard, number])

    @property
    def bytes_per_token(self) -> int:
        return self.top_k * ((2 if self.vocabulary <= SMALL_IDS else 4) + 2) + 4

    @property
    def bytes(self) -> int:
        return self.blocks * self.block_size * self.bytes_per_token

    def save(self, folder: Path) -> None:
        write_text(folder / HEADER, json.dumps({"format": FORMAT} | asdict(self), indent=1))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the header of a folder. Raises T2RError if it is damaged."""
        found = read_json(folder / HEADER)
        hints = {entry.name: entry.type for entry in dataclasses.fields(cls)}
        kinds: dict[str, Any] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}
        if not isinstance(found, dict) or type(number := found.pop("format", None)) is not int:
            raise T2RError(f"{folder / HEADER} is not that of a folder of t2r teach")
        if number > FORMAT:
            raise T2RError(f"{folder} has format {number}; this version of t2r supports up to {FORMAT}: upgrade t2r")
        if number == 1:
            found.setdefault("config", "")
        counts = ("vocabulary", "block_size", "top_k", "temperature", "blocks", "shard")
        if (
            found.keys() != hints.keys()
            or not all(type(found[name]) in kinds[str(hint)] for name, hint in hints.items())
            or not all(found[name] > 0 for name in counts)
        ):
            raise T2RError(f"{folder / HEADER} is damaged: make the folder again by t2r teach")
        return cls(**found)


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.safetensors"


class Written(NamedTuple):
    """The probability outside of the top k, summed over the positions that are scored."""

    rest: float
    scored: int
    place: str | None = None
    """What the shard belongs to (`Header.place`). None: an earlier version wrote it."""


def save_shard(path: Path, header: Header, number: int, known: TopK, written: Written) -> None:
    """Write the distributions of the blocks of a shard atomically."""
    dtype = torch.uint16 if header.vocabulary <= SMALL_IDS else torch.int32
    tensors = {"ids": known.ids.to(dtype), "log_p": known.log_p.half(), "rest": known.rest.float()}
    about = {WRITTEN: json.dumps(written._replace(place=header.place(number)))}
    with writing(path), whole_file(path) as temporary:
        save_file(tensors, temporary, metadata=about)


def save_keys(folder: Path, keys: NDArray[np.int64]) -> None:
    """Write the hashes of all blocks atomically."""
    with writing(folder / BLOCKS), whole_file(folder / BLOCKS) as temporary:
        save_file({"keys": torch.from_numpy(keys)}, temporary)


def read_keys(folder: Path, header: Header) -> NDArray[np.int64]:
    """Return the hashes of all blocks. Raises T2RError if they are not those of the header."""
    path = folder / BLOCKS
    try:
        keys: NDArray[np.int64] = load_file(path)["keys"].numpy()
    except (SafetensorError, OSError, KeyError) as error:
        raise T2RError(f"{path} cannot be read ({error}): repeat t2r teach, which writes it again") from error
    if keys.shape != (header.blocks,) or keys.dtype != np.int64 or digest(keys.tolist()) != header.text:
        raise T2RError(f"{path} does not belong to {HEADER}: repeat t2r teach, which writes it again")
    return keys


def are_distributions(known: TopK, vocabulary: int) -> bool:
    """Return whether these can be the distributions of some positions, whose sums are rounded."""
    ids, log_p, rest = known
    total = log_p.float().exp().sum(-1) + rest
    return (
        log_p.is_floating_point()
        and 0 <= int(ids.min()) <= int(ids.max()) < vocabulary
        and bool((rest >= 0).all())
        and bool(((total - 1).abs() < SLACK).all())  # false also for NaN
    )


def block_keys(items: Any, report: Callable[[int], None] = lambda done: None) -> NDArray[np.int64]:
    """Return a hash of what the teacher reads of each block."""
    keys = np.empty(len(items), np.int64)
    for index in range(len(items)):
        item, found = items[index], hashlib.blake2b(digest_size=8)
        for name in ("input_ids", "position_ids"):
            if name in item:
                found.update(item[name].numpy().astype("<i4").tobytes())
        keys[index] = int.from_bytes(found.digest(), "little", signed=True)
        report(index + 1)
    return keys


class TeacherLogits:
    """A complete folder. Raises T2RError if it is not one."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if kind_of(self.folder / HEADER) != "file":
            raise T2RError(f"{folder} has no logits of a teacher: make them by t2r teach MODEL {folder} --train …")
        self.header = Header.load(self.folder)
        self.keys = read_keys(self.folder, self.header)  # first: a damaged header may have any number of blocks
        missing = [n for n in range(self.header.shards) if not shard_path(self.folder, n).exists()]
        if missing:
            raise T2RError(
                f"{folder} has {self.header.shards - len(missing):,} of {self.header.shards:,} shards: finish it by "
                "the same t2r teach command"
            )
        self._open: OrderedDict[int, Any] = OrderedDict()
        parts = [self.check_shard(number) for number in range(self.header.shards)]
        self.rest = sum(part.rest for part in parts) / max(1, sum(part.scored for part in parts))
        """The mean probability outside of the top k."""
        self._places: dict[int, NDArray[np.int64]] = {}

    def to_dict(self) -> dict[str, Any]:
        """Return what results say about the folder."""
        about = self.header
        return {"top_k": about.top_k, "temperature": about.temperature, "bf16": about.bf16, "rest": self.rest}

    def check_shard(self, number: int) -> Written:
        header, damaged = self.header, f"{shard_path(self.folder, number)} is damaged: delete it, and repeat t2r teach"
        try:
            with safe_open(shard_path(self.folder, number), "pt") as file:
                shape = file.get_slice("ids").get_shape()
                rest, scored, *place = json.loads((file.metadata() or {})[WRITTEN])
                written = Written(float(rest), int(scored), *place)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise T2RError(f"{damaged} ({error})") from error
        if shape != [len(header.range(number)), header.block_size, header.top_k]:
            raise T2RError(damaged)
        if written.place not in (None, header.place(number)):
            raise T2RError(
                f"{shard_path(self.folder, number)} belongs to another place or folder: delete it, and repeat t2r teach"
            )
        return written

    def places(self, items: MixedBlocks) -> NDArray[np.int64]:
        """Return the place of each block in the folder. Raises T2RError if the folder does not have all of them."""
        if len(items) not in self._places:  # the text does not change
            own, keys = self.keys, block_keys(items)
            order = np.argsort(own, kind="stable")
            places = order[np.searchsorted(own, keys, sorter=order).clip(max=len(own) - 1)]
            if lacking := int((own[places] != keys).sum()):
                raise T2RError(
                    f"{self.folder} lacks {lacking:,} of the {len(items):,} blocks of this text: it was made of "
                    "another text, or with another tokenizer; give t2r teach the same --train"
                )
            self._places[len(items)] = places
        return self._places[len(items)]

    def block(self, place: int) -> dict[str, Tensor]:
        """Return the distributions of a block, for a batch."""
        number, row = divmod(int(place), self.header.shard)
        try:
            file = self.opened(number)
            ids, log_p, rest = (file.get_slice(name)[row] for name in TopK._fields)
        except (SafetensorError, OSError, IndexError) as error:
            raise T2RError(f"{shard_path(self.folder, number)} cannot be read: {error}") from error
        ids, size = ids.to(torch.int32), (self.header.block_size, self.header.top_k)
        known = TopK(ids, log_p, rest)
        right = (ids.shape, log_p.shape, rest.shape) == (size, size, size[:1])
        if not right or not are_distributions(known, self.header.vocabulary):
            raise T2RError(f"{shard_path(self.folder, number)} is damaged: delete it, and repeat t2r teach")
        return {TAUGHT + name: x for name, x in known._asdict().items()}

    def opened(self, number: int) -> Any:
        if number not in self._open:
            while len(self._open) >= OPEN:
                self._open.popitem(last=False)
            self._open[number] = safe_open(shard_path(self.folder, number), "pt")
        self._open.move_to_end(number)
        return self._open[number]


class TaughtBlocks(Dataset[dict[str, Tensor]]):
    """Blocks of a text with the distributions of their teacher."""

    def __init__(self, items: MixedBlocks, logits: TeacherLogits) -> None:
        self.items, self.logits, self.places = items, logits, logits.places(items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.items[index] | self.logits.block(self.places[index])

    @property
    def portions(self) -> list[tuple[int, Fraction]]:
        return self.items.portions

    def tokens_of_sources(self, counts: NDArray[np.int64]) -> list[int]:
        return self.items.tokens_of_sources(counts)


def take_taught(batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], TopK | None]:
    """Return a batch without the distributions of the teacher, and these, with one row for each position."""
    known = {name: x for name, x in batch.items() if name.startswith(TAUGHT)}
    if not known:
        return batch, None
    rows = TopK(*(known[TAUGHT + name].flatten(0, 1) for name in TopK._fields))
    return {name: x for name, x in batch.items() if name not in known}, rows
