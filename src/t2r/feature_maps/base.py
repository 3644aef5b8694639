"""What every feature map is, and what those with a learned affine part share."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from t2r.errors import T2RError
from t2r.feature_maps.tensors import affine, full_precision, like_linear
from t2r.ops import FASTEST_DECAY, State
from t2r.ops.constants import derived

# A state many times larger than the head it serves is a slip of the keyboard, not a plan: at 16 times the
# head's size the state already holds as much as the keys and values of 8 * head_dim tokens.
LARGEST_RATIO = 16

SLOWEST_START, FASTEST_START = 1 / 2000, 0.9
"""Where rates of forgetting start, per token: spread evenly on a logarithmic scale, from a whole text to one word."""
DECAY_PACE = 5.0
"""Adam moves every number by about the learning rate, and a rate has further to go than a weight: from one word to a
whole text it is 8 units of its logit. So the parameter is a fifth of the logit."""


class FeatureMap(nn.Module):
    """φ for the heads of one layer.

    Args:
        head_dim: size of a query and of a key.
        num_heads: query heads.
        feature_size: size of φ(x); None takes the map's own default.
        num_key_value_heads: key heads, `num_heads` unless said otherwise.
        grouped: one map and state per key/value head; False: one per query head.
        shared: queries and keys use the same parameters; False: queries have their own, per query head.
        decay: each feature forgets, at a rate of its own that is learned.
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
        decay: bool = False,
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
        self.decay_logits = nn.Parameter(torch.empty(self.key_heads, self.feature_size)) if decay else None

    @property
    def decay(self) -> Tensor | None:
        """The rates of forgetting `[key_heads, feature_size]`, as `ops` takes them, or None."""
        if self.decay_logits is None:
            return None
        if self.decay_logits.is_meta:
            raise T2RError(
                "the weights of this model are offloaded, and its decay rates are not where they are needed: load it "
                "whole on one device (a device_map without cpu or disk beside a GPU)"
            )
        logits = self.decay_logits
        return derived(self, "decay", lambda: FASTEST_DECAY * (DECAY_PACE * full_precision(logits)).sigmoid())

    def empty_state(self, rows: int, value_size: int, dtype: torch.dtype, device: torch.device | str) -> State:
        """The state of attention over these features before any token, for so many sequences."""
        heads = torch.empty(rows, self.key_heads, 1, 1, dtype=dtype, device=device)
        keys, values = (heads.expand(-1, -1, -1, size) for size in (self.feature_size, value_size))
        return State.zeros(keys, values, self.signed)

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

    def paces(self) -> dict[nn.Parameter, float]:
        """How many times as fast as the others some of the parameters should learn."""
        return {}

    def draw(self, generator: torch.Generator) -> None:
        """Fill the parameters and buffers, in place."""

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """(Re)draw the parameters and buffers in place, from `seed` unless a CPU generator is given.

        On the meta device, where models are built before their weights are loaded, nothing is drawn.
        """
        if any(tensor.is_meta for tensor in self.state_dict().values()):
            return
        generator = torch.Generator("cpu").manual_seed(self.seed) if generator is None else generator
        self.draw(generator)
        if self.decay_logits is not None:
            low, high = math.log(SLOWEST_START), math.log(FASTEST_START)
            # Where the generator is: the module may be built on a GPU, which then is the default.
            drawn = torch.rand(self.decay_logits.shape, generator=generator, device=generator.device)
            rates = torch.exp(low + (high - low) * drawn)
            self.decay_logits.copy_(torch.logit(rates / FASTEST_DECAY) / DECAY_PACE)

    def finish(self) -> None:
        """The last line of a constructor, once the tensors are in place."""
        self.requires_grad_(self.trainable)
        self.reset_parameters()

    def extra_repr(self) -> str:
        return (
            f"head_dim={self.head_dim}, feature_size={self.feature_size}, num_heads={self.num_heads}, "
            f"key_heads={self.key_heads}"
        )


