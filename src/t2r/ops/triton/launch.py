"""Repeated launches of a kernel. Triton inspects every argument of a launch, which takes longer than a short kernel.

`generate()` launches the kernel of a decoding step once per layer and token, always with tensors of the same layout. A
`Repeated` kernel is compiled and inspected for a layout once. After that, the compiled kernel is launched directly.
"""
# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

ALIGNMENT = 16
"""Triton compiles a kernel for pointers that are multiples of these bytes. Others take its usual way."""
MOST = 1024
"""Layouts that are remembered. A program has few: they are forgotten only if something makes new ones all the time."""

Numbers = tuple[tuple[int, ...], dict[str, Any]]


class Repeated:
    """A Triton kernel whose arguments are tensors, then integers, then constants, in the order of its signature."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.ready: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def launch(
        self, grid: tuple[int, ...], tensors: tuple[Tensor, ...], layout: Hashable, numbers: Callable[[], Numbers]
    ) -> None:
        """Launch the kernel on the current device.

        Args:
            layout: everything from which `grid` and `numbers` follow, and the dtypes of all tensors.
            numbers: returns the integers, and the constants by name. Called for a new layout only.
        """
        together = 0
        for x in tensors:
            together |= x.data_ptr()
        aligned = together % ALIGNMENT == 0
        if aligned and (known := self.ready.get(layout)) is not None:
            runner, rest = known
            runner(*tensors, *rest)
            return
        integers, constants = numbers()
        compiled = self.kernel[grid](*tensors, *integers, **constants, num_warps=4)
        if aligned and compiled is not None:  # the interpreter compiles nothing
            if len(self.ready) >= MOST:
                self.ready.clear()
            blocks = (*grid, 1, 1)[:3]
            self.ready[layout] = compiled[blocks], (*integers, *constants.values())
