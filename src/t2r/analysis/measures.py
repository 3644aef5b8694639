"""Measurements of one attention, accumulated over batches: its weights, its features, and its state."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from t2r.attention.observation import LinearInputs
from t2r.errors import T2RError
from t2r.ops import State, absorb
from t2r.ops.weights import Weights

DEAD = 1e-6
"""A feature is dead if it never exceeds this fraction of the largest feature of its head."""
BATCHED = 32
"""The size of the largest matrices whose eigenvalues cuSOLVER computes together. A CPU is faster for larger ones."""
QUANTILES = {"shortest": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "longest": 1.0}


class Mean:
    """The mean of values for each head, over batches and queries."""

    def __init__(self) -> None:
        self.total: Any = 0.0
        self.count: Any = 0.0

    def add(self, values: Tensor, where: Tensor | None = None) -> None:
        """Add values `[batch, heads, queries]`, where the condition of the same shape holds."""
        counted = torch.ones_like(values, dtype=torch.bool) if where is None else where
        self.total = self.total + values.double().masked_fill(~counted, 0).sum((0, 2))
        self.count = self.count + counted.sum((0, 2))

    def heads(self) -> list[float | None]:
        """Return the mean of each head, or None if nothing was added for it."""
        return [t / c if c else None for t, c in zip(self.total.tolist(), self.count.tolist(), strict=True)]


def entropy(weights: Tensor) -> Tensor:
    """Return the entropy of distributions over the last dimension, in nats."""
    return torch.special.entr(weights).sum(-1)


def jensen_shannon(first: Tensor, second: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence of distributions over the last dimension, in nats: 0 to log 2."""
    mixed = entropy((first + second) / 2)
    return (mixed - (entropy(first) + entropy(second)) / 2).clamp_min(0)


class WeightMeasures:
    """Distances and entropies of the weights of one attention, by head.

    Entropy and Jensen-Shannon divergence are defined for distributions. With a signed feature map, weights can be
    negative, and both are None. A query with a bounded denominator has weights that do not sum to 1; it is excluded
    from both, and `bounded` is the share of such queries. The same holds for a teacher that is recurrent."""

    def __init__(self, signed: bool, teacher_signed: bool = False) -> None:
        self.signed, self.teacher_signed = signed, teacher_signed
        self.means = {name: Mean() for name in ("entropy", "teacher_entropy", "euclidean", "jensen_shannon", "bounded")}

    def add(self, own: Weights, teacher: Weights | None) -> None:
        means, proper = self.means, ~own.bounded
        means["bounded"].add(own.bounded.double())
        if not self.signed:
            means["entropy"].add(entropy(own.weights), proper)
        if teacher is None:
            return
        theirs, theirs_proper = teacher.weights.to(own.weights), ~teacher.bounded.to(proper.device)
        means["euclidean"].add((own.weights - theirs).norm(dim=-1))
        if not self.teacher_signed:
            means["teacher_entropy"].add(entropy(theirs), theirs_proper)
        if not self.signed and not self.teacher_signed:
            means["jensen_shannon"].add(jensen_shannon(own.weights, theirs), proper & theirs_proper)

    def heads(self) -> list[dict[str, float | None]]:
        """Return the measurements of each head."""
        count = len(self.means["bounded"].heads())
        columns = {
            name: mean.heads() if isinstance(mean.total, Tensor) else [None] * count
            for name, mean in self.means.items()
        }
        return [{name: values[i] for name, values in columns.items()} for i in range(count)]


class ByDistance:
    """Attention by the distance between query and key, averaged over samples, layers and heads."""

    def __init__(self, size: int) -> None:
        self.sums = torch.zeros(2, size + 1, dtype=torch.double)
        """Attention and number of pairs at each distance plus 1. Keys after their query are in the first column."""

    def add(self, weights: Tensor, first: int) -> None:
        """Add causal weights `[batch, heads, queries, keys]` of the queries from position `first` on."""
        batch, heads, queries, keys = weights.shape
        query = torch.arange(first, first + queries, device=weights.device)
        distance = query[:, None] - torch.arange(keys, device=weights.device)
        total = weights.sum((0, 1), dtype=torch.double)
        added = torch.stack([total, torch.full_like(total, batch * heads)]).flatten(1)
        self.sums = self.sums.to(weights.device).index_add_(1, (distance + 1).clamp_min(0).flatten(), added)

    def between(self, first: int, last: int) -> float | None:
        """Return the mean attention to a token at a distance of `first` to `last`."""
        total, count = self.sums[:, first + 1 : last + 2].sum(1).tolist()
        return total / count if count else None


