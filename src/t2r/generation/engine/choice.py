"""How the next token is chosen, as numbers instead of logits processors, so that rows with different options are chosen
together on the device. The decoding step adds biases and chooses greedily; `sampler` does the rest.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from transformers import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from t2r.generation.engine.request import Request

ORDER = (
    SequenceBiasLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
)
"""Processors whose order matters, in the order in which transformers and `Sampler` apply them."""
BIASES = (SequenceBiasLogitsProcessor, NoBadWordsLogitsProcessor, SuppressTokensLogitsProcessor)
"""Processors that add numbers to the logits."""


class Choice(NamedTuple):
    """How the next token of a sequence is chosen."""

    biases: dict[int, float]
    """What is added to the logits of tokens. Minus infinity: the token is never chosen."""
    sample: bool = False
    penalty: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is chosen from logits and biases alone, in the decoding step."""
        return self == Choice(self.biases)

    @classmethod
    def of(cls, request: Request, max_length: int) -> Choice | None:
        """Return how a request chooses tokens, or None if only its processors can do it."""
        biases: dict[int, float] = {}
        found: dict[str, Any] = {}
        last = -1
        for processor in request.processors:
            kind: Any = type(processor)
            if kind in ORDER:
                if ORDER.index(kind) <= last or getattr(processor, "filter_value", -math.inf) != -math.inf:
                    return None
                last = ORDER.index(kind)
            match processor:
                case SequenceBiasLogitsProcessor() if kind in (SequenceBiasLogitsProcessor, NoBadWordsLogitsProcessor):
                    if any(len(tokens) > 1 for tokens in processor.sequence_bias):
                        return None
                    for (token,), bias in processor.sequence_bias.items():
                        biases[token] = biases.get(token, 0.0) + bias
                case SuppressTokensLogitsProcessor() if kind is SuppressTokensLogitsProcessor:
                    biases |= dict.fromkeys(processor.suppress_tokens.tolist(), -math.inf)
                case ForcedBOSTokenLogitsProcessor() if kind is ForcedBOSTokenLogitsProcessor:
                    pass  # the first token, which the processors choose
                case ForcedEOSTokenLogitsProcessor() if kind is ForcedEOSTokenLogitsProcessor:
                    if processor.max_length != max_length:
                        return None
                case RepetitionPenaltyLogitsProcessor() if kind in ORDER and not processor.prompt_ignore_length:
                    found["penalty"] = processor.penalty
                case TemperatureLogitsWarper() if kind in ORDER:
                    found["temperature"] = processor.temperature
                case TopKLogitsWarper() if kind in ORDER:
                    found["top_k"] = processor.top_k
                case TopPLogitsWarper() if kind in ORDER and processor.min_tokens_to_keep == 1:
                    found["top_p"] = processor.top_p
                case MinPLogitsWarper() if kind in ORDER and processor.min_tokens_to_keep == 1:
                    found["min_p"] = processor.min_p
                case _:
                    return None
        return cls(biases, bool(request.config.do_sample), **found)
