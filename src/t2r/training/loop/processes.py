"""Distributed training (`torchrun -m t2r convert …`): the main process writes and decides for all."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from t2r.errors import T2RError

PATIENCE = timedelta(days=1)
"""How long other processes wait for the main one, which may tokenize a large corpus."""


def count() -> int:
    """Return the number of processes. Raises T2RError if the variables of a launcher are wrong."""
    return of_launcher("WORLD_SIZE", 1, 1)


def rank() -> int:
    """Return the number of this process, as the launcher says. Raises T2RError if it does not say that."""
    return of_launcher("RANK", 0, 0)


def of_launcher(name: str, default: int, least: int) -> int:
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise T2RError(
            f"the environment has {name}={text}, which is not a whole number from {least}: unset it, or use torchrun"
        )
    return int(text)


def join(place: torch.device) -> torch.device:
    """Initialize distributed training, before anything else. Returns the device of this process.

    Raises T2RError if there are no other processes to wait for."""
    if count() == 1:
        return place
    missing = [name for name in ("RANK", "MASTER_ADDR") if name not in os.environ]
    if missing or rank() >= count():
        told = f"no {missing[0]}" if missing else f"RANK={rank()}"
        raise T2RError(
            f"the environment has WORLD_SIZE={count()} and {told}: start several processes with torchrun, or unset "
            "WORLD_SIZE for one"
        )
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    PartialState(cpu=place.type == "cpu", timeout=PATIENCE)
    if threading.current_thread() is threading.main_thread():
        # The launcher terminates all other processes if one has ended.
        signal.signal(signal.SIGTERM, terminate)
    return place


def terminate(number: int, frame: FrameType | None) -> None:
    """End the process as SIGTERM does, with the messages of an interrupted run."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + number)


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


def everywhere(holds: bool) -> bool:
    """Return whether something holds in all processes."""
    return holds if count() == 1 else all(gather_object([holds]))


LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", "NCCL")
"""What torch's errors say if another process has ended."""
TOLD = "t2r.told"


def lost_another(error: BaseException | None) -> bool:
    """Return whether an error says that another process has ended."""
    while error is not None and count() > 1:
        if isinstance(error, RuntimeError) and any(words in str(error) for words in LOST):
            return True
        error = error.__cause__
    return False


def first_to_tell() -> bool:
    """Return whether no other process has said why all of them end, and say to the others that this one does.

    Call this when the process is about to end: the launcher need not terminate it any more."""
    if count() == 1:
        return True
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not dist.is_initialized():  # wrong options, which all processes have
        return rank() == 0 or rank() >= count()
    try:
        # torchrun keeps the store of the processes, so it is there as long as one of them is.
        return bool(dist.distributed_c10d._get_default_store().add(TOLD, 1) == 1)
    except RuntimeError:
        return True
