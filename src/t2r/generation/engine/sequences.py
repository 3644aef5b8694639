"""Sequences during generation. Sequences of one call share logits processors, stopping criteria and a seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import (
    EosTokenCriteria,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MaxLengthCriteria,
    NoBadWordsLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from t2r.generation.engine.request import Request, token_list


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
    error: Exception | None = None
    """The error that ended the sequence, for example one of its logits processors."""


class Event(NamedTuple):
    """A new token of a sequence."""

    sequence: Sequence
    token: int


class Group:
    """The sequences of one call, decoded with the options of the call as in `generate`.

    A group is `plain` if it uses greedy search, with logits processors that do not depend on the generated tokens
    (forbidden tokens, a forced first or last token), and stops only at EOS tokens or a maximum length. The decoding
    step then chooses the tokens, and sequences end independently. Otherwise tokens are chosen here, with the logits
    processors and stopping criteria of transformers.
    """

    def __init__(self, request: Request, state: Any, generator: torch.Generator | None, keep_state: bool) -> None:
        self.request, self.state, self.generator, self.keep_state = request, state, generator, keep_state
        config, ids = request.config, request.ids
        self.submitted = False
        """Whether `step` returns the new tokens. Those of other groups are returned by the call that made the group."""
        self.sequences = [Sequence(i) for i in range(ids.shape[0])]
        eos = [c.eos_token_id.tolist() for c in request.criteria if isinstance(c, EosTokenCriteria)]
        self.stops = {token for tokens in eos for token in tokens}
        self.max_length = request.max_length
        self.new_tokens = self.max_length - ids.shape[1]
        """The maximum number of new tokens of a sequence."""
        simple = all(type(c) in (EosTokenCriteria, MaxLengthCriteria) for c in request.criteria)
        constant = all(is_constant(processor, self.max_length) for processor in request.processors)
        self.plain = simple and not config.do_sample and constant
        self.forbidden = forbidden_tokens(request) if self.plain else frozenset()
        """Tokens that the decoding step must not choose, if the group is plain."""
        last = [p for p in request.processors if type(p) is ForcedEOSTokenLogitsProcessor]
        self.forced_last: int | None = min(last[-1].eos_token_id.tolist()) if last else None
        self.pad = pad_token(config)
        if not self.plain:
            self.ids = torch.cat([ids, ids.new_full((ids.shape[0], self.max_length - ids.shape[1]), self.pad)], dim=1)
            self.length = ids.shape[1]
            self.unfinished = torch.ones(ids.shape[0], dtype=torch.bool, device=ids.device)

    @property
    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.finished]

    def fail(self, error: Exception) -> None:
        """End the sequences that are not finished with an error."""
        for sequence in self.running:
            sequence.finished, sequence.error = True, error

    def choose(self, logits: Tensor) -> Tensor:
        """Return the next token of every sequence `[sequences]`, from float32 logits. For a plain group, the first."""
        processors: Any = self.request.processors
        if self.plain:
            return processors(self.request.ids, logits).argmax(-1)
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

    def advance(self, tokens: list[list[int]]) -> list[Event]:
        """Append new tokens, chosen by `choose` or by the decoding step, to every sequence that is not finished.

        `tokens` has a list for each sequence. It may go on after the end of a sequence in a plain group."""
        going_on = [] if self.plain else self.unfinished.tolist()
        if not self.stops:  # without EOS tokens, `generate` ends all sequences together
            going_on = [any(going_on)] * len(going_on)
        events = []
        for i, (sequence, new) in enumerate(zip(self.sequences, tokens, strict=True)):
            if sequence.finished:
                continue
            if self.plain:
                new = new[: self.new_tokens - len(sequence.tokens)]
                new = new[: next((n for n, token in enumerate(new, 1) if token in self.stops), None)]
            sequence.tokens += new
            at_end = len(sequence.tokens) == self.new_tokens
            if self.plain and at_end and self.forced_last is not None:
                sequence.tokens[-1] = self.forced_last
            last = sequence.tokens[-1]
            sequence.finished = at_end or last in self.stops if self.plain else not going_on[i]
            events += [Event(sequence, token) for token in sequence.tokens[-len(new) :]]
        return events

    def result(self) -> Tensor:
        """Return prompts and generated tokens, as `generate` does."""
        ids = self.request.ids
        longest = max(len(sequence.tokens) for sequence in self.sequences)
        rows = [s.tokens + [self.pad] * (longest - len(s.tokens)) for s in self.sequences]
        return torch.cat([ids, torch.tensor(rows, dtype=ids.dtype, device=ids.device)], dim=1)


def is_constant(processor: LogitsProcessor, max_length: int) -> bool:
    """Return whether a processor does the same for all tokens, except the first, and the last of `max_length`."""
    if type(processor) is NoBadWordsLogitsProcessor:
        return all(len(word) == 1 for word in processor.sequence_bias)
    if type(processor) is ForcedEOSTokenLogitsProcessor:
        return bool(processor.max_length == max_length)
    return type(processor) in (SuppressTokensLogitsProcessor, ForcedBOSTokenLogitsProcessor)


def forbidden_tokens(request: Request) -> frozenset[int]:
    """Return the tokens that constant processors forbid at every position."""
    found: set[int] = set()
    for processor in request.processors:
        if type(processor) is NoBadWordsLogitsProcessor:  # an EOS token that it knows is not a bad word
            found |= {word[0] for word in processor.sequence_bias}
        elif type(processor) is SuppressTokensLogitsProcessor:
            found |= set(processor.suppress_tokens.tolist())
    return frozenset(found)


def pad_token(config: Any) -> int:
    """Return the padding token. As in `generate`, it defaults to the first EOS token."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    return next(iter(token_list(config.eos_token_id)), 0)
