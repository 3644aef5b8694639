"""The base class of feature maps, and the base class of maps with a learned affine part."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from t2r.errors import T2RError
from t2r.feature_maps.tensors import TokenAffine, affine, full_precision, like_linear
from t2r.ops import FASTEST_DECAY, LARGEST_LOG_WEIGHT, Features, State
from t2r.ops.common import HALF
from t2r.ops.constants import derived
from t2r.ops.rules import Rule, Sum

# Catches typing errors. At 16 times the head size, the state is as large as the keys and values of 8 * head_dim tokens.
LARGEST_RATIO = 16

SLOWEST_START, FASTEST_START = 1 / 2000, 0.9
"""Range of the initial decay rates per token. They are spread evenly on a logarithmic scale."""
DECAY_PACE = 5.0
"""The parameter is the logit of the decay rate divided by this. Adam changes each parameter by about the learning rate
per step, and logits have a wider range than weights: initial rates span about 10 units."""


class FeatureMap(nn.Module):
    """Base class of feature maps: φ for the heads of one layer.

    Args:
        head_dim: size of queries and keys.
        num_heads: number of query heads.
        feature_size: size of φ(x). None selects the default of the map.
        num_key_value_heads: number of key/value heads. Defaults to `num_heads`.
        grouped: use one map and state per key/value head. If False, use one per query head.
        shared: queries and keys use the same parameters. If False, each query head has its own.
        decay: learn a decay rate for each feature.
        query_weights: learn how much the state counts for each query beside a window, as the exponential of an affine
            function of the query. Without a window it would cancel.
        seed: seed of the initialization. Use a different one for each layer.
        trainable: if False, the parameters are frozen.
    """

    name: ClassVar[str]
    separable: ClassVar[bool] = True  # whether shared=False is supported
    even: ClassVar[bool] = False  # whether feature_size must be even

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
        query_weights: bool = False,
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
                f"the number of query heads, {num_heads}, must be a multiple of that of key/value heads, "
                f"{self.num_key_value_heads}"
            )
        if not (shared or self.separable):
            raise T2RError(
                f"feature map {self.name!r} does not support separate maps for queries and keys, because its kernel "
                "requires the same random vectors for both: use shared=True"
            )
        self.key_heads = self.num_key_value_heads if grouped else num_heads
        self.shared = shared
        self.seed = seed
        self.trainable = trainable
        self.decay_logits = nn.Parameter(torch.empty(self.key_heads, self.feature_size)) if decay else None
        self.query_weight = HeadAffine(num_heads, 1, head_dim, bias=True) if query_weights else None

    @property
    def decay(self) -> Tensor | None:
        """The decay rates `[key_heads, feature_size]`, or None without decay."""
        logits = self.decay_logits
        if logits is None:
            return None
        if logits.is_meta:
            raise T2RError(
                "the decay rates of this model are offloaded, which is not supported: load the whole model on one "
                "device (use a device_map without cpu or disk offload)"
            )
        return derived(self, "decay", lambda: FASTEST_DECAY * (DECAY_PACE * full_precision(logits)).sigmoid())

    def rule(self, hidden_states: Tensor | None = None) -> Rule:
        """Return how a state over these features is advanced by the tokens of a call.

        `hidden_states [batch, time, hidden]` are the inputs of the attention, for recurrences with gates."""
        return Sum(self.key_heads, self.feature_size, self.decay, self.signed)

    state_type: ClassVar[type[State]] = State
    """What the rule keeps. Another rule may have a named tuple of its own."""

    def empty_state(self, rows: int, value_size: int, dtype: torch.dtype, device: torch.device | str) -> State:
        """Return the state of the rule before the first token. Its parameters are not needed, and may be offloaded."""
        return Sum(self.key_heads, self.feature_size, signed=self.signed).empty(rows, value_size, dtype, device)

    @property
    def signed(self) -> bool:
        """Whether features can be negative. The attention denominator is then bounded differently."""
        return False

    @classmethod
    def default_feature_size(cls, head_dim: int) -> int:
        raise NotImplementedError

    @classmethod
    def check(cls, head_dim: int, feature_size: int | None) -> None:
        """Raise T2RError if the map does not support this feature size."""
        size = cls.default_feature_size(head_dim) if feature_size is None else feature_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise T2RError(f"feature_size must be a whole number, at least 1; got {size!r}")
        if cls.even and size % 2:
            raise T2RError(
                f"the features of feature map {cls.name!r} come in pairs, so feature_size must be even; "
                f"got {size}, try {size + 1}"
            )
        if size > LARGEST_RATIO * head_dim:
            raise T2RError(
                f"feature_size {size} is more than {LARGEST_RATIO} times the head size {head_dim}: "
                f"use at most {LARGEST_RATIO * head_dim}"
            )

    def queries(self, q: Tensor) -> Tensor:
        """Map queries `[batch, num_heads, time, head_dim]` to `[batch, num_heads, time, feature_size]`."""
        raise NotImplementedError

    def keys(self, k: Tensor) -> Tensor:
        """Map keys `[batch, num_key_value_heads, time, head_dim]` to `[batch, key_heads, time, feature_size]`."""
        raise NotImplementedError

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.queries(q), self.keys(k)

    def query_logs(self, q: Tensor) -> Tensor | None:
        """Return the logarithms of the query weights, `[batch, num_heads, time]`, or None if there are none."""
        return None if self.query_weight is None else full_precision(self.query_weight(q)[..., 0])

    def of_token(self, q: Tensor, k: Tensor, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
        """Compute `forward(q * scaling, k)` for a single token, without gradients."""
        return self.forward(q * scaling, k)

    def step_features(self, scaling: float) -> Features | None:
        """Return how `ops.step` can compute the features itself, from queries without their scale. None: it cannot."""
        return None

    def paces(self) -> dict[nn.Parameter, float]:
        """Return factors of the learning rate for parameters that do not use the common one."""
        return {}

    def draw(self, generator: torch.Generator) -> None:
        """Initialize the parameters and buffers in place."""

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialize the parameters and buffers in place, from `seed` unless a CPU generator is given.

        Does nothing on the meta device, where models are created before their weights are loaded.
        """
        if any(tensor.is_meta for tensor in self.state_dict().values()):
            return
        generator = torch.Generator("cpu").manual_seed(self.seed) if generator is None else generator
        self.draw(generator)
        if self.decay_logits is not None:
            low, high = math.log(SLOWEST_START), math.log(FASTEST_START)
            # Draw on the generator's device: a GPU may be the default device here.
            drawn = torch.rand(self.decay_logits.shape, generator=generator, device=generator.device)
            rates = torch.exp(low + (high - low) * drawn)
            self.decay_logits.copy_(torch.logit(rates / FASTEST_DECAY) / DECAY_PACE)
        if self.query_weight is not None:
            for parameter in self.query_weight.parameters():
                parameter.zero_()  # all queries start with weight 1

    def finish(self) -> None:
        """Freeze parameters if not trainable, and initialize them. Constructors call this last."""
        self.requires_grad_(self.trainable)
        self.reset_parameters()

    def extra_repr(self) -> str:
        return (
            f"head_dim={self.head_dim}, feature_size={self.feature_size}, num_heads={self.num_heads}, "
            f"key_heads={self.key_heads}"
        )


