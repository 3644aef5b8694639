"""Words in bands: the rarer they are, the smaller their embeddings, on the way in and on the way out.

Adaptive input embeddings are Baevski and Auli's (2019), the adaptive softmax is Grave et al.'s (2017). A rare word
costs few parameters in the first, and in the second its whole band is a single class for all who do not mean it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout

from t2r.architectures.adaptive_lm.configuration import Band


class AdaptiveEmbedding(nn.Module):
    """Embeddings of each band, and the projection that makes them as wide as the model: of the first band too,
    though it is that wide already. A single band is an ordinary table, without a projection."""

    def __init__(self, bands: Sequence[Band], hidden_size: int, padding_idx: int | None = None) -> None:
        super().__init__()
        self.bands = tuple(bands)
        self.num_embeddings, self.embedding_dim = bands[-1].last, hidden_size
        self.embeddings = nn.ModuleList(
            # Padding has no gradient from here. fairseq also spares the words that stand at its index in other bands.
            nn.Embedding(band.size, band.dim, band.place(padding_idx))
            for band in bands
        )
        count = len(bands) if len(bands) > 1 else 0
        self.projections = nn.ModuleList(nn.Linear(band.dim, hidden_size, bias=False) for band in bands[:count])

    def forward(self, input_ids: Tensor) -> Tensor:
        """Every band embeds every token, and all but one are then ignored: next to the layers that costs nothing,
        while to pick the tokens of a band would wait for the device and break a compiled graph."""
        if not self.projections:
            return self.embeddings[0](input_ids)
        embedded = None
        for band, table, project in zip(self.bands, self.embeddings, self.projections, strict=True):
            # The first and the last are open to below and above: a word that does not exist is an index error.
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
    """From the model's width to that of a band. The weight lies as that of the embedding's projection does, which
    goes the other way, so that the two can be one parameter."""

    def __init__(self, hidden_size: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dim))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states @ self.weight


class AdaptiveSoftmax(nn.Module):
    """The head decides between the words of the first band and, a class each, the other bands; the tail of a band
    decides between its words.

    Without labels: the log-probabilities of all words, `[..., vocabulary]`, in float32 at least. They are normalized,
    so rounding them would be an error of the probabilities themselves. With labels, one for each hidden state: the
    sum of their negative log-likelihoods. For that a tail looks at the tokens of its own band only, and nothing is
    ever as wide as the vocabulary. Labels below zero are ignored.
    """

    def __init__(self, bands: Sequence[Band], hidden_size: int, softmax_dropout: float = 0.0) -> None:
        super().__init__()
        self.bands, tails = tuple(bands), bands[1:]
        self.in_features, self.out_features = hidden_size, bands[-1].last
        # A plain softmax has no dropout of its own.
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
            # Also where there are none: a parameter without a gradient would keep other processes waiting for it.
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
