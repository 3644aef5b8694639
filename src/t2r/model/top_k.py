"""Distributions over a vocabulary of which only the most likely tokens are known."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST, LOWEST = 1e-30, -1e4
"""The smallest probability and log-probability that are used in place of 0, whose products with infinity are NaN."""


class TopK(NamedTuple):
    """The k most likely tokens of each position, and how likely all others are together."""

    ids: Tensor
    """Token ids `[..., k]`, the most likely first."""
    log_p: Tensor
    """Their log-probabilities `[..., k]`."""
    rest: Tensor
    """The probability of all other tokens `[...]`."""

    def rows(self, here: slice) -> TopK:
        return TopK(*(x[here] for x in self))


def top_k_of(logits: Tensor, k: int, temperature: float = 1.0) -> TopK:
    """Return the distributions of logits `[..., vocabulary]` at a temperature, truncated to k tokens."""
    log_p = (logits / temperature).log_softmax(-1)
    top, ids = log_p.topk(k)
    # 1 minus the sum of the others would be rounding errors where it is small.
    rest = log_p.scatter(-1, ids, -torch.inf).logsumexp(-1).exp()
    return TopK(ids, top.clamp_min(LOWEST), rest)


def completed(known: TopK, log_q: Tensor) -> Tensor:
    """Return log-probabilities `[..., vocabulary]` of truncated distributions: among the tokens that are not known,
    `rest` is divided as in the distribution `log_q`.

    Their KL divergence from `log_q` is that of k + 1 outcomes, of which all tokens that are not known are one. With the
    completed distribution as a constant, the gradient is the same, too."""
    ids, log_p, rest = known.ids.long(), known.log_p.to(log_q.dtype), known.rest.to(log_q.dtype)
    total = log_p.exp().sum(-1) + rest  # not exactly 1 after rounding to half precision
    log_rest = (rest / total).clamp_min(SMALLEST).log()
    others = log_q.scatter(-1, ids, -torch.inf)
    shift = log_rest - others.logsumexp(-1).clamp_min(LOWEST)  # all tokens may be known
    return (others + shift[..., None]).scatter(-1, ids, log_p - total.log()[..., None])