class HeadAffine(nn.Module):
    """One affine map per head."""

    def __init__(self, heads: int, rows: int, dim: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, rows, dim))
        self.bias = nn.Parameter(torch.empty(heads, rows)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return affine(x, self.weight, self.bias)

    def expanded(self, heads: int) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias repeated for `heads` heads. Consecutive heads share a map."""
        times = heads // self.weight.shape[0]
        bias = None if self.bias is None else self.bias.repeat_interleave(times, dim=0)
        return self.weight.repeat_interleave(times, dim=0), bias


class AffineMap(FeatureMap):
    """A learned affine map followed by a function of its outputs. `merge` folds the affine map into the projections.

    Args:
        init: initialization, `paper` or `identity`.
        key_weights: multiply the features of each key by a query-independent weight, the exponential of a learned
            linear function of the key. Features that always sum to 1 cannot express such a weight; `exp(q·k)` can.
    """

    has_bias: ClassVar[bool]
    activation: str = ""
    """The name of the function that follows. Empty: it has none."""

    def __init__(self, *, init: str, key_weights: bool = False, **common: Any) -> None:
        super().__init__(**common)
        if init not in ("paper", "identity"):
            raise T2RError(f"unknown initialization {init!r}: choose paper or identity")
        self.init = init
        shape = (self.rows, self.head_dim, self.has_bias)
        self.key_map = HeadAffine(self.key_heads, *shape)
        self.query_map = None if self.shared else HeadAffine(self.num_heads, *shape)
        self.weighs_keys = key_weights
        self.key_weight = HeadAffine(self.key_heads, 1, self.head_dim, bias=False) if key_weights else None
        self.finish()

    @property
    def rows(self) -> int:
        """Number of outputs of the affine part for queries."""
        return self.feature_size

    @property
    def key_rows(self) -> int:
        """Number of outputs of the affine part for keys, including the key weight if there is one."""
        return self.rows + self.weighs_keys

    def activate(self, x: Tensor) -> Tensor:
        """Apply the function that follows the affine part."""
        raise NotImplementedError

    def activate_keys(self, x: Tensor) -> Tensor:
        """Apply `activate` to keys. The last row is the logarithm of the key weight, if there is one."""
        if not self.weighs_keys:
            return self.activate(x)
        x, log_weight = x.split_with_sizes((self.rows, 1), dim=-1)
        factor = full_precision(log_weight).clamp(-LARGEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT).exp()
        return (self.activate(x) * factor).type_as(x)

    def identity_rows(self, generator: torch.Generator) -> Tensor:
        """Return weights `[key_heads, rows, head_dim]` for which the map resembles softmax attention."""
        raise NotImplementedError

    def affine_q(self) -> tuple[Tensor, Tensor | None]:
        """Return the affine part for queries: weight `[num_heads, rows, head_dim]` and bias `[num_heads, rows]`."""
        return (self.query_map or self.key_map).expanded(self.num_heads)

    def affine_k(self) -> tuple[Tensor, Tensor | None]:
        """Return the affine part for keys: weight `[key_heads, key_rows, head_dim]`, bias `[key_heads, key_rows]`."""
        weight, bias = self.key_map.weight, self.key_map.bias
        if self.key_weight is None:
            return weight, bias
        return torch.cat([weight, self.key_weight.weight], dim=1), None if bias is None else F.pad(bias, (0, 1))

    def step_features(self, scaling: float) -> Features | None:
        if self.activation not in ("relu", "softmax"):
            return None
        if not hasattr(self, "key_map"):  # merged: the projections compute the affine part
            return Features(self.feature_size, self.activation, self.weighs_keys)
        weighs_queries = self.query_weight is not None

        def compute() -> Features:
            (q_weight, q_bias), (k_weight, k_bias) = self.affine_q(), self.affine_k()
            if self.query_weight is not None:
                (weight, bias), zeros = self.query_weight.expanded(self.num_heads), q_weight.new_zeros(1)
                q_bias, bias = (
                    zeros.expand(x.shape[:2]) if b is None else b for x, b in ((q_weight, q_bias), (weight, bias))
                )
                q_weight, q_bias = torch.cat([q_weight, weight], dim=1), torch.cat([q_bias, bias], dim=1)
            q_weight, k_weight = (q_weight * scaling).contiguous(), k_weight.contiguous()
            how = (self.feature_size, self.activation, self.weighs_keys, weighs_queries)
            return Features(*how, q_weight, q_bias, k_weight, k_bias)

        return derived(self, ("step", scaling), compute)

    def drop_affine(self) -> None:
        """Remove the affine part after a merge, when the projections compute its outputs."""
        del self.key_map, self.query_map, self.key_weight

    def paces(self) -> dict[nn.Parameter, float]:
        # Queries are divided by sqrt(head_dim) and keys are not. The query map gets a larger learning rate, so that an
        # optimizer step changes both maps alike.
        queries = getattr(self, "query_map", None)
        if queries is None:  # shared, or merged
            return {}
        of_keys = [part.weight for part in (self.key_map, self.key_weight) if part is not None]
        return {queries.weight: self.head_dim**0.25, **dict.fromkeys(of_keys, self.head_dim**-0.25)}

    def queries(self, q: Tensor) -> Tensor:
        return self.activate((self.query_map or self.key_map)(q))

    def keys(self, k: Tensor) -> Tensor:
        y = self.key_map(k)
        return self.activate_keys(y if self.key_weight is None else torch.cat([y, self.key_weight(k)], dim=-1))

    def of_token(self, q: Tensor, k: Tensor, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
        if q.dtype in HALF:  # scaled weights would be rounded: keep the arithmetic of `forward`
            q, scaling = q * scaling, 1.0

        def arrange() -> tuple[TokenAffine, TokenAffine]:
            queries = self.query_map or self.key_map
            of_q = TokenAffine.of(queries.weight * scaling, queries.bias, self.num_heads)
            return of_q, TokenAffine.of(*self.affine_k(), self.num_key_value_heads)

        of_q, of_k = derived(self, ("token", scaling), arrange)
        return self.activate(of_q(q)), self.activate_keys(of_k(k))

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
            # Separate maps start equal. If drawn independently, φ(q)·φ(k) would not depend on q·k.
            heads = self.num_heads // self.key_heads
            self.query_map.weight.copy_(of_queries * rows.repeat_interleave(heads, dim=0))
            if self.query_map.bias is not None and bias is not None:
                self.query_map.bias.copy_(bias.repeat_interleave(heads, dim=0))
        if self.key_weight is not None:
            self.key_weight.weight.zero_()  # all keys start with weight 1

    def start_scales(self) -> tuple[float, float]:
        """Return the factors of the identity initialization for queries and keys.

        Maps that are sensitive to scale use them to undo the division of queries by sqrt(head_dim)."""
        return 1.0, 1.0

    def sharp_scales(self) -> tuple[float, float]:
        """Return `start_scales` for a softmax over features, which is nearly uniform for small inputs."""
        return (self.head_dim**0.25,) * 2 if self.shared else (self.head_dim**0.5, 1.0)
