"""AdaptiveLMConfig: the settings of the paper's language model, which are its defaults."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from transformers import AutoConfig, PreTrainedConfig
from transformers.activations import ACT2FN

from t2r.errors import T2RError


class Band(NamedTuple):
    """Words of about the same frequency: ids from `first` to before `last`, with embeddings of size `dim`."""

    first: int
    last: int
    dim: int

    @property
    def size(self) -> int:
        return self.last - self.first

    def place(self, word: int | None) -> int | None:
        """Where a word stands in the band, if it does."""
        return word - self.first if word is not None and self.first <= word < self.last else None


class AdaptiveLMConfig(PreTrainedConfig):
    """What an adaptive language model is made of. Words are numbered by falling frequency.

    Args:
        cutoffs: where the second band of words begins, the third and so on. Empty: one band, which is to say plain
            embeddings and a plain softmax.
        adaptive_factor: the embeddings of a band are so many times smaller than those of the band before.
        softmax_dropout: of what enters the adaptive softmax, and again behind the projections of its tails.
        layerdrop: how often, in training, a whole layer is left out.
        tie_word_embeddings: the softmax has the words' embeddings for its weights, band by band.
        tie_adaptive_projections: and the projections of its tails are those of the embeddings, transposed.
        scale_embedding: multiply embeddings by the square root of `hidden_size`.
        final_layer_norm: a norm after the last layer.
        first_position: the number that the sinusoids have for the first token. None: as in fairseq, which counts on
            from `pad_token_id`. It is part of the model: a padding token that is chosen later does not move it.
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
        """The vocabulary in its bands, from the frequent words to the rare."""
        bounds = [0, *self.cutoffs, self.vocab_size]
        return [
            Band(first, last, self.hidden_size // self.adaptive_factor**i)
            for i, (first, last) in enumerate(pairwise(bounds))
        ]

    def check(self) -> None:
        """Refuse what would not fit together, or would be rounded in silence."""
        for name in ("vocab_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "adaptive_factor"):
            if getattr(self, name) < 1:
                raise T2RError(f"{name}={getattr(self, name)} must be at least 1")
        if self.hidden_size < 4 or self.hidden_size % 2:
            raise T2RError(f"hidden_size={self.hidden_size} must be even and at least 4: half sines, half cosines")
        if self.hidden_size % self.num_attention_heads:
            raise T2RError(
                f"hidden_size={self.hidden_size} cannot be divided among num_attention_heads={self.num_attention_heads}"
            )
        bounds = [0, *self.cutoffs, self.vocab_size]
        if any(first >= last for first, last in pairwise(bounds)):
            raise T2RError(f"cutoffs={self.cutoffs} must ascend, between 0 and vocab_size={self.vocab_size}")
        smallest = self.adaptive_factor ** len(self.cutoffs)
        if self.hidden_size % smallest:
            raise T2RError(
                f"hidden_size={self.hidden_size} cannot be divided by adaptive_factor={self.adaptive_factor} "
                f"{len(self.cutoffs)} times, once for each of the cutoffs"
            )
        for name in ("dropout", "attention_dropout", "activation_dropout", "layerdrop", "softmax_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise T2RError(f"{name}={getattr(self, name)} must be at least 0 and less than 1")
        if self.activation_function not in ACT2FN:
            raise T2RError(f"activation_function={self.activation_function!r} is not one that transformers has")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise T2RError(f"pad_token_id={self.pad_token_id} is not in a vocabulary of {self.vocab_size}")
        if self.tie_adaptive_projections and not self.tie_word_embeddings:
            raise T2RError(
                "tie_adaptive_projections needs tie_word_embeddings: only projections of tied words can be shared"
            )


AutoConfig.register(AdaptiveLMConfig.model_type, AdaptiveLMConfig, exist_ok=True)
