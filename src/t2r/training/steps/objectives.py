"""Training objectives: the error of attention outputs (transfer), KL divergence from a teacher, and cross entropy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from t2r.attention.recurrence import Inputs, Recurrence, exact_attention, recurrent_sites
from t2r.model.logits import LinearHead, logits_at_once, widened
from t2r.model.top_k import TopK, completed


@cache
def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled function, compiled once for all callers."""
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled


SMALL = 1e-4
"""An error of this part of the target is too small to be learned."""


# --- Transfer -----------------------------------------------------------------------------------------------


@contextmanager
def transferring(model: nn.Module, compiled: bool = False, real: Tensor | None = None) -> Iterator[list[Tensor]]:
    """Compute both attentions at every site, and pass softmax attention on. Yields a list that collects the errors.
    `real [rows, time]` says which positions are matched. None: all.

    One model is enough: its other weights are the teacher's as long as only the maps are trained. The model is in
    evaluation mode, as a teacher is, so that the targets have no dropout. The maps are in training mode."""
    errors: list[Tensor] = []
    measure = fused(site_error) if compiled else site_error

    def observe(site: Recurrence, inputs: Inputs, exact: Tensor) -> None:
        if not site.has_map:  # a window alone has nothing to learn
            return
        if compiled:  # for strided bf16 values, torch 2.13 generates vectorized CPU code whose gradient is NaN
            inputs = inputs._replace(v=inputs.v.contiguous())
        errors.append(measure(site, inputs, exact, real))

    training = [module for module in model.modules() if module.training]
    with exact_attention(model, observer=observe):
        try:
            model.eval()
            for site in recurrent_sites(model):
                site.feature_map.train()
            yield errors
        finally:
            model.eval()
            for module in training:
                module.training = True


def site_error(site: Recurrence, inputs: Inputs, exact: Tensor, real: Tensor | None = None) -> Tensor:
    """Return the squared error of the recurrence relative to the squared target, averaged over the rows of the batch.

    Beside a window, it is relative to the error of the window alone. Relative to the target, it would be small from the
    beginning, and what only the state can learn, what lies outside the window, would hardly count.

    The mean over rows does not depend on how a batch is divided. Only positions in the mask `real` count, and only rows
    that have such positions."""
    wide = torch.promote_types(exact.dtype, torch.float32)
    exact = exact.detach().to(wide)
    without = site.imitate_window(inputs)
    rest = exact if without is None else exact - without.detach().to(wide)
    squares = [x.square() for x in (site.imitate(inputs).to(wide) - exact, rest, exact)]
    if real is not None:
        squares = [x.masked_fill(~real[:, None, :, None], 0) for x in squares]
    if without is not None:  # heads count equally: what is left to learn is large in some and nearly nothing in others
        error, size, whole = (x.flatten(2).mean(2) for x in squares)
        rows = (error / (size + SMALL * whole).clamp_min(1e-12)).mean(1)
    else:
        error, size, _ = (x.flatten(1).mean(1) for x in squares)
        rows = error / size.clamp_min(1e-12)
    return rows.mean() if real is None else rows.sum() / real.any(1).sum().clamp_min(1)


# --- Distillation -------------------------------------------------------------------------------------------


FIXED = 4096
"""The largest chunk, in tokens, whose size does not depend on the batch."""
ALIGNED = 8
"""Rows of logits begin at multiples of this many values: 16 bytes in bfloat16."""


