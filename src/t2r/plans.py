"""Memory plans: what each key-value head of causal attention keeps of the past.

A head keeps the keys and values of a window of its last tokens and of the sinks, a recurrent state of the tokens that
have left the window, or both. A plan is part of the configuration of a swapped model (`T2RConfig.plan`). Without one,
each layer is recurrent or, by `softmax_layers` and `softmax_every`, keeps everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from t2r.errors import T2RError

LARGEST = 2**31 - 1
NBITS = (8, 16)


def check_nbits(nbits: Any, where: str = "") -> None:
    """Raise T2RError if keys and values cannot be stored in this number of bits."""
    if type(nbits) is not int or nbits not in NBITS:
        raise T2RError(f"{where}nbits must be {' or '.join(map(str, NBITS))}; got {nbits!r}")


@dataclass(frozen=True)
class MemoryPlan:
    """The windows and states of all layers.

    Args:
        windows: for each layer and key-value head, the number of tokens that a token attends to exactly, including
            itself. 0: none.
        sinks: the number of first tokens that heads with a window always attend to.
        states: for each layer and key-value head, whether it has a state of what has left its window. None: all have.
        nbits: bits of the numbers of keys and values in windows: 8, with a scale for each key and each value, or 16, as
            they are.
    """

    windows: tuple[tuple[int, ...], ...]
    sinks: int = 0
    states: tuple[tuple[bool, ...], ...] | None = None
    nbits: int = 16

    def __post_init__(self) -> None:
        if not self.windows or not all(self.windows):
            raise T2RError("plan: windows must have a list of numbers for each layer")
        if not all(type(size) is int and 0 <= size <= LARGEST for row in self.windows for size in row):
            raise T2RError("plan: a window must be a whole number of tokens, 0 or more")
        if type(self.sinks) is not int or not 0 <= self.sinks <= LARGEST:
            raise T2RError(f"plan: sinks must be a whole number, 0 or more; got {self.sinks!r}")
        check_nbits(self.nbits, "plan: ")
        if self.states is not None:
            if [len(row) for row in self.states] != [len(row) for row in self.windows]:
                raise T2RError("plan: states must have a value for each window")
            if not all(type(has) is bool for row in self.states for has in row):
                raise T2RError("plan: states must be true or false")
            if any(not has and not size for sizes, row in self.pairs() for size, has in zip(sizes, row, strict=True)):
                raise T2RError("plan: a head without a window requires a state")

    @classmethod
    def of(cls, given: Any) -> MemoryPlan:
        """Read a plan from parsed JSON. Raises T2RError if it is not one."""
        if isinstance(given, cls):
            return given
        known = {"windows", "sinks", "states", "nbits"}
        if not isinstance(given, Mapping) or "windows" not in given or set(given) - known:
            raise T2RError(f"plan: expected a mapping with {', '.join(sorted(known))}; got {str(given)[:60]}")
        try:
            windows = tuple(tuple(row) for row in given["windows"])
            states = given.get("states")
            states = None if states is None else tuple(tuple(row) for row in states)
        except TypeError as error:
            raise T2RError("plan: windows and states must be lists of lists, by layer and head") from error
        return cls(windows, given.get("sinks", 0), states, given.get("nbits", 16))

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON. Earlier versions read a plan without `nbits`."""
        return {name: x for name, x in asdict(self).items() if name != "nbits" or x != 16}

    def pairs(self) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
        """Return windows and states of each layer."""
        states = self.states or tuple((True,) * len(row) for row in self.windows)
        return list(zip(self.windows, states, strict=True))

    def stateful(self, layer: int) -> tuple[int, ...]:
        """Return the heads of a layer that have a state."""
        return tuple(head for head, has in enumerate(self.pairs()[layer][1]) if has)

    def check(self, heads: list[int]) -> None:
        """Raise T2RError unless the plan is for layers with these numbers of key-value heads."""
        if len(self.windows) != len(heads):
            raise T2RError(f"plan: it has {len(self.windows)} layers, and the model {len(heads)}")
        for layer, (own, row) in enumerate(zip(heads, self.windows, strict=True)):
            if len(row) != own:
                raise T2RError(f"plan: layer {layer} has {len(row)} windows, and the model {own} key-value heads")
