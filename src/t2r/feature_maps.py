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
un-grouped, there is a key map, and so a state, per query head.

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

# A state many times larger than the head it serves is a slip of the keyboard, not a plan: at 16 times the
# head's size the state already holds as much as the keys and values of 8 * head_dim tokens.
LARGEST_RATIO = 16


# --- Tensors ----------------------------------------------------------------------------------------------


def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map x `[batch, heads, time, dim]` by weight `[maps, rows, dim]` and bias `[maps, rows]`, head by head.

    More heads than maps: consecutive heads share a map (grouped queries). More maps than heads: each head
    goes through several (un-grouped keys). Returns `[batch, max(heads, maps), time, rows]`.

    It is an einsum because a broadcast matmul would copy the weights once per sequence of the batch.
    """
    (batch, heads, time, dim), (maps, rows, _) = x.shape, weight.shape
    groups = min(heads, maps)
    x = x.reshape(batch, groups, heads // groups, time, dim)
    y = torch.einsum("bnxtd,nwrd->bnxwtr", x, weight.reshape(groups, maps // groups, rows, dim))
    if bias is not None:
        # The cast is for autocast, where y is half precision and the bias is not: do as nn.Linear does.
        y = y + bias.to(y.dtype).reshape(groups, 1, maps // groups, 1, rows)
    return y.flatten(1, 3)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat each head of `[batch, heads, ...]` until there are `heads`; x itself if there are enough."""
    return x if x.shape[1] >= heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def full_precision(x: Tensor) -> Tensor:
    """x in float32, or float64 if it is: sines and exponentials of half precision numbers are noise."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def safe_norm(x: Tensor) -> Tensor:
    """Length along the last dimension, at least 1e-4: dividing by it is finite, as is its gradient.

    The floor also bounds that gradient by 1e4, which float16 can still represent.
    """
    return x.square().sum(-1, keepdim=True).clamp_min(1e-8).sqrt()


# --- Draws ------------------------------------------------------------------------------------------------
# Always on the CPU and in float32, whatever the default device and dtype: a seed means the same everywhere.


def gaussian(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def like_linear(*shape: int, dim: int, generator: torch.Generator) -> Tensor:
    """What nn.Linear with `dim` inputs draws, weight and bias alike: U(-1/sqrt(dim), 1/sqrt(dim))."""
    draw = torch.rand(shape, generator=generator, device="cpu", dtype=torch.float32)
    return (2 * draw - 1) / math.sqrt(dim)


def orthogonal_rows(heads: int, rows: int, dim: int, generator: torch.Generator) -> Tensor:
    """Unit rows `[heads, rows, dim]`, each run of `dim` of them orthogonal, each uniform on the sphere."""
    blocks = gaussian(heads, -(-rows // dim), dim, dim, generator=generator)
    q, r = torch.linalg.qr(blocks)
    # QR fixes the signs by its own convention; only with those of the diagonal undone is q uniform.
    uniform: Tensor = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return uniform.mT.flatten(1, 2)[:, :rows]


def identity_like(heads: int, rows: int, dim: int, generator: torch.Generator) -> Tensor:
    """The nearest thing to an identity with that many rows: inner products survive it as well as they can."""
    if rows < dim:
        return orthogonal_rows(heads, rows, dim, generator) * math.sqrt(dim / rows)
    identity = torch.eye(dim, device="cpu", dtype=torch.float32).expand(heads, dim, dim)
    return torch.cat([identity, orthogonal_rows(heads, rows - dim, dim, generator)], dim=1)


# --- The maps ---------------------------------------------------------------------------------------------


class FeatureMap(nn.Module):
    """φ for the heads of one layer.

    Args:
        head_dim: size of a query and of a key.
        num_heads: query heads.
        feature_size: size of φ(x); None takes the map's own default.
        num_key_value_heads: key heads, `num_heads` unless said otherwise.
        grouped: one map and state per key/value head; False: one per query head.
        shared: queries and keys use the same parameters; False: queries have their own, per query head.
        seed: of everything drawn. Give each layer its own, or all layers draw the same.
        trainable: False freezes the parameters.
    """

    name: ClassVar[str]
    mergeable: ClassVar[bool] = False  # affine, then a function of the features alone: see AffineMap
    separable: ClassVar[bool] = True  # whether shared=False makes sense
    even: ClassVar[bool] = False  # whether features come in pairs

    def __init__(
        self,
        *,
        head_dim: int,
        num_heads: int,
        feature_size: int | None = None,
        num_key_value_heads: int | None = None,
        grouped: bool = True,
        shared: bool = True,
        seed: int = 0,
        trainable: bool = True,
    ) -> None:
        super().__init__()
        self.check(head_dim, feature_size)
        self.head_dim = head_dim
        self.feature_size = self.default_feature_size(head_dim) if feature_size is None else feature_size
        self.num_heads = num_heads
        self.num_key_value_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        if self.num_key_value_heads < 1 or num_heads % self.num_key_value_heads:
            raise T2RError(
                f"{num_heads} query heads cannot be divided among {self.num_key_value_heads} key/value heads"
            )
        if not (shared or self.separable):
            raise T2RError(
                f"feature map {self.name!r} cannot have separate maps for queries and keys: its kernel needs "
                "the same random vectors on both sides; leave shared=True"
            )
        self.key_heads = self.num_key_value_heads if grouped else num_heads
        self.shared = shared
        self.seed = seed
        self.trainable = trainable

    @property
    def signed(self) -> bool:
        """Whether features can be negative, which the denominator of the attention must know."""
        return False

    @classmethod
    def default_feature_size(cls, head_dim: int) -> int:
        raise NotImplementedError

    @classmethod
    def check(cls, head_dim: int, feature_size: int | None) -> None:
        """Raise T2RError, with the reason, if the map cannot have that size."""
        size = cls.default_feature_size(head_dim) if feature_size is None else feature_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise T2RError(f"feature_size must be a whole number, at least 1; got {size!r}")
        if cls.even and size % 2:
            raise T2RError(
                f"feature_size counts the features of {cls.name!r}, which come in pairs: it must be even; "
                f"got {size}, try {size + 1}"
            )
        if size > LARGEST_RATIO * head_dim:
            raise T2RError(
                f"feature_size {size} is more than {LARGEST_RATIO} times the head's size {head_dim}: "
                f"surely a mistake; use at most {LARGEST_RATIO * head_dim}"
            )

    def queries(self, q: Tensor) -> Tensor:
        """φ of queries `[batch, num_heads, time, head_dim]`: the same with `feature_size` last."""
        raise NotImplementedError

    def keys(self, k: Tensor) -> Tensor:
        """φ of keys `[batch, num_key_value_heads, time, head_dim]`, for `key_heads` heads."""
        raise NotImplementedError

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.queries(q), self.keys(k)

    def draw(self, generator: torch.Generator) -> None:
        """Fill the parameters and buffers, in place."""

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """(Re)draw the parameters and buffers in place, from `seed` unless a CPU generator is given.

        On the meta device, where models are built before their weights are loaded, nothing is drawn.
        """
        if any(tensor.is_meta for tensor in self.state_dict().values()):
            return
        self.draw(torch.Generator("cpu").manual_seed(self.seed) if generator is None else generator)

    def finish(self) -> None:
        """The last line of a constructor, once the tensors are in place."""
        self.requires_grad_(self.trainable)
        self.reset_parameters()

    def extra_repr(self) -> str:
        return (
            f"head_dim={self.head_dim}, feature_size={self.feature_size}, num_heads={self.num_heads}, "
            f"key_heads={self.key_heads}"
        )


class HeadAffine(nn.Module):
    """The weights of one affine map per head."""

    def __init__(self, heads: int, rows: int, dim: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, rows, dim))
        self.bias = nn.Parameter(torch.empty(heads, rows)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return affine(x, self.weight, self.bias)

    def expanded(self, heads: int) -> tuple[Tensor, Tensor | None]:
        """Weight and bias with a map for each of `heads`, those of a group repeated."""
        times = heads // self.weight.shape[0]
        bias = None if self.bias is None else self.bias.repeat_interleave(times, dim=0)
        return self.weight.repeat_interleave(times, dim=0), bias


class AffineMap(FeatureMap):
    """A learned affine map, then a function of its outputs alone: what merge folds into the projections."""

    mergeable = True
    has_bias: ClassVar[bool]

    def __init__(self, *, init: str, **common: Any) -> None:
        super().__init__(**common)
        if init not in ("paper", "identity"):
            raise T2RError(f"no initialization {init!r}: choose paper or identity")
        self.init = init
        shape = (self.rows, self.head_dim, self.has_bias)
        self.key_map = HeadAffine(self.key_heads, *shape)
        self.query_map = None if self.shared else HeadAffine(self.num_heads, *shape)
        self.finish()

    @property
    def rows(self) -> int:
        """Outputs of the affine part."""
        return self.feature_size

    def activate(self, x: Tensor) -> Tensor:
        """What follows the affine part."""
        raise NotImplementedError

    def identity_rows(self, generator: torch.Generator) -> Tensor:
        """Weights `[key_heads, rows, head_dim]` under which the map resembles softmax attention."""
        raise NotImplementedError

    def affine_q(self) -> tuple[Tensor, Tensor | None]:
        """The affine part for queries: weight `[num_heads, rows, head_dim]` and bias `[num_heads, rows]`."""
        return (self.query_map or self.key_map).expanded(self.num_heads)

    def affine_k(self) -> tuple[Tensor, Tensor | None]:
        """The affine part for keys: weight `[key_heads, rows, head_dim]` and bias `[key_heads, rows]`."""
        return self.key_map.weight, self.key_map.bias

    def drop_affine(self) -> None:
        """After a merge: only `activate` is left, for features that come from the projections themselves."""
        del self.key_map, self.query_map

    def queries(self, q: Tensor) -> Tensor:
        return self.activate((self.query_map or self.key_map)(q))

    def keys(self, k: Tensor) -> Tensor:
        return self.activate(self.key_map(k))

    def draw(self, generator: torch.Generator) -> None:
        weight, bias = self.affine_k()
        if self.init == "identity":
            weight.copy_(self.identity_rows(generator))
            if bias is not None:
                bias.zero_()
        else:
            weight.copy_(like_linear(*weight.shape, dim=self.head_dim, generator=generator))
            if bias is not None:
                bias.copy_(like_linear(*bias.shape, dim=self.head_dim, generator=generator))
        if self.query_map is not None:
            # Separate maps start equal, as if shared: drawn apart, φ(q)·φ(k) would say nothing about q·k.
            weight, bias = self.key_map.expanded(self.num_heads)
            self.query_map.weight.copy_(weight)
            if self.query_map.bias is not None and bias is not None:
                self.query_map.bias.copy_(bias)
        if self.init == "identity":
            self.undo_scale()

    def undo_scale(self) -> None:
        """Queries come divided by the root of the head's size: make good for it where the map minds."""


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "elu": F.elu,
    "tanh": torch.tanh,
    "cos": torch.cos,
    "gelu": F.gelu,
}


