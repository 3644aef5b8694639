"""The configuration of the adaptive language model. Its defaults are the settings of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from transformers import AutoConfig, PreTrainedConfig
from transformers.activations import ACT2FN

from t2r.errors import T2RError


class Band(NamedTuple):
    """A range of words of similar frequency: ids from `first` to `last` (exclusive), with embeddings of size `dim`."""

    first: int
    last: int
    dim: int

    @property
    def size(self) -> int:
        return self.last - self.first

    def place(self, word: int | None) -> int | None:
        """Return the index of a word in the band, or None if it is not in the band."""
        return word - self.first if word is not None and self.first <= word < self.last else None


class AdaptiveLMConfig(PreTrainedConfig):
    """Configuration of an adaptive language model. Words are numbered by decreasing frequency.

    Args:
        cutoffs: first word ids of the second and later bands. If empty, there is one band, with plain embeddings and a
            plain softmax.
        adaptive_factor: factor by which the embedding size decreases from each band to the next.
        softmax_dropout: dropout on the input of the adaptive softmax, and after the projections of its tails.
        layerdrop: probability of skipping a layer in training.
        tie_word_embeddings: share the word weights of the softmax with the embeddings, in each band.
        tie_adaptive_projections: share the projections of the tails with those of the embeddings, transposed.
        scale_embedding: multiply embeddings by the square root of `hidden_size`.
        final_layer_norm: apply layer normalization after the last layer.
        first_position: position of the first token in the sinusoids. None selects `pad_token_id + 1`, as in fairseq.
            It is saved with the model, so that changing the padding token later does not change positions.
    """

    model_type = "adaptive_lm"
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 267744
    hidden_size: int = 1024
    num_hidden_layers: int = 32
    num_attention_heads: int = 8
    intermediate_size: int = 4096
    activation_function: str = "relu"
    dropout: float = 0.2
    attention_dropout: float = 0.1
    activation_dropout: float = 0.1
    layerdrop: float = 0.2
    cutoffs: Sequence[int] = (20000, 60000)
    adaptive_factor: int = 4
    softmax_dropout: float = 0.2
    tie_word_embeddings: bool = True
    tie_adaptive_projections: bool = True
    scale_embedding: bool = True
    final_layer_norm: bool = False
    first_position: int | None = None
    use_cache: bool = True
    bos_token_id: int | None = 0
    pad_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **kwargs: Any) -> None:
        self.cutoffs = list(self.cutoffs)
        self.check()
        if self.first_position is None:
            self.first_position = (self.pad_token_id or 0) + 1
        super().__post_init__(**kwargs)

    def bands(self) -> list[Band]:
        """Return the bands of the vocabulary, from frequent to rare words."""
        bounds = [0, *self.cutoffs, self.vocab_size]
        return [
            Band(first, last, self.hidden_size // self.adaptive_factor**i)
            for i, (first, last) in enumerate(pairwise(bounds))
        ]

    def check(self) -> None:
        """Raise T2RError for values that are invalid or inconsistent."""
        for name in ("vocab_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "adaptive_factor"):
            if getattr(self, name) < 1:
                raise T2RError(f"{name}={getattr(self, name)} must be at least 1")
        if self.hidden_size < 4 or self.hidden_size % 2:
            raise T2RError(f"hidden_size={self.hidden_size} must be even and at least 4, for sinusoidal positions")
        if self.hidden_size % self.num_attention_heads:
            raise T2RError(
                f"hidden_size={self.hidden_size} must be a multiple of num_attention_heads={self.num_attention_heads}"
            )
        bounds = [0, *self.cutoffs, self.vocab_size]
        if any(first >= last for first, last in pairwise(bounds)):
            raise T2RError(f"cutoffs={self.cutoffs} must be increasing, between 0 and vocab_size={self.vocab_size}")
        smallest = self.adaptive_factor ** len(self.cutoffs)
        if self.hidden_size % smallest:
            raise T2RError(
                f"hidden_size={self.hidden_size} must be divisible by adaptive_factor={self.adaptive_factor} "
                f"{len(self.cutoffs)} times, once for each cutoff"
            )
        for name in ("dropout", "attention_dropout", "activation_dropout", "layerdrop", "softmax_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise T2RError(f"{name}={getattr(self, name)} must be at least 0 and less than 1")
        if self.activation_function not in ACT2FN:
            raise T2RError(f"activation_function={self.activation_function!r} is not an activation of transformers")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise T2RError(f"pad_token_id={self.pad_token_id} is not in a vocabulary of {self.vocab_size}")
        if self.tie_adaptive_projections and not self.tie_word_embeddings:
            raise T2RError(
                "tie_adaptive_projections requires tie_word_embeddings: only projections of tied words can be shared"
            )


AutoConfig.register(AdaptiveLMConfig.model_type, AdaptiveLMConfig, exist_ok=True)
