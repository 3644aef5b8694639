"""Rules: how a recurrent state is advanced by the keys and values of new tokens, and read by their queries.

A rule has the parameters of its recurrence for one call. What it keeps is its own affair: a named tuple of tensors
whose first dimension are the rows of a batch, with `map` and `check` as `State` has them. `Sum` is the paper's rule,
with an optional decay. Another recurrence is another class of this shape, with its reference and its kernels, which a
feature map returns (`rule`, `state_type` and `empty_state` of `FeatureMap`); `tests/attention/test_rules.py` has one.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from t2r.ops import functional
from t2r.ops.common import Beside, Features, Slots, State, Sums
from t2r.ops.rounding import Draws


class Rule(Protocol):
    """What a state memory requires of a recurrence. The arguments are those of the functions of `t2r.ops`."""

    def empty(self, rows: int, value_size: int, dtype: torch.dtype, device: torch.device | str) -> State:
        """Return the state before the first token, for values of this size and dtype."""

    def parallel(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        state: State | None = None,
        mask: Tensor | None = None,
        starts: Tensor | None = None,
        causal: bool = True,
        normalized: bool = True,
    ) -> tuple[Tensor | Sums, State]:
        """Process several tokens at once."""

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State,
        *,
        mask: Tensor | None = None,
        inplace: bool = False,
        features: Features | None = None,
        beside: Beside | None = None,
        normalized: bool = True,
        draws: Draws | None = None,
    ) -> tuple[Tensor | Sums, State]:
        """Process one token. `draws` are given only for a state that is stored in half precision."""

    def replay(self, state: State, k: Tensor, v: Tensor, mask: Tensor | None) -> State:
        """Return the state after these tokens, without an output."""


class Sum(NamedTuple):
    """S += φ(k) vᵀ, z += φ(k). With decay, each row is first multiplied by its own factor."""

    heads: int
    features: int
    decay: Tensor | None = None
    """Decay rates `[heads, features]`."""
    signed: bool = False

    def empty(self, rows: int, value_size: int, dtype: torch.dtype, device: torch.device | str) -> State:
        like = torch.empty(rows, self.heads, 1, 1, dtype=dtype, device=device)
        keys, values = (like.expand(-1, -1, -1, size) for size in (self.features, value_size))
        return State.zeros(keys, values, self.signed)

    def parallel(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        state: State | None = None,
        mask: Tensor | None = None,
        starts: Tensor | None = None,
        causal: bool = True,
        normalized: bool = True,
    ) -> tuple[Tensor | Sums, State]:
        answer: tuple[Tensor | Sums, State] = functional.linear_attention(
            q,
            k,
            v,
            state=state,
            mask=mask,
            starts=starts,
            decay=self.decay if causal else None,
            causal=causal,
            signed=self.signed,
            normalized=normalized,  # type: ignore[call-overload]
        )
        return answer

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State,
        *,
        mask: Tensor | None = None,
        inplace: bool = False,
        features: Features | None = None,
        beside: Beside | None = None,
        normalized: bool = True,
        slots: Slots | None = None,
        draws: Draws | None = None,
    ) -> tuple[Tensor | Sums, State]:
        return functional.step(
            q,
            k,
            v,
            state,
            mask=mask,
            decay=self.decay,
            signed=self.signed,
            inplace=inplace,
            features=features,
            beside=beside,
            normalized=normalized,
            slots=slots,
            draws=draws,
        )

    def replay(self, state: State, k: Tensor, v: Tensor, mask: Tensor | None) -> State:
        return functional.absorb(state, k, v, mask=mask, decay=self.decay)
