"""Random feature maps: RFA (Peng et al. 2021) and Performer (Choromanski et al. 2021)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from t2r.errors import T2RError
from t2r.feature_maps.base import FeatureMap
from t2r.feature_maps.tensors import affine, full_precision, gaussian, orthogonal_rows, repeat_heads, safe_norm


class RfaMap(FeatureMap):
    """[sin(u), cos(u)] / sqrt(m) with u = (sigma * w)·x / |x| for m = feature_size / 2 random vectors w.

    With sigma = 1, φ(q)·φ(k) estimates the Gaussian kernel exp(-|q - k|² / 2) of the normalized q and k. sigma is
    learned per head and dimension (the "softmax temperature reparameterization").

    Each layer has a bank of random vector sets, and each head uses one of them. In training, `forward` selects new ones
    in each call, using the global random state, so that gradient checkpointing repeats the selection. In evaluation,
    the selection is fixed. `queries` and `keys` always use the fixed selection, because separate calls must agree.

    Args:
        bank_size: number of random vector sets in the bank.
    """

    name = "rfa"
    separable = False
    even = True
    bank: Tensor

    def __init__(self, *, bank_size: int = 400, **common: Any) -> None:
        super().__init__(**common)
        if bank_size < 1:
            raise T2RError(f"bank_size must be at least 1; got {bank_size}")
        self.sigma = nn.Parameter(torch.empty(self.key_heads, self.head_dim))
        self.register_buffer("bank", torch.empty(bank_size, self.feature_size // 2, self.head_dim))
        self.finish()

    @property
    def signed(self) -> bool:
        return True

    @classmethod
    def default_feature_size(cls, head_dim: int) -> int:
        return 32

    def draw(self, generator: torch.Generator) -> None:
        self.sigma.fill_(1)
        self.bank.copy_(gaussian(*self.bank.shape, generator=generator))

    def fixed_draw(self) -> Tensor:
        return torch.arange(self.key_heads, device=self.bank.device) % self.bank.shape[0]

    def random_draw(self) -> Tensor:
        return torch.randint(self.bank.shape[0], (self.key_heads,), device=self.bank.device)

    def features(self, x: Tensor, draw: Tensor) -> Tensor:
        """Compute φ(x). `draw [key_heads]` selects the vectors of each head from the bank."""
        with torch.autocast(x.device.type, enabled=False):
            x = full_precision(x)
            vectors = self.bank[draw].to(x.dtype) * self.sigma.to(x.dtype)[:, None, :]
            u = affine(x / safe_norm(x), vectors)
            return torch.cat([u.sin(), u.cos()], dim=-1) / math.sqrt(self.feature_size // 2)

    def queries(self, q: Tensor) -> Tensor:
        return self.features(q, self.fixed_draw())

    def keys(self, k: Tensor) -> Tensor:
        return self.features(k, self.fixed_draw())

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        draw = self.random_draw() if self.training else self.fixed_draw()
        return self.features(q, draw), self.features(k, draw)


class PerformerMap(FeatureMap):
    """exp(w·x - |x|² / 2) / sqrt(m) for m = feature_size random vectors w, orthogonal in blocks of head_dim.

    φ(q)·φ(k) is an unbiased estimate of exp(q·k). Training diverges with the published form, because queries or keys
    with a large norm overflow the exponential. The usual remedy, subtracting the maximum over all keys, uses future
    tokens and does not work in a recurrence. Instead, queries and keys with a norm above `max_norm` are scaled down to
    it, which limits |q·k| to max_norm². Beyond that, the kernel saturates.

    Args:
        max_norm: maximum norm of queries and keys, after 1/sqrt(head_dim) is divided equally between them. At 3, the
            kernel ranges from exp(-9), well above the lower bound of the attention denominator, to exp(9).
    """

    name = "performer"
    separable = False
    vectors: Tensor

    # exp(32)² is 6e27, so float32 can hold a sum over ten billion tokens. With the default max_norm, only queries or
    # keys nearly parallel to one of the vectors approach it, and only in large heads.
    largest_exponent: ClassVar[float] = 32.0

    def __init__(self, *, max_norm: float = 3.0, **common: Any) -> None:
        super().__init__(**common)
        if not max_norm > 0:
            raise T2RError(f"max_norm must be positive; got {max_norm}")
        self.max_norm = max_norm
        self.register_buffer("vectors", torch.empty(self.key_heads, self.feature_size, self.head_dim))
        self.finish()

    @classmethod
    def default_feature_size(cls, head_dim: int) -> int:
        return 2 * head_dim

    def draw(self, generator: torch.Generator) -> None:
        directions = orthogonal_rows(self.key_heads, self.feature_size, self.head_dim, generator)
        # Each vector must be Gaussian for the estimate to be unbiased, so norms are those of Gaussian vectors.
        lengths = gaussian(*self.vectors.shape, generator=generator).norm(dim=-1, keepdim=True)
        self.vectors.copy_(directions * lengths)

    def features(self, x: Tensor, scale: float) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x = full_precision(x) * scale
            x = x * (self.max_norm / safe_norm(x)).clamp_max(1)
            half_square = repeat_heads(x.square().sum(-1, keepdim=True) / 2, self.key_heads)
            exponent = affine(x, self.vectors.to(x.dtype)) - half_square
            return exponent.clamp_max(self.largest_exponent).exp() / math.sqrt(self.feature_size)

    # Queries arrive multiplied by 1/sqrt(head_dim). The factor is divided equally between queries and keys before
    # norms are bounded, so that both have similar norms.

    def queries(self, q: Tensor) -> Tensor:
        return self.features(q, self.head_dim**0.25)

    def keys(self, k: Tensor) -> Tensor:
        return self.features(k, self.head_dim**-0.25)