def distance_buckets(size: int, exact: int = 32, per_octave: int = 8) -> list[tuple[int, int]]:
    """Return ranges of distances below `size`: each distance below `exact`, then ranges of growing width."""
    edges = list(range(min(size, exact)))
    edge = float(exact)
    while edge < size:
        edges.append(round(edge))
        edge *= 2 ** (1 / per_octave)
    edges = list(dict.fromkeys(edges))
    return [(first, last - 1) for first, last in zip(edges, [*edges[1:], size], strict=True)]


class FeatureMeasures:
    """Features and states of one recurrent attention."""

    def __init__(self, positions: Iterable[int]) -> None:
        self.positions = list(positions)
        self.keys: Tensor | None = None
        self.queries: Tensor | None = None
        self.decay: Tensor | None = None
        self.states: dict[int, list[tuple[int, float, float]]] = {}
        """By number of tokens, for each batch: its size, and the means of norm and effective rank."""

    def add(self, seen: LinearInputs) -> None:
        keys, queries = (x.abs().amax((0, 2)).float() for x in (seen.k, seen.q))
        self.keys = keys if self.keys is None else self.keys.maximum(keys)
        self.queries = queries if self.queries is None else self.queries.maximum(queries)
        decay = seen.options.get("decay")
        self.decay = None if decay is None else decay.detach().float()
        causal = seen.options.get("causal", True)
        length = seen.k.shape[2]
        positions = [p for p in self.positions if p <= length] if causal else [length]
        if not positions:
            return
        state, done, states = State.zeros(seen.k, seen.v), 0, []
        for position in positions:
            span = slice(done, position)
            state = absorb(state, seen.k[:, :, span], seen.v[:, :, span], decay=decay)
            done = position
            states.append(state.s)
        s = torch.stack(states)  # measured together, because the host waits for the device
        measured = torch.stack([torch.linalg.matrix_norm(s).double(), effective_rank(s)])
        for position, *found in zip(positions, *measured.mean((2, 3)).tolist(), strict=True):
            self.states.setdefault(position if causal else 0, []).append((s.shape[1], *found))

    def dead(self) -> dict[str, Any]:
        """Return shares of dead features: of keys, of queries, and of either side for each query head."""
        assert self.keys is not None and self.queries is not None
        keys, queries = (x <= DEAD * x.amax(-1, keepdim=True) for x in (self.keys, self.queries))
        either = queries | keys.repeat_interleave(len(queries) // len(keys), dim=0)
        return {
            "dead": _share(either),
            "dead_keys": _share(keys),
            "dead_queries": _share(queries),
            "heads": either.double().mean(-1).tolist(),
        }

    def half_lives(self) -> Tensor | None:
        """Return the half-lives of all features in tokens, or None without decay."""
        return None if self.decay is None else math.log(2) / self.decay.flatten().cpu()

    def growth(self) -> list[dict[str, Any]]:
        """Return the norm and the effective rank of the state by number of tokens (None: a whole source)."""
        found = []
        for position, held in sorted(self.states.items()):
            samples = sum(size for size, _, _ in held)  # the last batch may have fewer
            norm = sum(size * norm for size, norm, _ in held) / samples
            rank = sum(size * rank for size, _, rank in held) / samples
            found.append({"tokens": position or None, "norm": norm, "effective_rank": rank})
        return found


def half_life_summary(half_lives: Tensor | None, window: int) -> dict[str, float] | None:
    """Return quantiles of half-lives in tokens, and the share of features that outlast the window."""
    if half_lives is None:
        return None
    found = {name: half_lives.quantile(q).item() for name, q in QUANTILES.items()}
    return found | {"above_window": _share(half_lives > window)}


def effective_rank(s: Tensor) -> Tensor:
    """Return exp(entropy of the normalized singular values) of matrices: 1 to their smaller side."""
    # On a GPU, singular values are computed one matrix at a time if a side is above 32, as the head dimension is.
    # Square roots of eigenvalues in float64 are at least as precise as singular values in float32.
    s = s.double()
    squares = s @ s.mT if s.shape[-2] < s.shape[-1] else s.mT @ s
    if not squares.isfinite().all():
        raise T2RError("states are not finite: activations overflow in this dtype; use --dtype float32 or bfloat16")
    if squares.shape[-1] > BATCHED:
        squares = squares.cpu()
    values = torch.linalg.eigvalsh(squares).clamp_min(0).sqrt().to(s.device)
    shares = values / values.sum(-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
    return entropy(shares).exp()


def measured_positions(window: int) -> list[int]:
    """Return the numbers of tokens after which a state is measured: powers of two from 8, and the window."""
    return [*(p for p in (2**i for i in range(3, 31)) if p < window), window]


def _share(flags: Tensor) -> float:
    return flags.double().mean().item()
