"""Learned feature maps: an affine map per head, followed by a function of its outputs. They can be merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from t2r.errors import T2RError
from t2r.feature_maps.base import AffineMap
from t2r.feature_maps.tensors import full_precision, identity_like

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "elu": F.elu,
    "tanh": torch.tanh,
    "cos": torch.cos,
    "gelu": F.gelu,
    "softmax": lambda x: full_precision(x).softmax(dim=-1).type_as(x),
}
UNSIGNED = ("relu", "softmax")


class T2RMap(AffineMap):
    """relu(W x + b), with feature_size * (head_dim + 1) parameters per head.

    Args:
        activation: `relu`; or `elu`, `tanh`, `cos` (ablations of the paper) or `gelu`, whose features can be negative;
            or `softmax` over the features, which is `hedgehog` with a bias and without paired rows.
        init: `paper` uses the initialization of nn.Linear. `identity` starts a swapped model closer to its teacher:
            rows come in pairs w, -w, so that relu(w·x) and relu(-w·x) together preserve w·x.
    """

    name = "t2r"
    has_bias = True

    def __init__(
        self, *, activation: str = "relu", init: str = "paper", key_weights: bool = False, **common: Any
    ) -> None:
        if activation not in ACTIVATIONS:
            raise T2RError(f"unknown activation {activation!r}: choose one of {', '.join(ACTIVATIONS)}")
        self.activation = activation  # set first, because the initialization depends on it
        super().__init__(init=init, key_weights=key_weights, **common)

    @property
    def signed(self) -> bool:
        return self.activation not in UNSIGNED

    @classmethod
    def default_feature_size(cls, head_dim: int) -> int:
        return 32

    def activate(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.activation](x)

    def identity_rows(self, generator: torch.Generator) -> Tensor:
        half = identity_like(self.key_heads, -(-self.feature_size // 2), self.head_dim, generator)
        return torch.stack([half, -half], dim=2).flatten(1, 2)[:, : self.feature_size]

    def start_scales(self) -> tuple[float, float]:
        return self.sharp_scales() if self.activation == "softmax" else (1.0, 1.0)


class HedgehogMap(AffineMap):
    """softmax over [W x, -W x]. W has feature_size / 2 rows, and there is no bias.

    Args:
        init: `identity`, as in the original work, or `paper`, the initialization of nn.Linear.
    """

    name = "hedgehog"
    even = True
    has_bias = False

    def __init__(self, *, init: str = "identity", key_weights: bool = False, **common: Any) -> None:
        super().__init__(init=init, key_weights=key_weights, **common)

    @property
    def rows(self) -> int:
        return self.feature_size // 2

    @classmethod
    def default_feature_size(cls, head_dim: int) -> int:
        return 2 * head_dim

    def activate(self, x: Tensor) -> Tensor:
        y = full_precision(x)
        return torch.cat([y, -y], dim=-1).softmax(dim=-1).to(x.dtype)

    def identity_rows(self, generator: torch.Generator) -> Tensor:
        return identity_like(self.key_heads, self.rows, self.head_dim, generator)

    def start_scales(self) -> tuple[float, float]:
        return self.sharp_scales()
