"""Distributed training (`accelerate launch -m t2r convert …`): the main process writes and decides for all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

PATIENCE = timedelta(days=1)
"""How long other processes wait for the main one, which may tokenize a large corpus."""


def count() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def join(place: torch.device) -> torch.device:
    """Initialize distributed training, before anything else. Returns the device of this process."""
    if count() == 1:
        return place
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    PartialState(cpu=place.type == "cpu", timeout=PATIENCE)
    return place


def is_main() -> bool:
    return count() == 1 or bool(PartialState().is_main_process)


def wait() -> None:
    if count() > 1:
        PartialState().wait_for_everyone()


@contextmanager
def main_first() -> Iterator[None]:
    """Run the block in the main process before the others, which can then use its results."""
    if not is_main():
        wait()
    yield
    if is_main():
        wait()


def agreed(value: Any) -> Any:
    """Return the main process's value in all processes."""
    return value if count() == 1 else broadcast_object_list([value])[0]
