"""Muon: momentum whose step has the same length in every direction (Jordan et al. 2024), for matrices."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of a fifth-order polynomial whose iteration takes singular values from 0.01 to near 1 in five steps: not
to 1 exactly, which is not needed, but fast."""
ITERATIONS = 5


class Muon(torch.optim.AdamW):
    """AdamW, but for groups that are `orthogonal`: of those every parameter is a matrix, or a stack of them.

    Adam moves all entries alike, so that in a matrix a few directions of large gradients get nearly all of the step.
    Here the step is turned into an orthogonal matrix, all of whose directions count the same. Its entries are scaled to
    the size that Adam's have, the rate, so that the same rates serve both.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        turned = [p for group in self.param_groups if group["orthogonal"] for p in group["params"]]
        gradients = [p.grad for p in turned]
        for group in self.param_groups:
            if group["orthogonal"]:
                self.turn(group)
        for p in turned:  # what has no gradient, Adam leaves alone
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
        for parameters in alike.values():  # as one stack: a few operations instead of many small ones
            moments = []
            for p in parameters:
                state = self.state[p]
                if not state:
                    state["step"], state["momentum_buffer"] = torch.tensor(0.0), torch.zeros_like(p)
                state["step"] += 1
                state["momentum_buffer"].mul_(momentum).add_(p.grad)
                moments.append(p.grad + momentum * state["momentum_buffer"])  # Nesterov's
            for p, move in zip(parameters, orthogonal(torch.stack(moments)).unbind(), strict=True):
                p.mul_(1 - rate * group["weight_decay"]).add_(move, alpha=-rate * max(p.shape[-2:]) ** 0.5)


def orthogonal(x: Tensor) -> Tensor:
    """Matrices with the singular vectors of `x [..., rows, columns]`, and singular values near 1."""
    dtype, tall = x.dtype, x.shape[-2] > x.shape[-1]
    x = (x.mT if tall else x).to(torch.promote_types(dtype, torch.float32))
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-12)
    a, b, c = NEWTON_SCHULZ
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(dtype)
