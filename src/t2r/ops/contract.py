"""What a backend implements, and how it says what it can do.

A backend computes three things: `parallel` (a whole sequence), `step` (one token) and `look` (read a fixed state). It
declares its `Abilities`, a `Request` says what a call needs, and `registry` compares the two. A backend is therefore
never called with something it did not declare.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from t2r.ops.common import State, Sums

ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OPERATIONS = ("parallel", "step", "look")


class Request(NamedTuple):
    """What one call asks for. A named tuple, because torch.compile traces through its construction."""

    operation: str = "parallel"
    device: str = "cpu"
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    feature: int = 64
    value: int = 64
    decay: bool = False
    starts: bool = False
    signed: bool = False
    groups: bool = False
    causal: bool = True
    state: bool = False
    gradients: bool = False
    normalized: bool = True


@dataclass(frozen=True)
class Abilities:
    """What a backend can do. The defaults are everything."""

    devices: tuple[str, ...] | None = None
    """Device types; None is every one that torch has."""
    dtypes: tuple[torch.dtype, ...] = ALL_DTYPES
    largest_feature: int | None = None
    largest_value: int | None = None
    decay: bool = True
    starts: bool = True
    signed: bool = True
    groups: bool = True
    causal: bool = True
    noncausal: bool = True
    state: bool = True
    """An initial state."""
    sums: bool = True
    """Numerator and denominator without their division."""
    gradients: tuple[str, ...] = OPERATIONS
    """The operations that gradients flow through."""

    def lacks(self, request: Request) -> str | None:
        """What is missing for this request, in a few words; None if nothing is."""
        if self.devices is not None and request.device not in self.devices:
            return f"tensors on {request.device} (it runs on {', '.join(self.devices)})"
        for dtype in request.dtypes:
            if dtype not in self.dtypes:
                return _name(dtype)
        if self.largest_feature is not None and request.feature > self.largest_feature:
            return f"feature size {request.feature} (at most {self.largest_feature})"
        if self.largest_value is not None and request.value > self.largest_value:
            return f"value size {request.value} (at most {self.largest_value})"
        if request.gradients and request.operation not in self.gradients:
            return f"gradients of {request.operation}"
        for asked, able, what in (
            (request.decay, self.decay, "decay"),
            (request.starts, self.starts, "starts (packed documents)"),
            (request.signed, self.signed, "signed features"),
            (request.groups, self.groups, "queries that share a key head"),
            (request.causal, self.causal, "causal attention"),
            (not request.causal, self.noncausal, "non-causal attention"),
            (request.state, self.state, "an initial state"),
            (not request.normalized, self.sums, "numerator and denominator without their division"),
        ):
            if asked and not able:
                return what
        return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Backend(ABC):
    """One way to compute linear attention. Arguments are those of `t2r.ops`, already checked; masks are boolean."""

    name: str
    abilities: Abilities = Abilities()

    def missing(self) -> str | None:
        """Why it cannot run on this machine, in a few words; None if it can."""
        return None

    @abstractmethod
    def parallel(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        state: State | None,
        mask: Tensor | None,
        starts: Tensor | None,
        decay: Tensor | None,
        causal: bool,
        signed: bool,
        normalized: bool,
    ) -> tuple[Tensor | Sums, State]:
        """A whole sequence. The decay is bounded already."""

    @abstractmethod
    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State,
        *,
        mask: Tensor | None,
        decay: Tensor | None,
        inplace: bool,
    ) -> tuple[Tensor, State]:
        """One token. The backend bounds the decay itself, so that a fused step is one launch."""

    @abstractmethod
    def look(self, q: Tensor, state: State, dtype: torch.dtype) -> Tensor:
        """Read a state that does not change."""
