"""The Triton backend and its abilities. This module does not import triton."""

from __future__ import annotations

import torch
from torch import Tensor

from t2r.ops.chunked import two_products
from t2r.ops.common import Beside, Features, Slots, State, Sums, normalize
from t2r.ops.contract import Abilities, Backend
from t2r.ops.reference import look as read_state
from t2r.ops.rounding import Draws
from t2r.ops.triton.presence import INSTALLED, INTERPRETED


class Triton(Backend):
    name = "triton"
    abilities = Abilities(
        devices=("cuda", "cpu") if INTERPRETED else ("cuda",),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        largest_feature=256,
        largest_value=256,
        gradients=("parallel", "look"),
        half_state=True,
        features=True,
        slots=True,
    )

    def missing(self) -> str | None:
        if not INSTALLED:
            return "triton is not installed"
        # Every step asks. Once CUDA is initialized, the driver need not be asked again.
        if not (INTERPRETED or torch.cuda.is_initialized() or torch.cuda.is_available()):
            return "no CUDA device"
        return None

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
        if not causal:  # two matrix products, which need no custom kernel
            return two_products(q, k, v, state, mask, signed=signed, normalized=normalized)
        from t2r.ops.triton.sequence import linear_attention

        return linear_attention(q, k, v, state, mask, starts, decay, signed=signed, normalized=normalized)

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
        from t2r.ops.triton.decode import step

        state = state if inplace else state.map(torch.clone)
        return step(q, k, v, state, mask, decay, features, normalized, beside, slots, draws), state

    def look(self, q: Tensor, state: State, dtype: torch.dtype) -> Tensor:
        if q.shape[2] == 1 and not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
            from t2r.ops.triton.decode import look

            return look(q, state, dtype)
        return normalize(read_state(q.to(state.s.dtype), state), dtype)
