"""The backend interface.

A backend implements three operations: `parallel` (a whole sequence), `step` (one token) and `look` (read a fixed
state). It declares its `Abilities`. A `Request` describes a call, and `registry` compares the two, so a backend is
never called with arguments that it does not support.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from t2r.ops.common import Beside, Features, Slots, State, Sums
from t2r.ops.rounding import Draws

ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OPERATIONS = ("parallel", "step", "look")


class Request(NamedTuple):
    """Description of one call. It is a named tuple because torch.compile traces through its construction."""

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
    features: bool = False
    """The step also computes the features of queries and keys."""


@dataclass(frozen=True)
class Abilities:
    """What a backend supports. By default, everything."""

    devices: tuple[str, ...] | None = None
    """Supported device types. None means every device type of torch."""
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
    """Whether an initial state is supported."""
    sums: bool = True
    """Whether the numerator and denominator can be returned without dividing them."""
    gradients: tuple[str, ...] = OPERATIONS
    """The operations that support gradients."""
    half_state: bool = False
    """Whether `step` updates a state in half precision in place. Otherwise it gets a copy in the accumulator dtype."""
    features: bool = False
    """Whether `step` can compute the features of queries and keys."""
    slots: bool = False
    """Whether `step` updates states at given places in place. Otherwise it gets copies, which are written back."""

    def lacks(self, request: Request) -> str | None:
        """Return what this request needs and the backend does not support, or None."""
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
            (request.groups, self.groups, "grouped queries (several query heads per key head)"),
            (request.causal, self.causal, "causal attention"),
            (not request.causal, self.noncausal, "non-causal attention"),
            (request.state, self.state, "an initial state"),
            (not request.normalized, self.sums, "unnormalized output (normalized=False)"),
            (request.features, self.features, "features computed in the step"),
        ):
            if asked and not able:
                return what
        return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Backend(ABC):
    """An implementation of linear attention.

    Arguments are those of the functions in `t2r.ops`. They are already checked, and masks are boolean.
    """

    name: str
    abilities: Abilities = Abilities()

    def missing(self) -> str | None:
        """Return the reason why the backend cannot run on this machine, or None if it can."""
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
        """Process a whole sequence. Decay rates are already clamped."""

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
        features: Features | None = None,
        beside: Beside | None = None,
        normalized: bool = True,
        slots: Slots | None = None,
        draws: Draws | None = None,
    ) -> tuple[Tensor | Sums, State]:
        """Process one token. The backend clamps decay rates itself, so that a fused step is a single kernel launch."""

    @abstractmethod
    def look(self, q: Tensor, state: State, dtype: torch.dtype) -> Tensor:
        """Read a fixed state."""
