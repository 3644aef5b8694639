"""Sequences during generation. Sequences of one call share logits processors, stopping criteria and a seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from t2r.generation.engine.request import Request


@dataclass(eq=False)
class Sequence:
    """One prompt and its generated tokens."""

    index: int
    """Its index in the call."""
    row: int | None = None
    """Its row in the running batch; None while it waits and after it is finished."""
    tokens: list[int] = field(default_factory=list)
    """The generated tokens."""
    finished: bool = False
    state: Any = None
    """With `keep_state`, the cache at the end, which contains all tokens except the last."""


class Event(NamedTuple):
    """A new token of a sequence."""

    sequence: Sequence
    token: int


class Group:
    """The sequences of one call, decoded with the options of the call as in `generate`.

    A group is `plain` if it uses greedy search without logits processors, and stops only at EOS tokens or a maximum
    length. The decoding step then chooses the tokens, and sequences end independently. Otherwise tokens are chosen
    here, with the logits processors and stopping criteria of transformers.
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
        """The maximum number of new tokens of a sequence."""
        return self.max_length - self.request.ids.shape[1]

    def choose(self, logits: Tensor) -> Tensor:
        """Return the next token of every sequence `[sequences]`, from float32 logits."""
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
        """Append a new token, chosen by `choose` or by the decoding step, to every sequence."""
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
        """Return prompts and generated tokens, as `generate` does."""
        ids = self.request.ids
        longest = max(len(sequence.tokens) for sequence in self.sequences)
        rows = [s.tokens + [self.pad] * (longest - len(s.tokens)) for s in self.sequences]
        return torch.cat([ids, torch.tensor(rows, dtype=ids.dtype, device=ids.device)], dim=1)


def pad_token(config: Any) -> int:
    """Return the padding token. As in `generate`, it defaults to the first EOS token."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    stops = config.eos_token_id
    return 0 if stops is None else int(stops if isinstance(stops, int) else stops[0])
