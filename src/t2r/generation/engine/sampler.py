"""Sampling on the device: the next tokens of all rows that are not greedy, chosen after the decoding step.

What the processors of transformers compute for one call is computed here for rows with different options at once, in
the same operations, and without waiting for the device. Random numbers are those of `generate` with the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as List

import torch
from torch import Tensor

from t2r.generation.engine.sequences import Group
from t2r.generation.engine.step import DecodeStep


class Sampler:
    """Chooses the tokens of the rows that are not greedy, with tensors that have an entry for each of these rows."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.place: list[int] = []

    @torch.inference_mode(False)  # tensors of inference mode cannot be changed outside it
    @torch.no_grad()
    def use(self, groups: List[Group], logits: Tensor) -> None:
        """Choose for the rows of these groups from now on. Does nothing if these are the rows of the last call."""
        place = [sequence.row for group in groups for sequence in group.sequences if sequence.row is not None]
        if place == self.place and groups == self.groups:
            return
        choices = [group.choice for group in groups if group.choice is not None for _ in group.sequences]
        self.groups, self.place = list(groups), place
        size, device = logits.shape[1], logits.device

        def column(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor([[getattr(choice, name)] for choice in choices], dtype=dtype, device=device)

        self.rows = torch.tensor(place, device=device)
        self.penalty, self.temperature, self.min_p = map(column, ("penalty", "temperature", "min_p"))
        self.samples = column("sample", torch.bool)
        top_k = [min(choice.top_k or size, size) for choice in choices]
        self.most = max((k for k in top_k if k < size), default=0)
        """The largest number of tokens among which a row chooses, if it is limited."""
        self.top_k = torch.tensor(top_k, device=device)[:, None]
        # A comparison with a number rounds it to float32, so 1 - p is computed before it is rounded.
        top_p = [1 - choice.top_p if choice.top_p < 1 else -1.0 for choice in choices]
        self.below = torch.tensor(top_p, dtype=torch.float32, device=device)[:, None]
        self.by_p, self.by_min_p = max(top_p) >= 0, any(choice.min_p > 0 for choice in choices)
        self.noise = torch.ones(len(place), size, device=device)
        self.seen: Tensor | None = None
        if any(choice.penalty != 1 for choice in choices):
            self.seen = torch.cat([seen_by(group, size) for group in groups])
            starts = [0]
            for group in groups:
                starts.append(starts[-1] + len(group.sequences))
                group.seen = self.seen[starts[-2] : starts[-1]]

    def choose(self, step: DecodeStep) -> None:
        """Write the next tokens of these rows to the step, without synchronizing with the device."""
        scores = step.logits[self.rows]
        if self.seen is not None:
            penalized = torch.where(scores < 0, scores * self.penalty, scores / self.penalty)
            scores = torch.where(self.seen, penalized, scores)
        scores = scores / self.temperature
        if self.most:
            best = scores.topk(self.most).values
            least = best.gather(1, self.top_k.clamp_max(self.most) - 1)
            scores = scores.masked_fill((scores < least) & (self.top_k <= self.most), -math.inf)
        if self.by_p:
            ordered, order = scores.sort(descending=False)
            removed = ordered.softmax(-1).cumsum(-1) <= self.below
            removed[:, -1] = False
            scores = scores.masked_fill(removed.scatter(1, order, removed), -math.inf)
        if self.by_min_p:
            likely = scores.softmax(-1)
            scores = scores.masked_fill(likely < self.min_p * likely.amax(-1, keepdim=True), -math.inf)
        start = 0
        for group in self.groups:  # each with its own seed, so what a group draws does not depend on others
            end = start + len(group.sequences)
            if group.choice is not None and group.choice.sample:
                self.noise[start:end].exponential_(1, generator=group.generator)
            start = end
        # The race of `torch.multinomial`, which draws the same numbers but waits for the device to check its input.
        race = scores.softmax(-1) / self.noise
        chosen = torch.where(self.samples, race, scores).argmax(-1, keepdim=True)
        step.tokens[self.rows] = chosen
        if self.seen is not None:
            self.seen.scatter_(1, chosen, True)


def seen_by(group: Group, size: int) -> Tensor:
    """Return which tokens each sequence of a group has read."""
    if group.seen is not None:
        return group.seen
    ids = group.request.ids
    seen = torch.zeros(ids.shape[0], size, dtype=torch.bool, device=ids.device)
    if group.choice is not None and group.choice.penalty != 1:
        seen.scatter_(1, ids, True)
        own = [sequence.tokens or [group.pad] for sequence in group.sequences]
        width = max(map(len, own))
        seen.scatter_(1, torch.tensor([x + x[-1:] * (width - len(x)) for x in own], device=ids.device), True)
    return seen
