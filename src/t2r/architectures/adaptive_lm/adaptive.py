"""Adaptive input embeddings (Baevski and Auli, 2019) and adaptive softmax (Grave et al., 2017).

The vocabulary is divided into bands by frequency. Rare words have smaller embeddings. In the softmax, the first step
treats each band of rare words as a single class.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout

from t2r.architectures.adaptive_lm.configuration import Band


class AdaptiveEmbedding(nn.Module):
    """Embeddings of each band, with a projection to the hidden size.

    The first band has a projection too, although it already has the hidden size. A single band is a plain table without
    a projection."""

    def __init__(self, bands: Sequence[Band], hidden_size: int, padding_idx: int | None = None) -> None:
        super().__init__()
        self.bands = tuple(bands)
        self.num_embeddings, self.embedding_dim = bands[-1].last, hidden_size
        self.embeddings = nn.ModuleList(
            # The padding embedding gets no gradient. fairseq also excludes words with the same index in other bands.
            nn.Embedding(band.size, band.dim, band.place(padding_idx))
            for band in bands
        )
        count = len(bands) if len(bands) > 1 else 0
        self.projections = nn.ModuleList(nn.Linear(band.dim, hidden_size, bias=False) for band in bands[:count])

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embed tokens. Every band embeds every token, and only the result of the right band is used.

        The cost is small compared to the layers. Selecting the tokens of each band would require device synchronization
        and break a compiled graph."""
        if not self.projections:
            return self.embeddings[0](input_ids)
        embedded = None
        for band, table, project in zip(self.bands, self.embeddings, self.projections, strict=True):
            # The first and last bands are not bounded below and above, so that invalid ids raise an index error.
            own = torch.ones_like(input_ids, dtype=torch.bool)
            if band is not self.bands[0]:
                own &= input_ids >= band.first
            if band is not self.bands[-1]:
                own &= input_ids < band.last
            part = project(table(torch.where(own, input_ids - band.first, 0)))
            embedded = part if embedded is None else torch.where(own[..., None], part, embedded)
        assert embedded is not None
        return embedded


class TailProjection(nn.Module):
    """Projection from the hidden size to the size of a band.

    The weight has the layout of the embedding projection, which maps in the other direction, so that both can share
    one parameter."""

    def __init__(self, hidden_size: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dim))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states @ self.weight


class AdaptiveSoftmax(nn.Module):
    """Adaptive softmax. The head scores the words of the first band and the other bands, each as one class. The tail of
    a band scores its words.

    Without labels, returns the log-probabilities of all words, `[..., vocabulary]`, in float32 or float64. They are not
    rounded to lower precision, because they are normalized. With labels, one per hidden state, returns the sum of the
    negative log-likelihoods. Each tail then processes only tokens of its band, and no tensor has the size of the
    vocabulary. Negative labels are ignored.
    """

    def __init__(self, bands: Sequence[Band], hidden_size: int, softmax_dropout: float = 0.0) -> None:
        super().__init__()
        self.bands, tails = tuple(bands), bands[1:]
        self.in_features, self.out_features = hidden_size, bands[-1].last
        # A plain softmax has no dropout.
        self.dropout = softmax_dropout if tails else 0.0
        self.words = nn.ModuleList(nn.Linear(band.dim, band.size, bias=False) for band in bands)
        self.projections = nn.ModuleList(TailProjection(hidden_size, band.dim) for band in tails)
        self.classes = nn.Linear(hidden_size, len(tails), bias=False) if tails else None

    def forward(self, hidden_states: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden_states = self.drop(hidden_states)
        return self.log_probabilities(hidden_states) if labels is None else self.loss(hidden_states, labels)

    def log_probabilities(self, hidden_states: Tensor) -> Tensor:
        head = self.head(hidden_states).log_softmax(-1)
        first = self.bands[0].size
        parts = [head[..., :first]]
        for i in range(len(self.projections)):
            parts.append(self.tail(i, hidden_states).log_softmax(-1) + head[..., first + i, None])
        return torch.cat(parts, dim=-1) if len(parts) > 1 else head

    def loss(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        hidden_states, labels = hidden_states.flatten(0, -2), labels.flatten()
        choices = labels.masked_fill(labels < 0, -100)
        tails = []
        for i, band in enumerate(self.bands[1:]):
            own = (labels >= band.first) & (labels < band.last)
            choices = choices.masked_fill(own, self.bands[0].size + i)
            here = own.nonzero()[:, 0]
            # Computed even without tokens: in distributed training, all parameters must have a gradient.
            logits = self.tail(i, hidden_states[here])
            tails.append(cross_entropy(logits, labels[here] - band.first, reduction="sum"))
        return cross_entropy(self.head(hidden_states), choices, ignore_index=-100, reduction="sum") + sum(tails)

    def head(self, hidden_states: Tensor) -> Tensor:
        words = self.words[0](hidden_states)
        if self.classes is None:
            return at_least_float32(words)
        return at_least_float32(torch.cat([words, self.classes(hidden_states)], dim=-1))

    def tail(self, i: int, hidden_states: Tensor) -> Tensor:
        return at_least_float32(self.words[i + 1](self.drop(self.projections[i](hidden_states))))

    def drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training)


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
