"""Sequences on their way: those that were given together share logits processors, stopping criteria and a seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from t2r.generation.engine.request import Request


@dataclass(eq=False)
class Sequence:
    """One prompt and what was generated after it."""

    index: int
    """Its place among those that were given together."""
    row: int | None = None
    """Its row of the running batch; None: it waits, or is finished."""
    tokens: list[int] = field(default_factory=list)
    """What is new."""
    finished: bool = False
    state: Any = None
    """If it was asked for: the cache at the end, which has read every token but the last."""


class Event(NamedTuple):
    """A new token of a sequence."""

    sequence: Sequence
    token: int


class Group:
    """Sequences that are decoded under one call's options, as `generate` would decode them.

    A group is `plain` if it takes the likeliest token each time and stops at special tokens or a length. The decoding
    step then chooses its tokens itself, and its sequences end one by one. Otherwise every token is chosen here, by
    transformers' processors and criteria.
    """

    def __init__(self, request: Request, state: Any, generator: torch.Generator | None, keep_state: bool) -> None:
        self.request, self.state, self.generator, self.keep_state = request, state, generator, keep_state
        config, ids = request.config, request.ids
        self.sequences = [Sequence(i) for i in range(ids.shape[0])]
        eos = [c.eos_token_id.tolist() for c in request.criteria if isinstance(c, EosTokenCriteria)]
        self.stops = {token for tokens in eos for token in tokens}
        self.max_length: int = config.max_length
        simple = all(type(c) in (EosTokenCriteria, MaxLengthCriteria) for c in request.criteria)
        self.plain = simple and not config.do_sample and not request.processors
        self.pad = pad_token(config)
        if not self.plain:
            self.ids = torch.cat([ids, ids.new_full((ids.shape[0], self.max_length - ids.shape[1]), self.pad)], dim=1)
            self.length = ids.shape[1]
            self.unfinished = torch.ones(ids.shape[0], dtype=torch.bool, device=ids.device)

    @property
    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.finished]

    @property
    def new_tokens(self) -> int:
        """The most tokens that a sequence can get."""
        return self.max_length - self.request.ids.shape[1]

    def choose(self, logits: Tensor) -> Tensor:
        """The next token of every sequence `[sequences]`, from logits in float32."""
        if self.plain:
            return logits.argmax(-1)
        processors: Any = self.request.processors
        scores = processors(self.ids[:, : self.length], logits)
        if self.request.config.do_sample:
            chosen = torch.multinomial(scores.softmax(-1), num_samples=1, generator=self.generator).squeeze(1)
        else:
            chosen = scores.argmax(-1)
        if self.stops:
            chosen = torch.where(self.unfinished, chosen, self.pad)
        self.ids[:, self.length] = chosen
        self.length += 1
        self.unfinished &= ~self.request.criteria(self.ids[:, : self.length], scores).to(self.unfinished.device)
        return chosen

    def advance(self, tokens: list[int]) -> list[Event]:
        """Note a new token for every sequence, chosen by `choose` or by the decoding step."""
        unfinished = [] if self.plain else self.unfinished.tolist()
        events = []
        for i, (sequence, token) in enumerate(zip(self.sequences, tokens, strict=True)):
            if sequence.finished:
                continue
            sequence.tokens.append(token)
            if self.plain:
                sequence.finished = token in self.stops or len(sequence.tokens) >= self.new_tokens
            else:
                sequence.finished = not unfinished[i]
            events.append(Event(sequence, token))
        return events

    def result(self) -> Tensor:
        """The prompts and what is new, as `generate` returns them."""
        ids = self.request.ids
        longest = max(len(sequence.tokens) for sequence in self.sequences)
        rows = [s.tokens + [self.pad] * (longest - len(s.tokens)) for s in self.sequences]
        return torch.cat([ids, torch.tensor(rows, dtype=ids.dtype, device=ids.device)], dim=1)


def pad_token(config: Any) -> int:
    """What stands after the end of a sequence: as in `generate`, the first token that ends one if nothing is set."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    stops = config.eos_token_id
    return 0 if stops is None else int(stops if isinstance(stops, int) else stops[0])
