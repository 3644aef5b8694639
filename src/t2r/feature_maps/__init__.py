"""Feature maps: what stands in for the exponential when a head becomes an RNN.

Softmax attention compares a query with a key by `exp(q·k)`; a recurrent head compares them by `φ(q)·φ(k)`,
which lets the sum over keys be taken before the query is known. A feature map is φ for all the heads of one
layer at once: one tensor of weights per layer, and never a loop over heads.

    t2r        relu(W x + b), learned (Kasai et al. 2021): the paper's own
    elu        elu(x) + 1 (Katharopoulos et al. 2020)
    rfa        random features of the Gaussian kernel (Peng et al. 2021)
    performer  positive orthogonal random features of the exponential (Choromanski et al. 2021)
    hedgehog   softmax over [W x, -W x], learned (Zhang et al. 2024)

Queries arrive multiplied by `1/sqrt(head_dim)`. `feature_size` is always the size of φ(x), the rows of the
state. With grouped-query attention a map belongs to a key/value head and the queries of its group use it too;
un-grouped, there is a key map, and so a state, per query head. With `decay` every feature forgets, at a rate of its
own that is learned: what softmax attention tells from positions (what was said just now, or long ago) is then told
by how much of it is left. With `key_weights` a learned map also says how much each key counts, whoever asks.

To add a map: one class here, and its name in the tuple at the bottom.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from t2r.errors import T2RError
from t2r.feature_maps.base import AffineMap, FeatureMap
from t2r.feature_maps.tensors import (
    affine,
    full_precision,
    gaussian,
    identity_like,
    orthogonal_rows,
    repeat_heads,
    safe_norm,
)

__all__ = [
    "ACTIVATIONS",
    "FEATURE_MAPS",
    "AffineMap",
    "EluMap",
    "FeatureMap",
    "HedgehogMap",
    "PerformerMap",
    "RfaMap",
    "T2RMap",
    "affine",
    "feature_map_class",
    "identity_like",
    "make_feature_map",
    "orthogonal_rows",
    "repeat_heads",
    "safe_norm",
]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "elu": F.elu,
    "tanh": torch.tanh,
    "cos": torch.cos,
    "gelu": F.gelu,
    "softmax": lambda x: full_precision(x).softmax(dim=-1).to(x.dtype),
}
UNSIGNED = ("relu", "softmax")


class T2RMap(AffineMap):
    """relu(W x + b): feature_size * (head_dim + 1) parameters a head.

    Args:
        activation: relu, or one of the paper's ablations (and gelu), whose features can be negative; or softmax, over
            the features: what `hedgehog` is, with a bias and rows that need not come in pairs.
        init: `paper` is what nn.Linear draws. `identity` starts a swapped model closer to its teacher: rows
            come in pairs w, -w, so that relu(w·x) and relu(-w·x) together lose nothing of w·x.
    """

    name = "t2r"
    has_bias = True

    def __init__(
        self, *, activation: str = "relu", init: str = "paper", key_weights: bool = False, **common: Any
    ) -> None:
        if activation not in ACTIVATIONS:
            raise T2RError(f"no activation {activation!r}: choose one of {', '.join(ACTIVATIONS)}")
        self.activation = activation  # before what is drawn, which depends on it
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
    """softmax over [W x, -W x]: W has half as many rows as there are features, and no bias.

    Args:
        init: `identity` as its authors do, or `paper`: what nn.Linear draws.
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


class EluMap(FeatureMap):
    """elu(x) + 1: no parameters (so nothing to share or to separate), and as many features as dimensions."""

    name = "elu"

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        self.finish()

    @classmethod
    def default_feature_size(cls, head_dim: int) -> int:
        return head_dim

    @classmethod
    def check(cls, head_dim: int, feature_size: int | None) -> None:
        super().check(head_dim, feature_size)
        if feature_size not in (None, head_dim):
            raise T2RError(
                f"feature map 'elu' has as many features as the head has dimensions: feature_size must be "
                f"{head_dim} (or left out); got {feature_size}"
            )

    def queries(self, q: Tensor) -> Tensor:
        # Written without elu, whose -1 would cancel the +1: in bfloat16 elu(-6) + 1 is 0, and exp(-6) is not.
        return (q.relu() + q.clamp_max(0).exp()).to(q.dtype)

    def keys(self, k: Tensor) -> Tensor:
        return repeat_heads(self.queries(k), self.key_heads)


