"""How much memory there is, and what is said if it is not enough. torch is imported only when a device is asked."""

from __future__ import annotations

import os
import re
from typing import Any

from t2r.errors import T2RError

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
ASKED = (
    re.compile(r"tried to allocate (?P<number>[\d.]+) ?(?P<unit>bytes|B|KiB|MiB|GiB|TiB)", re.IGNORECASE),  # torch
    re.compile(r"Unable to allocate (?P<number>[\d.]+) (?P<unit>bytes|KiB|MiB|GiB|TiB|PiB|EiB)"),  # numpy
)
TOO_LARGE = (
    "DefaultCPUAllocator: can't allocate",
    "Storage size calculation overflowed",
    "integer multiplication",
)
"""Parts of errors of torch that have no class of their own."""


def free_memory(device: Any) -> int:
    """Return the memory in bytes that can be allocated on a torch device."""
    if device.type == "cuda":
        import torch

        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + cached)
    return free_on_cpu()


def free_on_cpu() -> int:
    try:
        with open("/proc/meminfo") as file:
            sizes = dict(line.split(":") for line in file)
        return int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) // 2 if hasattr(os, "sysconf") else 2**32


def refuse_beyond_memory(needed: int, device: Any, what: str, hint: str = "") -> None:
    """Raise T2RError if work needs more bytes than are free. Linux would grant them, and then kill a process.

    `what` is the work, with a verb: "2 sequences need". `hint` is what to do."""
    if needed > (free := free_memory(device)):
        more = f": {hint}" if hint else ""
        raise T2RError(f"{what} at least {human(needed)} of memory, and {human(free)} are free on {device}{more}")


def shortage(error: BaseException) -> str | None:
    """Return what to say about an error for lack of memory: what was asked for, and what there is. None: it is another
    error."""
    text = str(error)
    on_gpu = type(error).__name__ == "OutOfMemoryError"  # torch's; torch may not be imported here
    if not (on_gpu or isinstance(error, MemoryError) or any(part in text for part in TOO_LARGE)):
        return None
    asked = next((found for pattern in ASKED if (found := pattern.search(text))), None)
    told = "more than there is was asked for"
    if asked is not None:
        number, unit = float(asked["number"]), asked["unit"]
        size = human(int(number)) if unit.lower() in ("bytes", "b") else f"{number:g} {unit}"
        told = f"{size} were asked for"
    if on_gpu:
        free = re.search(r"total capacity of (?P<all>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free", text)
        there = f", and the GPU has {free['all']}, of which {free['free']} are free" if free else " on the GPU"
    else:
        there = f", and {human(free_on_cpu())} are free"
    return f"out of memory: {told}{there}; use a smaller batch, shorter texts, fewer beams or a smaller model"


def human(number: int) -> str:
    """Format bytes."""
    size, units = float(number), list(UNITS)
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if size >= 100 or units[0] == "B" else f"{size:.1f} {units[0]}"