LARGEST_LOG_WEIGHT = 8.0
"""A key counts for up to exp(8) times as much as others, or as little: all or nothing, and float16 has room."""


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
    """A learned affine map, then a function of its outputs alone: what merge folds into the projections.

    Args:
        key_weights: each key counts by a weight, learned as the exponential of one more linear function of it. Features
            that always sum to 1 cannot say that a key matters more than others, whoever asks; `exp(q·k)` does.
    """

    mergeable = True
    has_bias: ClassVar[bool]

    def __init__(self, *, init: str, key_weights: bool = False, **common: Any) -> None:
        super().__init__(**common)
        if init not in ("paper", "identity"):
            raise T2RError(f"no initialization {init!r}: choose paper or identity")
        self.init = init
        shape = (self.rows, self.head_dim, self.has_bias)
        self.key_map = HeadAffine(self.key_heads, *shape)
        self.query_map = None if self.shared else HeadAffine(self.num_heads, *shape)
        self.weighs_keys = key_weights
        self.key_weight = HeadAffine(self.key_heads, 1, self.head_dim, bias=False) if key_weights else None
        self.finish()

    @property
    def rows(self) -> int:
        """Outputs of the affine part, of queries."""
        return self.feature_size

    @property
    def key_rows(self) -> int:
        """Outputs of the affine part, of keys: their weight may be one more."""
        return self.rows + self.weighs_keys

    def activate(self, x: Tensor) -> Tensor:
        """What follows the affine part."""
        raise NotImplementedError

    def activate_keys(self, x: Tensor) -> Tensor:
        """The same for keys, whose weight is the last of their rows."""
        if not self.weighs_keys:
            return self.activate(x)
        log_weight = full_precision(x[..., -1:]).clamp(-LARGEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT)
        return (self.activate(x[..., :-1]) * log_weight.exp()).type_as(x)

    def identity_rows(self, generator: torch.Generator) -> Tensor:
        """Weights `[key_heads, rows, head_dim]` under which the map resembles softmax attention."""
        raise NotImplementedError

    def affine_q(self) -> tuple[Tensor, Tensor | None]:
        """The affine part for queries: weight `[num_heads, rows, head_dim]` and bias `[num_heads, rows]`."""
        return (self.query_map or self.key_map).expanded(self.num_heads)

    def affine_k(self) -> tuple[Tensor, Tensor | None]:
        """The affine part for keys: weight `[key_heads, key_rows, head_dim]` and bias `[key_heads, key_rows]`."""
        weight, bias = self.key_map.weight, self.key_map.bias
        if self.key_weight is None:
            return weight, bias
        return torch.cat([weight, self.key_weight.weight], dim=1), None if bias is None else F.pad(bias, (0, 1))

    def drop_affine(self) -> None:
        """After a merge: only what follows is left, for features that come from the projections themselves."""
        del self.key_map, self.query_map, self.key_weight

    def paces(self) -> dict[nn.Parameter, float]:
        # Queries come divided by the root of the head's size, keys do not: for both maps to be moved alike by a step,
        # theirs takes the larger one.
        queries = getattr(self, "query_map", None)
        if queries is None:  # shared, or merged
            return {}
        of_keys = [part.weight for part in (self.key_map, self.key_weight) if part is not None]
        return {queries.weight: self.head_dim**0.25, **dict.fromkeys(of_keys, self.head_dim**-0.25)}

    def queries(self, q: Tensor) -> Tensor:
        return self.activate((self.query_map or self.key_map)(q))

    def keys(self, k: Tensor) -> Tensor:
        if k.shape[2] == 1 and not torch.is_grad_enabled():  # one product for both
            return self.activate_keys(affine(k, *derived(self, "keys", self.affine_k)))
        y = self.key_map(k)
        return self.activate_keys(y if self.key_weight is None else torch.cat([y, self.key_weight(k)], dim=-1))

    def draw(self, generator: torch.Generator) -> None:
        weight, bias = self.key_map.weight, self.key_map.bias
        if self.init == "identity":
            rows, (of_queries, of_keys) = self.identity_rows(generator), self.start_scales()
        else:
            rows, (of_queries, of_keys) = like_linear(*weight.shape, dim=self.head_dim, generator=generator), (1.0, 1.0)
        weight.copy_(of_keys * rows)
        if bias is not None and self.init == "identity":
            bias.zero_()
        elif bias is not None:
            bias.copy_(like_linear(*bias.shape, dim=self.head_dim, generator=generator))
        if self.query_map is not None:
            # Separate maps start equal, as if shared: drawn apart, φ(q)·φ(k) would say nothing about q·k.
            heads = self.num_heads // self.key_heads
            self.query_map.weight.copy_(of_queries * rows.repeat_interleave(heads, dim=0))
            if self.query_map.bias is not None and bias is not None:
                self.query_map.bias.copy_(bias.repeat_interleave(heads, dim=0))
        if self.key_weight is not None:
            self.key_weight.weight.zero_()  # all count alike

    def start_scales(self) -> tuple[float, float]:
        """What the rows that start like the identity are multiplied by, for queries and for keys. Queries come divided
        by the root of the head's size: make good for it where the map minds."""
        return 1.0, 1.0

    def sharp_scales(self) -> tuple[float, float]:
        """For a softmax over features: of small numbers it is flat, and attends to everything alike."""
        return (self.head_dim**0.25,) * 2 if self.shared else (self.head_dim**0.5, 1.0)
