"""Checkpoints with checksums. A last file lists the others, and a checkpoint that does not match it is not used."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

from t2r.storage import write_text

logger = logging.getLogger(__name__)

COMPLETE = "complete"
"""The last file of a checkpoint. A checkpoint without it is incomplete and is not used."""
NUMBERED = re.compile(r"checkpoint-(\d{1,18})")
PIECE = 1 << 24


def seal(folder: Path) -> None:
    """Flush every file of a checkpoint to disk, then write the list of sizes and checksums."""
    listed = {}
    for path in files(folder):
        flush(path)
        listed[path.relative_to(folder).as_posix()] = [path.stat().st_size, checksum(path)]
    flush(folder)
    write_text(folder / COMPLETE, json.dumps(listed, indent=1))
    flush(folder)


def is_whole(folder: Path) -> bool:
    """Return whether all files of a sealed checkpoint are as they were written."""
    try:
        listed = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
        return bool(listed) and all(
            (folder / name).stat().st_size == size and checksum(folder / name) == crc
            for name, (size, crc) in listed.items()
        )
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint, or None. Damaged ones are skipped with a warning."""
    sealed = {path.parent: NUMBERED.fullmatch(path.parent.name) for path in folder.glob(f"checkpoint-*/{COMPLETE}")}
    steps = {checkpoint: int(name[1]) for checkpoint, name in sealed.items() if name is not None}
    for checkpoint in sorted(set(sealed) - set(steps)):
        logger.warning("%s is not used: the name of a checkpoint ends with its step", checkpoint)
    for checkpoint in sorted(steps, key=steps.__getitem__, reverse=True):
        if is_whole(checkpoint):
            return checkpoint
        logger.warning("%s is damaged; the next older checkpoint is used if there is one", checkpoint)
    return None


def remove_incomplete(folder: Path) -> None:
    """Remove checkpoints that were being written when their process ended. Trainer would count them, and remove
    complete ones in their place."""
    for checkpoint in folder.glob("checkpoint-*"):
        if not (checkpoint / COMPLETE).exists():
            shutil.rmtree(checkpoint, ignore_errors=True)


def files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != COMPLETE)


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file. It is fast, and detects damage, not tampering."""
    value = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            value = zlib.crc32(piece, value)
    return value


def flush(path: Path) -> None:
    """Flush a file or folder to disk. Folders are skipped on systems that cannot flush them."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        if path.is_dir():
            return
        raise
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(handle)
