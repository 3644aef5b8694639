"""The backends in plain PyTorch. They run on any device and support every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from t2r.ops import chunked, reference, single
from t2r.ops.common import Beside, Features, Slots, State, Sums, normalize
from t2r.ops.contract import Backend
from t2r.ops.rounding import Draws


class TorchBackend(Backend):
    """Base of the PyTorch backends, which share `step` and `look` and differ only in `parallel`."""

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
        if single.can_do(state, inplace=inplace):
            return single.step(q, k, v, state, mask, decay, normalized), state
        sums, state = reference.step(q, k, v, state, mask=mask, decay=decay, inplace=inplace)
        return normalize(sums, v.dtype) if normalized else sums, state

    def look(self, q: Tensor, state: State, dtype: torch.dtype) -> Tensor:
        return normalize(reference.look(q.to(state.s.dtype), state), dtype)


class Reference(TorchBackend):
    """A reference implementation. It is slow and is used to test the other backends."""

    def __init__(self, name: str, run: Callable[..., tuple[Sums, State]]) -> None:
        self.name, self.run = name, run

    def parallel(self, q: Tensor, k: Tensor, v: Tensor, *, normalized: bool, **how: Any) -> tuple[Tensor | Sums, State]:
        sums, state = self.run(q, k, v, **how)
        return normalize(sums, v.dtype) if normalized else sums, state


class Chunked(TorchBackend):
    name = "chunked"

    def parallel(self, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor | Sums, State]:
        return chunked.linear_attention(q, k, v, **how)
