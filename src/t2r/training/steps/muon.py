"""The Muon optimizer (Jordan et al. 2024): momentum SGD with orthogonalized updates for matrices."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of a quintic polynomial. Five iterations map singular values from 0.01 up to near 1. They do not
converge to 1 exactly, which is not needed."""
ITERATIONS = 5


class Muon(torch.optim.AdamW):
    """AdamW, with Muon updates for parameter groups marked `orthogonal`, whose parameters are (stacks of) matrices.

    Adam normalizes entries one by one, so a few directions with large gradients dominate the update of a matrix. Muon
    replaces the update by the nearest orthogonal matrix, in which all directions have the same length. Its entries are
    scaled to the magnitude of Adam's, the learning rate, so that both use the same learning rates.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        turned = [p for group in self.param_groups if group["orthogonal"] for p in group["params"]]
        gradients = [p.grad for p in turned]
        for group in self.param_groups:
            if group["orthogonal"]:
                self.turn(group)
        for p in turned:  # AdamW skips parameters without a gradient
            p.grad = None
        try:
            return super().step(closure)
        finally:
            for p, gradient in zip(turned, gradients, strict=True):
                p.grad = gradient

    def turn(self, group: dict[str, Any]) -> None:
        rate, momentum = group["lr"], group["betas"][0]
        alike: dict[Any, list[Tensor]] = defaultdict(list)
        for p in group["params"]:
            if p.grad is not None:
                alike[p.shape, p.device, p.dtype].append(p)
        for parameters in alike.values():  # stacked, for fewer and larger operations
            moments = []
            for p in parameters:
                state = self.state[p]
                if not state:
                    state["step"], state["momentum_buffer"] = torch.tensor(0.0), torch.zeros_like(p)
                state["step"] += 1
                state["momentum_buffer"].mul_(momentum).add_(p.grad)
                moments.append(p.grad + momentum * state["momentum_buffer"])  # Nesterov momentum
            for p, move in zip(parameters, orthogonal(torch.stack(moments)).unbind(), strict=True):
                p.mul_(1 - rate * group["weight_decay"]).add_(move, alpha=-rate * max(p.shape[-2:]) ** 0.5)


def orthogonal(x: Tensor) -> Tensor:
    """Return matrices with the singular vectors of `x [..., rows, columns]` and singular values near 1."""
    dtype, tall = x.dtype, x.shape[-2] > x.shape[-1]
    x = (x.mT if tall else x).to(torch.promote_types(dtype, torch.float32))
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-12)
    a, b, c = NEWTON_SCHULZ
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(dtype)
