"""The memory of a recurrence: a state of fixed size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from t2r.attention.memories.base import Memory, may_overwrite
from t2r.ops import Beside, Draws, Features, Rule, Slots, State, Sums
from t2r.ops.common import accumulator_dtype
from t2r.ops.rounding import store


class Added(NamedTuple):
    """What one forward added to a state, recorded so that tokens can be removed."""

    k: Tensor
    v: Tensor
    mask: Tensor | None
    rule: Rule


class StateMemory(Memory):
    """The state of a recurrence (`t2r.ops.rules`).

    A fixed one may be stored in half precision. A step computes in float32 and rounds what it stores, at random by
    `draws` (`t2r.ops.rounding`)."""

    slots: Slots | None = None
    """Where the states of the rows are, if they lie among those of other sequences."""

    def __init__(
        self,
        state: State | None = None,
        *,
        fixed: bool = False,
        state_type: type[State] = State,
        draws: Draws | None = None,
    ) -> None:
        self.state_type = state_type if state is None else type(state)
        self.state, self.fixed, self.draws = state, fixed, draws
        self.before: State | None = None
        self.added: list[Added] = []

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.state_type._fields

    def advance(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: Rule,
        *,
        mask: Tensor | None = None,
        starts: Tensor | None = None,
        features: Features | None = None,
        beside: Beside | None = None,
        normalized: bool = True,
    ) -> Any:
        """Process one or more tokens: return their outputs (or `Sums`) and advance the state."""
        state, time = self.state, k.shape[2]
        if state is not None and state[0].device != q.device and not self.fixed:
            state = state.map(lambda x: x.to(q.device))
        out: Tensor | Sums
        if time == 1 and state is not None and starts is None:
            how: dict[str, Any] = {"features": features, "normalized": normalized, "inplace": self.overwrites(state)}
            how |= {} if beside is None else {"beside": beside}
            how |= {} if self.draws is None else {"draws": self.draws}
            out, state = rule.step(q, k, v, state, mask=mask, **how)
        else:
            if self.fixed and state is not None:
                state = state.map(lambda x: x.to(accumulator_dtype(q, k, v)))
            out, state = rule.parallel(q, k, v, state=state, mask=mask, starts=starts, normalized=normalized)
        self.store(state, Added(k, v, mask, rule))
        return out

    def overwrites(self, state: State) -> bool:
        """Return whether a step writes into this state."""
        return self.fixed or (may_overwrite(state[0]) and not self.recording)

    def can_step(self) -> bool:
        """Return whether `advance` needs the features of one token for nothing but its step."""
        return self.state is not None and not self.recording

    def store(self, state: State, added: Added | None = None) -> None:
        """Take a new state."""
        if self.fixed and self.state is not None and state is not self.state:
            store(self.state, state, self.draws)
            return
        if self.recording and added is not None:
            if not self.added:
                self.before = self.state
            self.added.append(added)
        self.state = state

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.state is None else {n: x for n, x in self.state._asdict().items() if x is not None}

    def extra_tensors(self) -> list[Tensor]:
        kept = [*(self.before or ()), *(x for added in self.added for x in added[:3])]
        return [x for x in kept if x is not None]

    def load(self, held: dict[str, Tensor]) -> None:
        if held:
            self.state = self.state_type(**held)

    def check(self, held: dict[str, Tensor]) -> None:
        self.state_type(**held).check()

    def each_row(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.fixed:
            for x in self.tensors().values():
                x.copy_(function(x))
            return
        self.state = None if self.state is None else self.state.map(function)
        self.before = None if self.before is None else self.before.map(function)
        self.added = [
            Added(function(a.k), function(a.v), None if a.mask is None else function(a.mask), a.rule)
            for a in self.added
        ]

    def kind(self) -> tuple[Any, ...]:
        return "state", {name: tuple(x.shape[1:]) for name, x in self.tensors().items()}

    def row_bytes(self, tokens: int) -> int:
        return sum(x[0].numel() * x.element_size() for x in self.tensors().values())

    def put_rows(self, rows: Tensor, other: Any, index: Tensor, real: Tensor | None) -> None:
        for name, own in self.tensors().items():
            new = getattr(other.state, name)
            own[rows] = new.index_select(0, index.to(new.device)).to(own)

    def taken(self, row: int, tokens: int) -> dict[str, Tensor]:
        # A separate state is always computed, and stored, in full precision.
        return {
            name: x[row : row + 1].to(torch.promote_types(x.dtype, torch.float32), copy=True)
            for name, x in self.tensors().items()
        }

    @property
    def recorded_tokens(self) -> int:
        return sum(added.k.shape[2] for added in self.added)

    def crop(self, tokens: int) -> None:
        if tokens:
            assert self.state is not None
            state = self.state.map(torch.zeros_like) if self.before is None else self.before
            left = self.recorded_tokens - tokens
            for k, v, mask, rule in self.added:  # each with the parameters of its own call
                if (count := min(left, k.shape[2])) > 0:
                    own = None if mask is None else mask[:, :count]
                    state, left = rule.replay(state, k[:, :, :count], v[:, :, :count], own), left - count
            self.state = state
        self.added, self.before = [], None

    def reset(self, rows: Any = None) -> None:
        if self.fixed:
            super().reset(rows)
        else:
            self.state, self.before, self.added, self.recording = None, None, [], False
