"""Distillation from truncated distributions: the divergence of k + 1 outcomes, of which the tail is one."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import kl_div

from t2r.model import logits as sizes
from t2r.model.top_k import SMALLEST, TopK, completed, top_k_of
from t2r.training.steps import objectives
from t2r.training.steps.objectives import distillation_loss

VOCABULARY, TOKENS = 11, 7


def pair(seed, sharp=2.0, dtype=torch.float64):
    """Return logits of a student and of a teacher, and labels of which some are not scored."""
    made = torch.Generator().manual_seed(seed)
    student, teacher = (sharp * torch.randn(TOKENS, VOCABULARY, generator=made, dtype=dtype) for _ in range(2))
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=made)
    labels[::3] = -100
    return student, teacher, labels


def outcomes(log_p, ids):
    """Return log-probabilities [tokens, k + 1]: of these ids, and of all others together. The definition."""
    tail = log_p.exp().scatter(-1, ids, 0.0).sum(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, ids), tail.clamp_min(SMALLEST).log()], -1)


def divergence(log_p, log_q, labels):
    each = kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    return each[labels >= 0].mean()


CASES = given(st.integers(0, 1000), st.integers(1, VOCABULARY), st.sampled_from([0.5, 1.0, 2.0]))


@settings(max_examples=20)
@CASES
def test_the_loss_is_the_divergence_of_the_outcomes(seed, k, temperature):
    student, teacher, labels = pair(seed)
    known = top_k_of(teacher, k, temperature)
    log_p, log_q = ((x / temperature).log_softmax(-1) for x in (teacher, student.requires_grad_()))
    wanted = temperature**2 * divergence(outcomes(log_p, known.ids), outcomes(log_q, known.ids), labels)
    loss, kl, _ = distillation_loss(student, known, labels, temperature=temperature)
    torch.testing.assert_close(loss, wanted, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(kl, wanted.detach(), rtol=1e-9, atol=1e-12)
    ours, defined = (torch.autograd.grad(x, student)[0] for x in (loss, wanted))
    torch.testing.assert_close(ours, defined, rtol=1e-9, atol=1e-12)


@settings(max_examples=20)
@CASES
def test_what_truncation_loses_is_the_divergence_within_the_tail(seed, k, temperature):
    student, teacher, labels = pair(seed)
    known = top_k_of(teacher, k, temperature)
    log_p, log_q = ((x / temperature).log_softmax(-1) for x in (teacher, student))
    whole, _, _ = distillation_loss(student, teacher, labels, temperature=temperature)
    part, _, _ = distillation_loss(student, known, labels, temperature=temperature)
    tails = []
    for x in (log_p, log_q):
        rest = x.scatter(-1, known.ids, -math.inf)
        tails.append((rest - rest.logsumexp(-1, keepdim=True)).nan_to_num(neginf=-1e4))
    gap = known.rest * kl_div(*reversed(tails), log_target=True, reduction="none").sum(-1)
    wanted = temperature**2 * gap[labels >= 0].mean() if k < VOCABULARY else torch.zeros((), dtype=torch.float64)
    torch.testing.assert_close(whole - part, wanted, rtol=1e-9, atol=1e-9)
    assert whole - part >= -1e-12


@pytest.mark.parametrize("head", ["none", "linear", "any"])
def test_the_whole_vocabulary_gives_the_loss_and_gradients_of_the_teacher(head, monkeypatch):
    """For logits, for a linear head in chunks, and for any other head in pieces."""
    monkeypatch.setitem(sizes.AT_ONCE, "cpu", 3 * VOCABULARY)
    student, teacher, labels = pair(1, dtype=torch.float32)
    known = top_k_of(teacher, VOCABULARY)
    assert known.rest.tolist() == [0.0] * TOKENS
    linear = None if head == "none" else nn.Linear(VOCABULARY, VOCABULARY)
    own = Any(linear) if head == "any" else linear
    found = []
    for reference, theirs in ((teacher, None if head != "any" else Any(nn.Identity())), (known, None)):
        x = student.clone().requires_grad_()
        loss, _, task = distillation_loss(x, reference, labels, student_head=own, teacher_head=theirs, task_weight=0.5)
        weights = [] if linear is None else list(linear.parameters())
        found.append([loss.detach(), task, *torch.autograd.grad(loss, [x, *weights])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


class Any(nn.Module):
    """A head that is not known to be linear."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.out_features = inner, VOCABULARY

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("k", [1, 4, VOCABULARY])
def test_half_precision_stays_a_distribution(k):
    """Rounded probabilities do not add up to 1: without normalization the divergence could be negative."""
    _, teacher, labels = pair(2, sharp=6.0, dtype=torch.float32)
    exact = top_k_of(teacher, k)
    stored = TopK(exact.ids.to(torch.int32), exact.log_p.half(), exact.rest)
    whole = completed(stored, teacher.log_softmax(-1))
    torch.testing.assert_close(whole.exp().sum(-1), torch.ones(TOKENS))
    torch.testing.assert_close(whole, teacher.log_softmax(-1), rtol=1e-3, atol=1e-3)
    loss, _, _ = distillation_loss(teacher, stored, labels)
    assert 0 <= loss + 1e-7 < 1e-5


def test_certain_teachers_and_students_have_finite_losses():
    student, teacher, labels = pair(3, sharp=100.0, dtype=torch.float32)
    teacher[:, 3:] = -math.inf  # tokens that a model never gives
    for k in (1, 3, VOCABULARY):
        known = top_k_of(teacher, k)
        stored = TopK(known.ids, known.log_p.half(), known.rest)
        x = student.clone().requires_grad_()
        loss, _, _ = distillation_loss(x, stored, labels)
        loss.backward()
        assert loss.isfinite()
        assert x.grad.isfinite().all()


def test_the_loss_is_compiled_without_a_break(monkeypatch):
    student, teacher, labels = pair(4, dtype=torch.float32)
    known = top_k_of(teacher, 4)
    plain, _, _ = distillation_loss(student, known, labels)
    graphs = []
    backend = lambda graph, _: graphs.append(graph) or graph.forward  # noqa: E731
    monkeypatch.setattr(
        objectives, "fused", lambda function: torch.compile(function, dynamic=False, fullgraph=True, backend=backend)
    )
    for fixed in (False, True):
        loss, _, _ = distillation_loss(student, known, labels, compiled=True, fixed=fixed)
        torch.testing.assert_close(loss, plain)
    assert len(graphs) == 2  # of a whole batch, and of chunks of one size
