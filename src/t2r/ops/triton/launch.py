"""Repeated launches of a kernel. Triton inspects every argument of a launch, which takes longer than a short kernel.

`generate()` launches the kernel of a decoding step once per layer and token, always with tensors of the same layout. A
`Repeated` kernel is compiled and inspected for a layout once. After that, the compiled kernel is launched directly.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

ALIGNMENT = 16
"""Triton compiles a kernel for pointers that are multiples of these bytes. Others take its usual way."""
MOST = 1024
"""Layouts that are remembered. A program has few: they are forgotten only if something makes new ones all the time."""

Arguments = tuple[tuple[int, ...], tuple[float, ...], dict[str, Any]]
"""The grid, the numbers, and the constants by name."""


class Repeated:
    """A Triton kernel whose arguments are tensors, then numbers, then constants."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.ready: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def launch(
        self,
        given: tuple[Tensor | None, ...],
        kind: Hashable,
        arguments: Callable[[], Arguments],
        *,
        num_warps: int = 4,
    ) -> None:
        """Launch the kernel on the current device.

        Args:
            given: the tensors. The first is also passed in place of each that is None, which the kernel does not read.
            kind: what `arguments` depend on, beside the layout of the tensors.
            arguments: returns the other arguments. Called for a new layout or kind only.
            num_warps: depends on the kind.
        """
        first: Any = given[0]
        key, tensors, addresses = [kind, first.get_device()], [], 0
        for x in given:
            if x is None:
                key.append(None)
                tensors.append(first)
            else:
                key += x.shape, x.stride(), x.dtype
                tensors.append(x)
                addresses |= x.data_ptr()
        layout, aligned = tuple(key), addresses % ALIGNMENT == 0
        known = self.ready.get(layout) if aligned else None
        if known is not None:
            run, rest = known
            run(*tensors, *rest)
            return
        grid, integers, constants = arguments()
        compiled = self.kernel[grid](*tensors, *integers, **constants, num_warps=num_warps)
        if aligned and compiled is not None:  # the interpreter compiles nothing
            if len(self.ready) >= MOST:
                self.ready.clear()
            names = self.kernel.arg_names[len(given) + len(integers) :]
            self.ready[layout] = compiled[(*grid, 1, 1)[:3]], (*integers, *(constants[name] for name in names))