class RfaMap(FeatureMap):
    """[sin(u), cos(u)] / sqrt(m) with u = (sigma * w)·x / |x| for m = feature_size / 2 random vectors w.

    With sigma = 1, φ(q)·φ(k) estimates the Gaussian kernel exp(-|q - k|² / 2) of the two directions. sigma is
    learned, per head and dimension: the "softmax temperature reparameterization".

    The vectors come from a bank, one per layer, of which each head takes its own draw. In training `forward`
    draws anew each time, by the global random state, so that gradient checkpointing repeats the draw. In
    evaluation the draw is fixed, as it always is for `queries` and `keys`, which alone could not agree.

    Args:
        bank_size: draws in the bank.
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
        """φ(x), each head with the vectors of its index in `draw` `[key_heads]`."""
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

    φ(q)·φ(k) estimates exp(q·k), without bias. Trained as published it diverges: a long query or key sends
    one exponential over the edge, and the usual remedy, subtracting a maximum over the keys, looks into the
    future and is unknown to a recurrence. Here queries and keys longer than `max_norm` are shortened to it,
    one by one, so that q·k stays within max_norm² either way: beyond that the kernel saturates, smoothly.

    Args:
        max_norm: the longest query or key, once each carries half of the 1/sqrt(head_dim). At 3 the kernel
            reaches from exp(-9), well above the floor of the attention's denominator, to exp(9).
    """

    name = "performer"
    separable = False
    vectors: Tensor

    # exp(32)² is 6e27: float32 has room left for a sum over ten billion tokens. Within the default max_norm
    # only a query or key nearly parallel to one of the vectors comes near it, and then only in large heads.
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
        # Each vector alone must be Gaussian for the estimate to be unbiased: lengths of Gaussian vectors.
        lengths = gaussian(*self.vectors.shape, generator=generator).norm(dim=-1, keepdim=True)
        self.vectors.copy_(directions * lengths)

    def features(self, x: Tensor, scale: float) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x = full_precision(x) * scale
            x = x * (self.max_norm / safe_norm(x)).clamp_max(1)
            half_square = repeat_heads(x.square().sum(-1, keepdim=True) / 2, self.key_heads)
            exponent = affine(x, self.vectors.to(x.dtype)) - half_square
            return exponent.clamp_max(self.largest_exponent).exp() / math.sqrt(self.feature_size)

    # All of 1/sqrt(head_dim) arrives on the queries. It is shared out before the norms are bounded: the two
    # sides are then of like length, and the bound bites on both alike.

    def queries(self, q: Tensor) -> Tensor:
        return self.features(q, self.head_dim**0.25)

    def keys(self, k: Tensor) -> Tensor:
        return self.features(k, self.head_dim**-0.25)


# --- The registry -----------------------------------------------------------------------------------------

FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    cls.name: cls for cls in (T2RMap, EluMap, RfaMap, PerformerMap, HedgehogMap)
}


def feature_map_class(name: str) -> type[FeatureMap]:
    if name not in FEATURE_MAPS:
        raise T2RError(f"no feature map {name!r}: choose one of {', '.join(FEATURE_MAPS)}")
    return FEATURE_MAPS[name]


def options_of(cls: type[FeatureMap]) -> list[str]:
    """The options a map adds to those of every map."""
    parameters = inspect.signature(cls).parameters.values()
    common = inspect.signature(FeatureMap).parameters
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in common]


def make_feature_map(name: str, **kwargs: Any) -> FeatureMap:
    """Build a feature map by name: the arguments of FeatureMap and the map's own options."""
    cls = feature_map_class(name)
    own, common = options_of(cls), inspect.signature(FeatureMap).parameters
    for key in kwargs:
        if key not in own and key not in common:
            raise T2RError(f"feature map {name!r} has no option {key!r}; it has: {', '.join(own) or 'none'}")
    return cls(**kwargs)
