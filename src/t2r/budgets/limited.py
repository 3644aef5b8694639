"""A model whose heads can be limited to windows, and what that changes: its divergence from the model itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from t2r.attention.recurrence import Recurrence, exact_attention
from t2r.budgets.costs import SINKS, Costs
from t2r.budgets.text import Batch, Text
from t2r.model.logits import Readout, evaluating, logits_at_once, widened
from t2r.model.swap import swap
from t2r.plans import MemoryPlan

AT_ONCE = 32768
"""Tokens of a batch that is measured without gradients."""


class Limited:
    """A copy of a model, in bfloat16 on a GPU, each of whose heads can be limited to a window."""

    def __init__(self, model: PreTrainedModel, costs: Costs, text: Tensor | Text) -> None:
        self.costs = costs
        own = copy.deepcopy(model).eval().requires_grad_(False)
        if model.device.type == "cuda":
            own = own.bfloat16()
        whole = tuple((layer.longest,) * layer.heads for layer in costs.layers)
        self.model = swap(own, plan=MemoryPlan(whole, SINKS, tuple((False,) * len(row) for row in whole)))
        self.sites: list[Recurrence] = sorted(
            (m for m in self.model.modules() if isinstance(m, Recurrence) and m.window is not None),
            key=lambda site: site.layer_idx,
        )
        self.readout = Readout(self.model, Text.of(text).batches_of([0])[0].to(self.model.device).inputs)

    @contextmanager
    def within(self, windows: Sequence[Tensor]) -> Iterator[None]:
        """Limit the heads of each layer to numbers of tokens. Floating-point numbers have soft edges."""
        before = [site.window_sizes for site in self.sites]
        try:
            for site, sizes in zip(self.sites, windows, strict=True):
                site.window_sizes = sizes.to(site.window_sizes.device)
            yield
        finally:
            for site, sizes in zip(self.sites, before, strict=True):
                site.window_sizes = sizes

    @torch.no_grad()
    def expected(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the states of the model itself."""
        with evaluating(self.model), exact_attention(self.model):
            return self.readout.states(inputs)

    # --- With gradients -------------------------------------------------------------------------------------

    def worth(
        self, text: Tensor | Batch, windows: Sequence[Tensor], where: Tensor | None = None
    ) -> tuple[float, list[Tensor]]:
        """Return the divergence per token with soft windows, and how much it falls with one more token in each.

        Args:
            text: a batch, or token ids `[rows, tokens]`.
            where: which of these tokens count. None: all.
        """
        batch = Batch.of(text, where).to(self.model.device)
        # One tensor on the device: the gradient of each layer's own would be waited for, in the middle of the others.
        sizes = torch.cat([*windows]).detach().float().to(self.model.device).requires_grad_()
        heads = [len(row) for row in windows]
        theirs = counted(self.expected(batch.inputs), batch)
        with torch.enable_grad():
            with self.within(sizes.split(heads)):
                ours = counted(self.readout.states(batch.inputs), batch)
            rows = max(1, logits_at_once(ours.device) // self.readout.out_features)
            parts, slopes = [], []
            for own, expected in zip(ours.detach().split(rows), theirs.split(rows), strict=True):
                part = self.divergence_sum(own.requires_grad_(), expected) / len(ours)
                slopes += torch.autograd.grad(part, own)  # at once: logits are neither kept nor computed again
                parts.append(part.detach())
            (gradient,) = torch.autograd.grad(ours, sizes, torch.cat(slopes))
        return float(torch.stack(parts).sum()), list(gradient.neg().cpu().split(heads))

    def divergence_sum(self, ours: Tensor, theirs: Tensor) -> Tensor:
        found, expected = (widened(self.readout(x)).log_softmax(-1) for x in (ours, theirs))
        return (expected.exp() * (expected - found)).sum(dtype=torch.float32)

    # --- Without ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def divergence(self, text: Tensor | Text, windows: Sequence[Sequence[int]]) -> float:
        """Return the mean divergence per token with these windows, on a text, or on token ids `[blocks, tokens]`.

        The rounding of the attention to windows itself is measured too, with the longest windows, and subtracted: in
        bfloat16 it is as large as the effect of a large window."""
        whole = [(layer.longest,) * layer.heads for layer in self.costs.layers]
        found, tokens = torch.zeros(2, dtype=torch.float64), 0
        for batch in Text.of(text).batches(AT_ONCE):
            batch = batch.to(self.model.device)
            theirs = counted(self.expected(batch.inputs), batch)
            tokens += len(theirs)
            for i, chosen in enumerate((windows, whole)):
                with evaluating(self.model), self.within([torch.tensor(sizes) for sizes in chosen]):
                    ours = counted(self.readout.states(batch.inputs), batch)
                rows = max(1, logits_at_once(ours.device) // self.readout.out_features)
                for pair in zip(ours.split(rows), theirs.split(rows), strict=True):
                    found[i] += float(self.divergence_sum(*pair))
        limited, rounding = (found / tokens).tolist()
        return max(0.0, limited - rounding)

    @torch.no_grad()
    def right(self, ids: Tensor, choices: Tensor, windows: Sequence[Sequence[int]] | None = None) -> float:
        """Return the share of questions that are answered rightly, with these windows or without any limit.

        Args:
            choices: the first tokens of the choices `[questions, choices]`, the right one first.
        """
        good = 0
        pairs = zip(
            *(x.to(self.model.device).split(max(1, AT_ONCE // ids.shape[1])) for x in (ids, choices)), strict=True
        )
        for rows, firsts in pairs:
            if windows is None:
                states = self.expected({"input_ids": rows})
            else:
                with evaluating(self.model), self.within([torch.tensor(sizes) for sizes in windows]):
                    states = self.readout.states({"input_ids": rows})
            logits = self.readout(states[:, -1:])[:, 0]
            good += int((logits.gather(1, firsts).argmax(1) == 0).sum())
        return good / len(ids)


def counted(states: Tensor, batch: Batch) -> Tensor:
    """Return the states of the positions that count, `[positions, size]`."""
    return states.flatten(0, 1) if batch.where is None else states[batch.where]