class T2RMap(AffineMap):
    """relu(W x + b): feature_size * (head_dim + 1) parameters a head.

    Args:
        activation: relu, or one of the paper's ablations (and gelu), whose features can be negative.
        init: `paper` is what nn.Linear draws. `identity` starts a swapped model closer to its teacher: rows
            come in pairs w, -w, so that relu(w·x) and relu(-w·x) together lose nothing of w·x.
    """

    name = "t2r"
    has_bias = True

    def __init__(self, *, activation: str = "relu", init: str = "paper", **common: Any) -> None:
        if activation not in ACTIVATIONS:
            raise T2RError(f"no activation {activation!r}: choose one of {', '.join(ACTIVATIONS)}")
        super().__init__(init=init, **common)
        self.activation = activation

    @property
    def signed(self) -> bool:
        return self.activation != "relu"

    @classmethod
    def default_feature_size(cls, head_dim: int) -> int:
        return 32

    def activate(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.activation](x)

    def identity_rows(self, generator: torch.Generator) -> Tensor:
        half = identity_like(self.key_heads, -(-self.feature_size // 2), self.head_dim, generator)
        return torch.stack([half, -half], dim=2).flatten(1, 2)[:, : self.feature_size]


class HedgehogMap(AffineMap):
    """softmax over [W x, -W x]: W has half as many rows as there are features, and no bias.

    Args:
        init: `identity` as its authors do, or `paper`: what nn.Linear draws.
    """

    name = "hedgehog"
    even = True
    has_bias = False

    def __init__(self, *, init: str = "identity", **common: Any) -> None:
        super().__init__(init=init, **common)

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

    def undo_scale(self) -> None:
        # A softmax of small numbers is flat, and attends to everything alike.
        if self.query_map is None:
            self.key_map.weight.mul_(self.head_dim**0.25)
        else:
            self.query_map.weight.mul_(self.head_dim**0.5)


class EluMap(FeatureMap):
    """elu(x) + 1: no parameters (so nothing to share or to separate), and as many features as dimensions."""

    name = "elu"

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
