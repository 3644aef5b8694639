"""The gated delta rule as a rule of t2r's states, for the trial in rules.py. It is not part of the package.

Sums add the outer product of each key and value. The gated delta rule (Yang et al. 2024, arXiv:2412.06464) first
removes what the state answers to the key, and forgets at a rate that depends on the token:

    S_t = a_t (I - b_t k_t k_tᵀ) S_{t-1} + b_t k_t v_tᵀ        k of unit length, S `[feature, value]`

What it reads, S_tᵀ q with q of unit length, is an estimate of a value, not a sum of values: after a write with b = 1,
the answer to a key is its value, however often it was written. So it has no denominator of its own. Beside a window it
needs a weight, because window and state share one softmax: the mass that the query gives to what has left the window.
This must not be negative, and it is what the denominator of the sums estimates. So it is estimated as there, by
z_t = a_t z_{t-1} + φ(k_t) with the features of the product: the weight of the state is φ(q)·z, and its mean S_tᵀ q. S
and z have the shapes of the sums' state. Both rules keep the same bytes, and differ in what is read, not in how it is
mixed.

The gates are functions of the key that leaves the window, as the product's key weights are: a window keeps keys and
values, and nothing else of the token is known when it leaves.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from t2r.errors import T2RError
from t2r.feature_maps.base import DECAY_PACE, SLOWEST_START, HeadAffine
from t2r.feature_maps.learned import T2RMap
from t2r.feature_maps.registry import FEATURE_MAPS
from t2r.feature_maps.tensors import full_precision, identity_like, safe_norm
from t2r.ops import FASTEST_DECAY, Beside, Draws, Features, State, Sums
from t2r.ops.common import accumulator_dtype, normalize
from t2r.ops.rounding import store
from t2r.ops.rules import Sum

CHUNK = 64
"""Tokens per chunk, a power of two."""
FASTEST_START = 1 / 20
"""The largest initial rate of forgetting. A state is one memory here, and not features of different rates."""


class Read(NamedTuple):
    """What a query asks, `[batch, heads, time, feature]`."""

    unit: Tensor
    features: Tensor


class Write(NamedTuple):
    """What a token writes. With strength 0, features 0 and logarithm 0, it changes nothing."""

    unit: Tensor
    """The key of unit length, `[batch, key_heads, time, feature]`."""
    features: Tensor
    """φ(k), for the mass."""
    strength: Tensor
    """b, `[batch, key_heads, time]`."""
    log_decay: Tensor
    """The logarithm of a, `[batch, key_heads, time]`."""
    v: Tensor


# --- The reference ------------------------------------------------------------------------------------------


def recurrent(read: Read, write: Write, state: State) -> tuple[Sums, State]:
    """Process token by token. This is the definition."""
    s, z = state.s, state.z
    times = read.unit.shape[1] // s.shape[1]
    means, masses = [], []
    for t in range(write.v.shape[2]):
        k, strength = write.unit[:, :, t], write.strength[:, :, t, None]
        decay = write.log_decay[:, :, t].exp()
        s = decay[..., None, None] * s
        answer = torch.einsum("bhf,bhfv->bhv", k, s)
        s = s + k[..., None] * (strength * (write.v[:, :, t] - answer))[:, :, None]
        z = decay[..., None] * z + write.features[:, :, t]
        every_s, every_z = (x.repeat_interleave(times, dim=1) for x in (s, z))
        means.append(torch.einsum("bhf,bhfv->bhv", read.unit[:, :, t], every_s))
        masses.append((read.features[:, :, t] * every_z).sum(-1))
    return weighed(torch.stack(means, 2), torch.stack(masses, 2)), State(s, z)


def weighed(means: Tensor, masses: Tensor) -> Sums:
    """Return the sums of a state: the mass of a query as the denominator, and as the weight of what it reads."""
    return Sums(means * masses[..., None], masses)


# --- In chunks ----------------------------------------------------------------------------------------------


def chunked(read: Read, write: Write, state: State) -> tuple[Sums, State]:
    """Compute `recurrent` in chunks, by matrix products: the WY representation of a product of reflections.

    Let g_t be the product of the decays of a chunk up to t, and S_0 the state before it. Token t adds
    u_t = b_t (v_t - a_t S_{t-1}ᵀ k_t) in the direction of its key, so S_t = g_t S_0 + Σ_{j ≤ t} (g_t / g_j) k_j u_jᵀ.
    Inserted into itself, (I + L) U = b (V - g K S_0) with L_tj = b_t (g_t / g_j) k_t·k_j for j < t. So U = U_0 - W S_0
    with parts that do not depend on the state, and the state after the chunk is a matrix times S_0, plus another."""
    time, key_heads = write.v.shape[2], write.v.shape[1]
    padding = -time % CHUNK
    q, features_q = (
        in_chunks(x, padding, key_heads) for x in read
    )  # [batch, key_heads, chunks, group, CHUNK, feature]
    k, features_k, strength, log_decay, v = (in_chunks(x, padding) for x in write)
    log_g = log_decay.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu(1)
    decays = (log_g[..., :, None] - log_g[..., None, :]).masked_fill(later, -math.inf).exp()  # g_t / g_j
    g, rest = log_g.exp()[..., None], (log_g[..., -1:] - log_g).exp()[..., None]  # g_t, g_C / g_j

    lower = (strength[..., None] * (k @ k.mT) * decays).tril(-1)
    solved = UnitLowerInverse.apply(lower) @ torch.cat([strength[..., None] * v, strength[..., None] * g * k], -1)
    added, answered = solved.split([v.shape[-1], k.shape[-1]], -1)  # U_0, W
    left = rest * k
    whole = g[..., -1:, :]  # g_C
    onward = whole * torch.eye(k.shape[-1], dtype=v.dtype, device=v.device) - left.mT @ answered
    new = left.mT @ added
    s, z = state.s, state.z
    before_s, before_z = [], []
    gone, new_z = whole[..., 0].unbind(2), (rest * features_k).sum(-2).unbind(2)
    for i, (by, own) in enumerate(zip(onward.unbind(2), new.unbind(2), strict=True)):
        before_s.append(s)
        before_z.append(z)
        s, z = by @ s + own, gone[i] * z + new_z[i]
    s_0, z_0 = torch.stack(before_s, 2), torch.stack(before_z, 2)
    u = added - answered @ s_0

    group = q.shape[3]
    flat_q, flat_features, g = q.flatten(3, 4), features_q.flatten(3, 4), g.repeat(1, 1, 1, group, 1)
    weights, masses = (
        ((own @ keys.mT).unflatten(3, (group, CHUNK)) * decays[:, :, :, None]).flatten(3, 4)
        for own, keys in ((flat_q, k), (flat_features, features_k))
    )
    means = g * (flat_q @ s_0) + weights @ u
    mass = g[..., 0] * (flat_features @ z_0[..., None])[..., 0] + masses.sum(-1)
    return weighed(out_of_chunks(means, group, time), out_of_chunks(mass[..., None], group, time)[..., 0]), State(s, z)


def in_chunks(x: Tensor, padding: int, key_heads: int | None = None) -> Tensor:
    """Cut the time of `x [batch, heads, time, ...]` into chunks, with zeros at the end. Heads of queries are divided
    into groups by key head, which come after the chunks."""
    shape = [0, 0] * (x.dim() - 3) + [0, padding]
    x = F.pad(x, shape).unflatten(2, (-1, CHUNK)) if padding else x.unflatten(2, (-1, CHUNK))
    return x if key_heads is None else x.unflatten(1, (key_heads, -1)).transpose(2, 3)


def out_of_chunks(x: Tensor, group: int, time: int) -> Tensor:
    """Return `x [batch, key_heads, chunks, group * CHUNK, size]` as `[batch, heads, time, size]`."""
    return x.unflatten(3, (group, CHUNK)).transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :, :time]


class UnitLowerInverse(torch.autograd.Function):
    """The inverse of I + L for strictly lower triangular `L [..., size, size]`, size a power of two.

    By blocks of 1, 2, 4 ... rows: the inverse of [[A, 0], [B, C]] is [[A⁻¹, 0], [-C⁻¹ B A⁻¹, C⁻¹]]. These are matrix
    products only, which a CUDA graph can capture, as exact as substitution. (A product of powers of L is not: with
    equal keys and b = 1 its terms reach 1e18.)"""

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        size, length = 1, lower.shape[-1]
        inverse = torch.ones_like(lower[..., :1, :1]).unsqueeze(-3).expand(*lower.shape[:-2], length, 1, 1)
        while size < length:
            pairs = lower.unflatten(-1, (-1, 2 * size)).unflatten(-3, (-1, 2 * size)).diagonal(dim1=-4, dim2=-2)
            below = pairs.movedim(-1, -3)[..., size:, :size]
            first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
            upper = torch.cat([first, torch.zeros_like(first)], -1)
            inverse = torch.cat([upper, torch.cat([-second @ below @ first, second], -1)], -2)
            size *= 2
        found = inverse[..., 0, :, :]
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ g @ inverse.mT).tril(-1)


# --- The rule and its feature map ---------------------------------------------------------------------------


class GatedDelta(NamedTuple):
    """The rule. Its keys and queries are the columns of `DeltaMap`."""

    heads: int
    features: int

    def empty(self, rows: int, value_size: int, dtype: torch.dtype, device: torch.device | str) -> State:
        return Sum(self.heads, self.features).empty(rows, value_size, dtype, device)

    def parallel(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        state: State | None = None,
        mask: Tensor | None = None,
        starts: Tensor | None = None,
        causal: bool = True,
        normalized: bool = True,
    ) -> tuple[Tensor | Sums, State]:
        if starts is not None or not causal:
            raise T2RError("the trial of the delta rule has no packed documents and no attention that is not causal")
        dtype = accumulator_dtype(q, k, v)
        if state is None:
            state = self.empty(v.shape[0], v.shape[3], v.dtype, v.device)
        with torch.autocast(v.device.type, enabled=False):
            read, write = self.parts(q.to(dtype), k.to(dtype), v.to(dtype), mask)
            compute = recurrent if v.shape[2] == 1 else chunked
            sums, new = compute(read, write, state.map(lambda x: x.to(dtype)))
        return normalize(sums, v.dtype) if normalized else sums, new

    def parts(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Read, Write]:
        """Take the columns of queries and keys apart."""
        if mask is not None:
            k = k.masked_fill(~mask[:, None, :, None], 0)
        unit, features, gates = k.split([self.features, self.features, 2], -1)
        return Read(*q.split(self.features, -1)), Write(unit, features, gates[..., 0], gates[..., 1], v)

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State,
        *,
        mask: Tensor | None = None,
        inplace: bool = False,
        features: Features | None = None,
        beside: Beside | None = None,
        normalized: bool = True,
        draws: Draws | None = None,
    ) -> tuple[Tensor | Sums, State]:
        out, new = self.parallel(q, k, v, state=state, mask=mask, normalized=normalized)
        if inplace:
            store(state, new, draws)
            new = state
        return out, new

    def replay(self, state: State, k: Tensor, v: Tensor, mask: Tensor | None) -> State:
        return self.parallel(k[..., : 2 * self.features], k, v, state=state, mask=mask)[1]


class DeltaMap(T2RMap):
    """The features of the product, for the mass of a query, and beside them the delta rule's queries, keys and gates.

    Keys and queries of unit length come from affine maps of their own, whose outputs can be negative: the features are
    not, so all of them are alike, and each write would remove what others wrote."""

    name = "delta"

    def finish(self) -> None:
        self.unit_key = HeadAffine(self.key_heads, self.feature_size, self.head_dim, bias=True)
        self.unit_query = HeadAffine(self.num_heads, self.feature_size, self.head_dim, bias=True)
        self.gates = HeadAffine(self.key_heads, 2, self.head_dim, bias=True)
        super().finish()

    def rule(self, hidden_states: Tensor | None = None) -> GatedDelta:
        return GatedDelta(self.key_heads, self.feature_size)

    def queries(self, q: Tensor) -> Tensor:
        return torch.cat([unit(self.unit_query(q)), full_precision(super().queries(q))], -1)

    def keys(self, k: Tensor) -> Tensor:
        strength, rate = full_precision(self.gates(k)).split(1, -1)
        log_decay = -FASTEST_DECAY * (DECAY_PACE * rate).sigmoid()
        return torch.cat([unit(self.unit_key(k)), full_precision(super().keys(k)), strength.sigmoid(), log_decay], -1)

    def of_token(self, q: Tensor, k: Tensor, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
        return self.forward(q * scaling, k)

    def step_features(self, scaling: float) -> None:
        return None

    def paces(self) -> dict[torch.nn.Parameter, float]:
        keys = dict.fromkeys([self.unit_key.weight, self.gates.weight], self.head_dim**-0.25)
        return super().paces() | {self.unit_query.weight: self.head_dim**0.25} | keys

    def draw(self, generator: torch.Generator) -> None:
        super().draw(generator)
        rows = identity_like(self.key_heads, self.feature_size, self.head_dim, generator)
        self.unit_key.weight.copy_(rows)
        self.unit_query.weight.copy_(rows.repeat_interleave(self.num_heads // self.key_heads, dim=0))
        self.gates.weight.zero_()
        low, high = math.log(SLOWEST_START), math.log(FASTEST_START)
        rates = torch.exp(low + (high - low) * torch.rand(self.key_heads, generator=generator, device=generator.device))
        for part in (self.unit_key, self.unit_query, self.gates):
            assert part.bias is not None
            part.bias.zero_()
        assert self.gates.bias is not None
        self.gates.bias[:, 1].copy_(torch.logit(rates / FASTEST_DECAY) / DECAY_PACE)


def unit(x: Tensor) -> Tensor:
    x = full_precision(x)
    return x / safe_norm(x)


def register() -> None:
    """Make the map known by its name, so that models with it can be swapped, saved and loaded in this process."""
    FEATURE_MAPS.setdefault(DeltaMap.name, DeltaMap)
