"""Sequences during generation. Sequences of one call share logits processors, stopping criteria and a seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers.generation import EosTokenCriteria, ForcedEOSTokenLogitsProcessor, MaxLengthCriteria

from t2r.generation.engine.choice import BIASES, Choice
from t2r.generation.engine.request import Request, token_list

Reason = Literal["stop", "length", "cancelled", "error"]


class LogProbability(NamedTuple):
    """How likely a chosen token was, with the biases of the call, but before temperature, penalties and filters."""

    chosen: float
    top: list[tuple[int, float]]
    """The most likely tokens, in their order, as many as were asked for."""


@dataclass(eq=False)
class Sequence:
    """One prompt and its generated tokens."""

    index: int
    """Its index in the call."""
    row: int | None = None
    """Its row in the decoding step; None while it waits and after it is finished."""
    tokens: list[int] = field(default_factory=list)
    """The generated tokens."""
    reason: Reason | None = None
    """Why it has ended: `stop` (an EOS token or a stopping criterion), `length`, `cancelled` or `error`."""
    state: Any = None
    """With `keep_state`, the cache at the end, which contains all tokens except the last."""
    logprobs: list[LogProbability] = field(default_factory=list)
    """With `logprobs`, one entry for each of `tokens`."""
    error: Exception | None = None
    """The error that ended the sequence, for example one of its logits processors."""

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.reason is not None


class NewToken(NamedTuple):
    sequence: Sequence
    token: int


class Event(NewToken):
    """A new token of a sequence. The last event of a sequence has a reason.

    A sequence that is cancelled, or fails, ends with an event whose token is None."""

    reason: Reason | None = None
    """Why the sequence has ended with this event; None if it goes on."""

    @classmethod
    def last(cls, sequence: Sequence, token: Any = None) -> Event:
        """Return the event with which a sequence has ended."""
        event = cls(sequence, token)
        event.reason = sequence.reason
        return event


class Group:
    """The sequences of one call, decoded with the options of the call as in `generate`.

    If the options have the form of a `Choice`, and the sequences stop only at EOS tokens or a maximum length, the
    tokens are chosen on the device for all groups together. Otherwise they are chosen here, with the logits processors
    and stopping criteria of transformers.
    """

    def __init__(
        self,
        request: Request,
        state: Any,
        generator: torch.Generator | None,
        keep_state: bool,
        logprobs: int | None = None,
    ) -> None:
        self.request, self.state, self.generator, self.keep_state = request, state, generator, keep_state
        self.logprobs = logprobs
        """How many of the most likely tokens are returned with each token. None: no probabilities."""
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
        self.choice = Choice.of(request, self.max_length) if simple else None
        """How tokens are chosen on the device; None if they are chosen here."""
        self.ends_together = self.choice is None or not self.choice.greedy
        """Whether rows are kept until all sequences have ended: their tokens are chosen, or drawn, together."""
        last = [p for p in request.processors if type(p) is ForcedEOSTokenLogitsProcessor]
        self.forced_last: int | None = min(last[-1].eos_token_id.tolist()) if last else None
        self.pad = pad_token(config)
        self.seen: Tensor | None = None
        """With a repetition penalty, the tokens that each sequence has read `[sequences, vocabulary]`."""
        if self.choice is None:
            self.ids = torch.cat([ids, ids.new_full((ids.shape[0], self.max_length - ids.shape[1]), self.pad)], dim=1)
            self.length = ids.shape[1]
            self.unfinished = torch.ones(ids.shape[0], dtype=torch.bool, device=ids.device)

    @property
    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.finished]

    def end(self, reason: Reason, error: Exception | None = None) -> list[Event]:
        """End the sequences that are not finished."""
        ended = self.running
        for sequence in ended:
            sequence.reason, sequence.error = reason, error
        return [Event.last(sequence) for sequence in ended]

    def first(self, logits: Tensor) -> Tensor:
        """Return the first token of every sequence `[sequences]`, from float32 logits."""
        if self.choice is None:
            return self.choose(logits)
        processors: Any = self.request.processors
        return self.drawn(processors(self.request.ids, logits))

    def choose(self, logits: Tensor) -> Tensor:
        """Return the next token of every sequence `[sequences]`, with the processors and criteria of transformers."""
        processors: Any = self.request.processors
        scores = processors(self.ids[:, : self.length], logits)
        chosen = self.drawn(scores)
        if self.stops:
            chosen = torch.where(self.unfinished, chosen, self.pad)
        self.ids[:, self.length] = chosen
        self.length += 1
        self.unfinished &= ~self.request.criteria(self.ids[:, : self.length], scores).to(self.unfinished.device)
        return self.ids[:, self.length - 1].clone()  # a criterion may change it in place

    def drawn(self, scores: Tensor) -> Tensor:
        if not self.request.config.do_sample:
            return scores.argmax(-1)
        return torch.multinomial(scores.softmax(-1), num_samples=1, generator=self.generator).squeeze(1)

    def advance(self, tokens: list[list[int]]) -> list[Event]:
        """Append new tokens to every sequence that is not finished.

        `tokens` has a list for each sequence. It may go on after the end of a sequence if there is a `choice`."""
        going_on = [] if self.choice is not None else self.unfinished.tolist()
        if not self.stops:  # without EOS tokens, `generate` ends all sequences together
            going_on = [any(going_on)] * len(going_on)
        events: list[Event] = []
        for i, (sequence, new) in enumerate(zip(self.sequences, tokens, strict=True)):
            if sequence.finished:
                continue
            if self.choice is not None:
                new = new[: self.new_tokens - len(sequence.tokens)]
                new = new[: next((n for n, token in enumerate(new, 1) if token in self.stops), None)]
            if not new:
                continue
            sequence.tokens += new
            at_end = len(sequence.tokens) == self.new_tokens
            stopped = sequence.tokens[-1] in self.stops
            ended = stopped or at_end if self.choice is not None else not going_on[i]
            if self.choice is not None and at_end and self.forced_last is not None:
                sequence.tokens[-1] = self.forced_last
            if ended:
                sequence.reason = "length" if at_end and not stopped else "stop"
            made = [Event(sequence, token) for token in sequence.tokens[-len(new) :]]
            if sequence.finished:
                made[-1].reason = sequence.reason
            events += made
        return events

    @property
    def one_at_a_time(self) -> bool:
        """Whether something must be read from the device after every step."""
        return self.choice is None or self.keep_state or self.logprobs is not None

    def biased(self, logits: Tensor) -> Tensor:
        """Return logits of the model, one row for each sequence, with the biases of the call."""
        ids = self.request.ids if self.choice is not None else self.ids[:, : self.length]
        for processor in self.request.processors:
            if type(processor) in BIASES:
                logits = processor(ids, logits)
        return logits

    def note(self, events: list[Event], logits: Tensor) -> None:
        """Store the probabilities of new tokens. `logits` has a row for each sequence of the group."""
        if self.logprobs is None or not events:
            return
        logprobs = logits[[event.sequence.index for event in events]].log_softmax(-1)
        tokens = torch.tensor([[event.token] for event in events], device=logits.device)
        top = logprobs.topk(min(self.logprobs, logprobs.shape[1]))
        chosen = logprobs.gather(1, tokens)[:, 0].tolist()
        pairs = zip(events, chosen, top.indices.tolist(), top.values.tolist(), strict=True)
        for event, own, indices, values in pairs:
            event.sequence.logprobs.append(LogProbability(own, list(zip(indices, values, strict=True))))

    def result(self) -> Tensor:
        """Return prompts and generated tokens, as `generate` does. Processors may have changed any of them in place."""
        if self.choice is None:
            return self.ids[:, : self.length]
        ids = self.request.ids
        longest = max(len(sequence.tokens) for sequence in self.sequences)
        rows = [s.tokens + [self.pad] * (longest - len(s.tokens)) for s in self.sequences]
        return torch.cat([ids, torch.tensor(rows, dtype=ids.dtype, device=ids.device)], dim=1)


def pad_token(config: Any) -> int:
    """Return the padding token. As in `generate`, it defaults to the first EOS token."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    return next(iter(token_list(config.eos_token_id)), 0)