def distillation_loss(
    student: Tensor,
    teacher: Tensor | TopK | None,
    labels: Tensor,
    *,
    count: Tensor | int | None = None,
    student_head: Any = None,
    teacher_head: Any = None,
    kl_weight: float = 1.0,
    task_weight: float = 0.0,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
    compiled: bool = False,
    fixed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `kl_weight` KL(teacher || student) + `task_weight` cross entropy, and the two terms for the log.

    Each is a mean over the tokens whose label is not -100, or their sum divided by `count` if they are a part of a
    larger batch. Without a teacher there is only the cross entropy. `label_smoothing` applies to the cross entropy.

    Of a teacher that is given as `TopK`, at the same temperature, the KL divergence is that of k + 1 outcomes: the
    tokens that are not among the k are one. It is never more than that of all tokens, and the same if k is the
    vocabulary.

    With a head, `student` or `teacher` is the input of the head, `[tokens, hidden]`, and logits are computed for a
    chunk of tokens at a time, in the forward and in the backward pass. Without, it is the logits. A head is a linear
    layer, a `LinearHead`, or a callable with `out_features`.

    With `compiled`, the loss of a chunk is compiled. With `fixed`, all chunks have the same size for any number of
    tokens, so that batches of different shapes do not compile it again. The last chunk is padded.
    """
    ours, theirs = LinearHead.of(student_head), LinearHead.of(teacher_head)
    if (student_head is not None and ours is None) or (teacher_head is not None and theirs is None):
        terms = (kl_weight, task_weight, temperature, label_smoothing)
        own, others = student_head or as_they_are, teacher_head or as_they_are
        return in_pieces(student, teacher, labels, count, own, others, *terms)
    heads = (None, None) if ours is None else (ours.weight, ours.bias)
    reference = (None, None) if theirs is None else (theirs.weight.detach(), theirs.bias)
    if ours is not None and ours.scale != 1:
        student = student * ours.scale
    if theirs is not None and theirs.scale != 1 and isinstance(teacher, Tensor):
        teacher = teacher * theirs.scale
    scored = (labels >= 0).sum() if count is None else torch.as_tensor(count, device=labels.device)
    weights = (0.0 if teacher is None else kl_weight, task_weight, temperature, label_smoothing, compiled, fixed)
    # The loss of a batch without any scored token is 0, not 0 / 0.
    return _ChunkedDistillation.apply(student, *heads, teacher, *reference, labels, scored.clamp_min(1), *weights)


def in_pieces(
    student: Tensor,
    teacher: Tensor | TopK | None,
    labels: Tensor,
    count: Tensor | int | None,
    student_head: Any,
    teacher_head: Any,
    kl_weight: float,
    task_weight: float,
    temperature: float,
    label_smoothing: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the distillation loss for heads of any kind (an adaptive softmax, capped logits).

    Each piece is recomputed in the backward pass, so that the logits of only one piece are in memory at a time."""
    vocabulary = getattr(student_head, "out_features", student.shape[-1])
    rows = max(1, logits_at_once(student.device) // vocabulary)

    def piece(ours: Tensor, theirs: Tensor | TopK | None, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = widened(student_head(ours))
        kl = logits.new_zeros(())
        if theirs is not None and kl_weight:
            log_q = (logits / temperature).log_softmax(-1)
            with torch.no_grad():
                reference = theirs if isinstance(theirs, TopK) else teacher_head(theirs)
                log_p = log_probabilities(reference, log_q, temperature)
            per_token = temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1)
            kl = per_token.masked_fill(target < 0, 0).sum()
        if not task_weight:
            return kl, kl.new_zeros(())
        return kl, cross_entropy(logits, target, ignore_index=-100, reduction="sum", label_smoothing=label_smoothing)

    sums = []
    for start in range(0, student.shape[0], rows):
        here = slice(start, start + rows)
        theirs = None if teacher is None else part_of(teacher, here)
        sums.append(torch.stack(checkpoint(piece, student[here], theirs, labels[here], use_reentrant=False)))
    scored = (labels >= 0).sum() if count is None else torch.as_tensor(count, device=labels.device)
    kl, task = torch.stack(sums).sum(0) / scored.clamp_min(1)
    return kl_weight * kl + task_weight * task, kl.detach(), task.detach()


def as_they_are(logits: Tensor) -> Tensor:
    return logits


def part_of(teacher: Tensor | TopK, here: slice, added: int = 0) -> Tensor | TopK:
    """Return some positions of a teacher, and further ones of zeros."""
    if isinstance(teacher, TopK):
        return TopK(*(filled(x, added) for x in teacher.rows(here)))
    return filled(teacher[here], added)


def log_probabilities(reference: Tensor | TopK, log_q: Tensor, temperature: float) -> Tensor:
    """Return the teacher's log-probabilities, from logits, or from the most likely tokens completed by the student."""
    if isinstance(reference, TopK):
        return completed(reference, log_q)
    return (widened(reference) / temperature).log_softmax(-1)


class _ChunkedDistillation(torch.autograd.Function):
    """The gradient is computed in the forward pass, while the logits of a chunk are in memory."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        teacher: Tensor | TopK | None,
        teacher_weight: Tensor | None,
        teacher_bias: Tensor | None,
        labels: Tensor,
        scored: Tensor,
        kl_weight: float,
        task_weight: float,
        temperature: float,
        label_smoothing: float,
        compiled: bool,
        fixed: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = student.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        vocabulary = (student if weight is None else weight).shape[1 if weight is None else 0]
        size = chunk_size(len(student), max(1, logits_at_once(student.device) // vocabulary), fixed)
        loss = loss_and_gradient if weight is None else replace_by_gradient
        terms = fused(loss) if compiled else loss
        wide = torch.promote_types(student.dtype, torch.float32)
        kl_sum = task_sum = student.new_zeros((), dtype=wide)
        d_student = torch.empty_like(student)
        with torch.autocast(device, enabled=False):
            head, reference_head = aligned(weight, bias, compute), aligned(teacher_weight, teacher_bias)
            d_weight, d_bias = (
                torch.zeros_like(x, dtype=wide) if x is not None and needed else None
                for x, needed in zip(head[:2] if head else (None, None), ctx.needs_input_grad[1:3], strict=True)
            )
            for start in range(0, student.shape[0], size):
                here = slice(start, start + size)
                real = len(student[here])
                added = size - real if fixed else 0
                own, target = filled(student[here], added), filled(labels[here], added, -100)
                rows = apply_head(own, head)
                reference = None if teacher is None else part_of(teacher, here, added)
                if isinstance(reference, Tensor):
                    reference = apply_head(reference, reference_head)[:, :vocabulary]
                kl, task, gradient = terms(
                    rows[:, :vocabulary],
                    reference,
                    target,
                    scored,
                    kl_weight,
                    task_weight,
                    temperature,
                    label_smoothing,
                )
                kl_sum, task_sum = kl_sum + kl, task_sum + task
                if head is None:
                    d_student[here] = gradient[:real]
                    continue
                # `rows` has the gradient now. Its further columns are 0, as the rows of the head that they come from.
                d_student[here] = (rows @ head.weight)[:real]
                if d_weight is not None:
                    d_weight += rows.mT @ own.to(head.weight.dtype)
                if d_bias is not None:
                    d_bias += rows.sum(0, dtype=wide)
        d_weight, d_bias = (None if x is None else x[:vocabulary] for x in (d_weight, d_bias))
        ctx.save_for_backward(d_student, d_weight, d_bias)
        kl_mean, task_mean = kl_sum / scored, task_sum / scored
        ctx.mark_non_differentiable(kl_mean, task_mean)
        return kl_weight * kl_mean + task_weight * task_mean, kl_mean, task_mean

    @staticmethod
    def backward(ctx: Any, g: Tensor, *ignored: Tensor) -> tuple[Tensor | None, ...]:
        return *(None if x is None else (g * x).to(x.dtype) for x in ctx.saved_tensors), *(None,) * 11


def chunk_size(tokens: int, most: int, fixed: bool) -> int:
    """Return the number of tokens per chunk, at most `most`.

    Chunks have even sizes. With `fixed`, the size does not depend on the number of tokens: half of what is possible,
    and no more than a small batch has, so that less of the last chunk is padding."""
    if fixed:
        return min(FIXED, 1 << max(0, (most // 2).bit_length() - 1))
    return math.ceil(tokens / max(1, math.ceil(tokens / most))) or 1


def filled(x: Tensor, rows: int, value: int = 0) -> Tensor:
    """Return `x` with this many further rows of one value."""
    return torch.cat([x, x.new_full((rows, *x.shape[1:]), value)]) if rows else x


class AlignedHead(NamedTuple):
    """A linear head with further rows of zeros, so that rows of logits are aligned in memory.

    The matrix products of GPUs need it: with GPT-2's vocabulary of 50,257 they would load and store single values."""

    weight: Tensor
    bias: Tensor | None


def aligned(weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype | None = None) -> AlignedHead | None:
    """Return the head in a dtype; None if there is none."""
    if weight is None:
        return None
    added, dtype = -len(weight) % ALIGNED, dtype or weight.dtype
    return AlignedHead(filled(weight.to(dtype), added), None if bias is None else filled(bias.to(dtype), added))


def apply_head(x: Tensor, head: AlignedHead | None) -> Tensor:
    """Return the logits of hidden states with further columns of zeros, or `x` itself without a head."""
    return x if head is None else linear(x.to(head.weight.dtype), head.weight, head.bias)


def replace_by_gradient(logits: Tensor, *terms: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `loss_and_gradient` does, with the gradient in the memory of the logits, whose rows are aligned."""
    kl, task, gradient = loss_and_gradient(logits, *terms)
    return kl, task, logits.copy_(gradient)


def loss_and_gradient(
    logits: Tensor,
    reference: Tensor | TopK | None,
    labels: Tensor,
    scored: Tensor,
    kl_weight: float,
    task_weight: float,
    temperature: float,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return T^2 KL(reference || logits) at temperature T and the cross entropy, summed over the scored tokens, and the
    gradient of their weighted sum divided by `scored`, with respect to the logits and in their dtype."""
    wide, ignored = widened(logits), labels < 0
    kl = task = wide.new_zeros(())
    gradient = None
    if reference is not None and kl_weight:
        log_q = (wide / temperature).log_softmax(-1)
        log_p = log_probabilities(reference, log_q, temperature)
        p = log_p.exp()
        kl = temperature**2 * (p * (log_p - log_q)).sum(-1).masked_fill(ignored, 0).sum()
        gradient = log_q.exp_().sub_(p).mul_(kl_weight * temperature)
    if task_weight:
        log_q = wide.log_softmax(-1)
        target = labels.clamp_min(0)[:, None]
        log_label = log_q.gather(1, target)[:, 0]
        if label_smoothing:
            log_label = (1 - label_smoothing) * log_label + label_smoothing * log_q.mean(-1)
        task = -log_label.masked_fill(ignored, 0).sum()
        part = log_q.exp_()
        if label_smoothing:
            part.sub_(label_smoothing / part.shape[-1])
        taken = torch.full_like(target, label_smoothing - 1.0, dtype=wide.dtype)
        part = part.scatter_add_(1, target, taken).mul_(task_weight)
        gradient = part if gradient is None else gradient.add_(part)
    if gradient is None:
        return kl, task, torch.zeros_like(logits)
    return kl, task, (gradient.masked_fill_(ignored[:, None], 0) / scored).to(logits.dtype)
