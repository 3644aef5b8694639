"""Objectives compared with plain autograd, and stages on tiny models."""

import copy
import itertools
import math
import types

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy, kl_div
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import t2r
from families import FAMILIES, VOCABULARY, tiny
from t2r.attention.recurrence import exact_attention, recurrent_sites
from t2r.attention.softmax import softmax_attention
from t2r.errors import T2RError
from t2r.model.logits import AT_ONCE, LinearHead
from t2r.tasks import LanguageModeling, language_modeling
from t2r.tasks.base import exchanged
from t2r.training.loop import deadline
from t2r.training.loop import trainer as trainers
from t2r.training.loop.checkpoints import last_checkpoint, seal
from t2r.training.loop.trainer import StageTrainer, batch_shape
from t2r.training.planning import budget, timing
from t2r.training.planning.timing import Cost
from t2r.training.recipes.recipe import Stage
from t2r.training.sessions import run_stage as running
from t2r.training.sessions.run import Run, load_weights, save_weights
from t2r.training.sessions.run_stage import run_stage
from t2r.training.sessions.sensitivity import most_sensitive
from t2r.training.steps import learner, objectives
from t2r.training.steps.job import Job, Settings
from t2r.training.steps.objectives import (
    distillation_loss,
    in_pieces,
    loss_and_gradient,
    replace_by_gradient,
    transferring,
)
from t2r.training.steps.optimizers import choose_trained, make_optimizer

LENGTH = 16


class Rows(torch.utils.data.Dataset):
    """Random tokens. The first `prompts` labels of each block are not scored."""

    def __init__(self, count=8, prompts=lambda index: 0, documents=False):
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(3, VOCABULARY, (count, LENGTH), generator=generator)
        self.prompts, self.documents = prompts, documents

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        labels = self.ids[index].clone()
        labels[: self.prompts(index)] = -100
        item = {"input_ids": self.ids[index], "labels": labels}
        if self.documents:
            item["position_ids"] = torch.arange(LENGTH) % 7
        return item


class OfRows(LanguageModeling):
    """Language modeling on given rows."""

    def __init__(self, rows):
        super().__init__(None, [])
        self.rows = rows

    def dataset(self, block_size):
        return self.rows


def stage(objective="task", **fields):
    budget = {} if {"minutes", "epochs", "tokens"} & set(fields) else {"steps": 4}
    defaults = {"train": "maps" if objective == "transfer" else "all", "block_size": LENGTH, "batch_tokens": 4 * LENGTH}
    more = {"learning_rate": 1e-2, "schedule": "constant"}
    return Stage("only", objective, **(budget | defaults | more | fields))


def pair(model_type="gpt2", dtype=torch.float32, layers=None, **options):
    """A swapped model and its teacher."""
    base = tiny(model_type, dtype, layers=layers)
    options = {"feature_map": "hedgehog", "seed": 3} | options
    return t2r.swap(copy.deepcopy(base), **options), base.requires_grad_(False)


def train(tmp_path, model, what, teacher=None, rows=None, **options):
    run = Run(tmp_path / "run", {})
    settings = Settings(**{"progress": False} | options)
    model = run_stage(run, Job(OfRows(rows or Rows()), teacher, settings), model, what)
    return model, [entry["loss"] for entry in run.facts["only.log"]]


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def changed(before, model):
    return {name for name, p in model.named_parameters() if not torch.equal(before[name], p)}


# --- Distillation ---------------------------------------------------------------------------------------------


def plain(student, teacher, labels, head, teacher_head, kl_weight, task_weight, temperature):
    ours = student if head is None else head(student)
    theirs = teacher if teacher_head is None else teacher_head(teacher)
    keep = labels >= 0
    kl = kl_div(
        (ours / temperature).log_softmax(-1)[keep],
        (theirs / temperature).log_softmax(-1)[keep],
        reduction="sum",
        log_target=True,
    )
    kl = temperature**2 * kl / keep.sum()
    return kl_weight * kl + task_weight * cross_entropy(ours, labels, ignore_index=-100)


@pytest.mark.parametrize("form", ["bias", "no bias", "logits"])
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize(("kl", "task", "temperature"), [(1.0, 0.0, 1.0), (0.0, 1.0, 1.0), (0.7, 0.3, 2.0)])
def test_distillation_loss_matches_kl_and_cross_entropy(monkeypatch, form, chunk, kl, task, temperature):
    tokens, hidden, vocabulary = 11, 6, 13
    monkeypatch.setitem(AT_ONCE, "cpu", chunk * vocabulary)
    torch.manual_seed(0)
    size = vocabulary if form == "logits" else hidden
    student = torch.randn(tokens, size, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(tokens, size, dtype=torch.float64)
    labels = torch.randint(vocabulary, (tokens,))
    labels[[0, 4, 5]] = -100
    heads = [None, None]
    if form != "logits":
        heads = [nn.Linear(hidden, vocabulary, bias=form == "bias", dtype=torch.float64) for _ in "st"]
    inputs = [student] + ([] if form == "logits" else list(heads[0].parameters()))

    expected = plain(student, teacher, labels, *heads, kl, task, temperature)
    wanted = torch.autograd.grad(3 * expected, inputs)
    weights = {"kl_weight": kl, "task_weight": task, "temperature": temperature}
    loss, *terms = distillation_loss(student, teacher, labels, student_head=heads[0], teacher_head=heads[1], **weights)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(torch.autograd.grad(3 * loss, inputs), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(kl * terms[0] + task * terms[1], expected.detach(), rtol=1e-10, atol=1e-12)
    # A part of a larger batch.
    part, *_ = distillation_loss(
        student, teacher, labels, count=16, student_head=heads[0], teacher_head=heads[1], **weights
    )
    torch.testing.assert_close(part, expected * 8 / 16)


@pytest.mark.parametrize("bias", [False, True])
def test_a_bias_and_a_scale_after_the_head_are_those_of_any_head(monkeypatch, bias):
    """Marian adds a constant to its logits, and Granite scales them: their losses are computed as for linear layers."""
    tokens, hidden, vocabulary = 11, 6, 13
    monkeypatch.setitem(AT_ONCE, "cpu", 6 * vocabulary)
    torch.manual_seed(0)
    layers = [nn.Linear(hidden, vocabulary, bias=bias, dtype=torch.float64) for _ in "st"]
    added = torch.randn(2, vocabulary, dtype=torch.float64)
    heads = [LinearHead.of(x).plus(y).divided(1.7) for x, y in zip(layers, added, strict=True)]
    plain = [lambda s, x=x, y=y: (x(s) + y) / 1.7 for x, y in zip(layers, added, strict=True)]
    for head in plain:
        head.out_features = vocabulary
    student = torch.randn(tokens, hidden, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(tokens, hidden, dtype=torch.float64)
    labels = torch.randint(vocabulary, (tokens,))
    labels[3] = -100
    inputs = [student, *layers[0].parameters()]
    terms = {"kl_weight": 0.7, "task_weight": 0.3, "temperature": 1.5, "label_smoothing": 0.1}
    expected, *_ = in_pieces(student, teacher, labels, None, *plain, *terms.values())
    wanted = torch.autograd.grad(expected, inputs)
    monkeypatch.setattr(objectives, "in_pieces", None)
    seen = set()
    monkeypatch.setattr(
        objectives, "loss_and_gradient", lambda x, *rest: seen.add(len(x)) or loss_and_gradient(x, *rest)
    )
    for fixed, sizes in ((False, {6, 5}), (True, {2})):
        seen.clear()
        how = {"student_head": heads[0], "teacher_head": heads[1], "fixed": fixed, **terms}
        loss, *_ = distillation_loss(student, teacher, labels, **how)
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
        for ours, theirs in zip(torch.autograd.grad(loss, inputs, retain_graph=True), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
        assert seen == sizes


def test_rows_of_logits_and_of_their_gradients_are_aligned(monkeypatch):
    """Matrix products on a GPU are slow otherwise."""
    seen = []

    def observed(logits, reference, *rest):
        *terms, gradient = replace_by_gradient(logits, reference, *rest)
        seen.extend([logits, reference, gradient])
        return *terms, gradient

    monkeypatch.setattr(objectives, "replace_by_gradient", observed)
    heads = [nn.Linear(6, 50257, dtype=torch.bfloat16) for _ in range(2)]
    states = torch.randn(2, 5, 6, dtype=torch.bfloat16)
    distillation_loss(*states, torch.arange(5), student_head=heads[0], teacher_head=heads[1])
    assert [x.shape for x in seen] == 3 * [(5, 50257)]
    assert all(x.stride() == (50264, 1) and x.data_ptr() % 16 == 0 for x in seen)


def test_a_loss_in_chunks_of_one_size_is_compiled_once(monkeypatch):
    monkeypatch.setitem(AT_ONCE, "cpu", 8 * 13)
    graphs, head = [], nn.Linear(6, 13)
    backend = lambda graph, _: graphs.append(graph) or graph.forward  # noqa: E731
    compiled = torch.compile(replace_by_gradient, dynamic=False, backend=backend)
    monkeypatch.setattr(objectives, "fused", lambda function: compiled)
    for tokens in (3, 11, 12):
        student, labels = torch.randn(tokens, 6), torch.arange(tokens)
        loss, *_ = distillation_loss(
            student, None, labels, student_head=head, task_weight=1.0, compiled=True, fixed=True
        )
        torch.testing.assert_close(loss, cross_entropy(head(student), labels))
    assert len(graphs) == 1


@pytest.mark.parametrize("head", [None, "linear", "any"])
@pytest.mark.parametrize("kl", [0.0, 0.5])
def test_label_smoothing_is_that_of_torch(monkeypatch, head, kl):
    tokens, vocabulary = 7, 13
    monkeypatch.setitem(AT_ONCE, "cpu", 3 * vocabulary)
    torch.manual_seed(0)
    student = torch.randn(tokens, vocabulary, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(tokens, vocabulary, dtype=torch.float64)
    labels = torch.randint(vocabulary, (tokens,))
    labels[2] = -100
    identity = nn.Linear(vocabulary, vocabulary, bias=False, dtype=torch.float64)
    identity.weight.data = torch.eye(vocabulary, dtype=torch.float64)
    if head == "any":
        identity = nn.Sequential(identity)
        identity.out_features = vocabulary
    expected = cross_entropy(student, labels, ignore_index=-100, label_smoothing=0.1)
    expected = expected + kl * plain(student, teacher, labels, None, None, 1.0, 0.0, 1.0)
    (wanted,) = torch.autograd.grad(expected, student)
    heads = {} if head is None else {"student_head": identity, "teacher_head": identity}
    weights = {"kl_weight": kl, "task_weight": 1.0, "label_smoothing": 0.1}
    loss, *_ = distillation_loss(student, teacher, labels, **heads, **weights)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    (found,) = torch.autograd.grad(loss, student)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_the_loss_of_no_tokens_is_zero():
    student = torch.randn(0, 7, requires_grad=True)
    loss, *_ = distillation_loss(student, torch.randn(0, 7), torch.zeros(0, dtype=torch.long), task_weight=1.0)
    assert loss == 0
    loss.backward()
    assert student.grad.shape == (0, 7)


def test_the_loss_without_labels_is_zero():
    student = torch.randn(5, 7, requires_grad=True)
    loss, *_ = distillation_loss(student, torch.randn(5, 7), torch.full((5,), -100), task_weight=1.0)
    loss.backward()
    assert loss == 0
    assert student.grad.eq(0).all()


def test_a_frozen_head_gets_no_gradient():
    head = nn.Linear(4, 7).requires_grad_(False)
    student = torch.randn(5, 4, requires_grad=True)
    loss, *_ = distillation_loss(student, None, torch.ones(5, dtype=torch.long), student_head=head, task_weight=1.0)
    loss.backward()
    expected = torch.autograd.grad(cross_entropy(head(student), torch.ones(5, dtype=torch.long)), student)[0]
    torch.testing.assert_close(student.grad, expected)
    assert head.weight.grad is None


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.untyped_storage().size() // x.element_size())
        return result


def test_full_logits_are_never_formed(monkeypatch):
    tokens, hidden, vocabulary, chunk = 64, 4, 50, 8
    monkeypatch.setitem(AT_ONCE, "cpu", chunk * vocabulary)
    heads = {name: nn.Linear(hidden, vocabulary) for name in ("student_head", "teacher_head")}
    student, teacher = torch.randn(2, tokens, hidden).unbind()
    labels = torch.randint(vocabulary, (tokens,))
    with LargestTensor() as seen:
        distillation_loss(student.requires_grad_(), teacher, labels, task_weight=0.5, **heads)[0].backward()
    assert seen.largest <= max(chunk * vocabulary, 2 * tokens * hidden) < tokens * vocabulary


@pytest.mark.parametrize("task_weight", [0.0, 0.5])
def test_full_logits_of_an_adaptive_softmax_are_never_formed(monkeypatch, task_weight):
    model = tiny("adaptive_lm", torch.float32)
    head, tokens, vocabulary, chunk = model.get_output_embeddings(), 64, VOCABULARY, 8
    monkeypatch.setitem(AT_ONCE, "cpu", chunk * vocabulary)
    student, teacher = torch.randn(2, tokens, 32).unbind()
    labels = torch.randint(vocabulary, (tokens,))
    student.requires_grad_()
    with LargestTensor() as seen:
        loss, *_ = distillation_loss(
            student, teacher, labels, task_weight=task_weight, student_head=head, teacher_head=copy.deepcopy(head)
        )
        loss.backward()
    weights = max(p.numel() for p in head.parameters())
    assert seen.largest <= max(chunk * vocabulary, 2 * tokens * 32, weights) < tokens * vocabulary


@pytest.mark.parametrize("model_type", ["gpt2", "adaptive_lm", "granite"])
@pytest.mark.parametrize("documents", [False, True])
def test_a_distill_stage_matches_plain_kl(tmp_path, model_type, documents, monkeypatch):
    """With the whole trainer: linear heads, adaptive heads and plain logits, with and without packed documents."""
    monkeypatch.setitem(AT_ONCE, "cpu", 7 * VOCABULARY)
    student, teacher = pair(model_type)
    rows = Rows(prompts=lambda i: 3 * i % 5, documents=documents)
    what = stage("distill", task_weight=0.5, temperature=1.5)
    trainer = StageTrainer(Job(OfRows(rows), teacher, Settings(progress=False)), student, what, 1, tmp_path)
    batch = torch.utils.data.default_collate([rows[i] for i in range(4)])
    loss = trainer.compute_loss(trainer.learner, batch)
    labels = batch.pop("labels")[:, 1:].flatten()
    ours, theirs = (m(**batch, use_cache=False).logits[:, :-1].flatten(0, 1) for m in (student, teacher))
    expected = plain(ours, theirs, labels, None, None, 1.0, 0.5, 1.5)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    own = torch.autograd.grad(loss, [p for p in student.parameters() if p.requires_grad])
    plainly = torch.autograd.grad(expected, [p for p in student.parameters() if p.requires_grad])
    for x, y in zip(own, plainly, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)


# --- Transfer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "documents"), [("gpt2", False), ("gpt2", True), ("llama", False), ("llama", True)]
)
@pytest.mark.parametrize("forgets", [{}, {"decay": True, "rotary": False}], ids=["keeps", "forgets"])
def test_transfer_passes_softmax_attention_on(model_type, documents, forgets):
    student, teacher = pair(model_type, torch.float64, softmax_layers=[1], **forgets)
    choose_trained(student, stage("transfer"))
    batch = torch.utils.data.default_collate([Rows(documents=documents)[i] for i in range(3)])
    batch.pop("labels")
    with transferring(student) as errors:
        logits = student(**batch, use_cache=False).logits
    torch.testing.assert_close(logits, teacher(**batch, use_cache=False).logits)
    assert len(errors) == 2  # none for the softmax layer
    assert all(error > 0 for error in errors)
    sum(errors).backward()
    maps = {p for site in recurrent_sites(student) for p in site.feature_map.parameters()}
    assert {p for p in student.parameters() if p.grad is not None} == maps
    assert all(p.grad.abs().sum() > 0 for p in maps)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["transfer", "distill"])
def test_compiled_stages_match_eager_ones(tmp_path, monkeypatch, objective):
    """Layers, the error of sites and the loss are each compiled once."""
    logs, compiled = {}, torch.compile
    functions = []
    monkeypatch.setattr(torch, "compile", lambda f, **options: functions.append(f.__name__) or compiled(f, **options))
    objectives.fused.cache_clear()
    for how in (False, True):
        student, teacher = pair("llama", decay=True, rotary=False, layers=2)
        teacher = teacher if objective == "distill" else None
        what = stage(objective, learning_rate=1e-3)
        student, logs[how] = train(tmp_path / str(how), student, what, teacher, compiled=how)
    assert logs[True] == pytest.approx(logs[False], rel=1e-4)
    assert logs[True][-1] < logs[True][0]
    ours = [name for name in functions if name != "_call_impl"]  # a layer
    assert ours == {"transfer": ["site_error"], "distill": ["replace_by_gradient"]}[objective]
    assert len(functions) - len(ours) == {"transfer": 0, "distill": 4}[objective]  # including the teacher's
    objectives.fused.cache_clear()


def test_a_transfer_matches_the_teacher_in_evaluation_mode():
    """The targets have no dropout and no layer dropout; the maps are in training mode."""
    student, teacher = pair("adaptive_lm", torch.float64, feature_map="rfa")
    student.config.layerdrop, student.config.dropout = 0.9, 0.5
    for module in student.modules():
        for name in ("layerdrop", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.9)
    student.train()
    inputs = {"input_ids": Rows().ids[:2], "use_cache": False}
    with transferring(student) as errors:
        assert all(site.feature_map.training for site in recurrent_sites(student))
        logits = student(**inputs).logits
    assert len(errors) == 3
    torch.testing.assert_close(logits, teacher(**inputs).logits)
    assert all(module.training for module in student.modules())


def test_transfer_loss_is_zero_for_an_exact_recurrence(monkeypatch):
    student, _ = pair("llama", torch.float64)
    for site in recurrent_sites(student):  # a recurrence that is exact
        monkeypatch.setattr(site, "imitate", lambda inputs: softmax_attention(*inputs[:6]))
    with transferring(student) as errors:
        student(input_ids=Rows().ids[:2], use_cache=False)
    assert len(errors) == 3
    assert sum(errors) == 0


def test_layers_with_different_windows_are_compiled_once():
    """Otherwise the layers of a large model would exceed the limit of recompilations and be slow."""
    model = t2r.swap(tiny("llama"), feature_size=4, plan={"windows": [[4, 8], [16, 2], [5, 40]], "sinks": 2})
    compiled = []

    def count(graph, inputs):
        compiled.append(graph)
        return graph

    torch._dynamo.reset()
    error = torch.compile(objectives.site_error, backend=count, dynamic=False)
    sites, inputs = recurrent_sites(model), []
    with exact_attention(model, observer=lambda site, given, exact: inputs.append((given, exact))):
        model(input_ids=Rows().ids[:2], use_cache=False)
    made = []
    for site, (given, exact) in zip(sites, inputs, strict=True):
        found = error(site, given, exact)
        made.append(len(compiled))
        torch.testing.assert_close(found, objectives.site_error(site, given, exact))
    assert made[0] == made[-1] > 0


def test_compiled_layers_with_different_windows_are_compiled_once():
    """The layers themselves, as in a distillation: each of thirty would take as long as the first."""
    model = t2r.swap(tiny("llama"), feature_size=4, plan={"windows": [[4, 8], [16, 2], [5, 40]], "sinks": 2}).train()
    given, layers = [], model.model.layers
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, *inputs: given.append(inputs), with_kwargs=True)
    model(input_ids=Rows().ids[:2], use_cache=False)
    torch._dynamo.reset()
    for i, (layer, (inputs, named)) in enumerate(zip(layers, given, strict=True)):
        layer._forward_pre_hooks.clear()
        layer.compile(backend="eager", dynamic=False)
        with torch._dynamo.config.patch(error_on_recompile=i > 1):  # the second has inputs with a gradient
            layer(*inputs, **named)


def test_sensitivity_ranks_layers_by_their_increase_in_loss():
    student, _ = pair()
    rows = Rows(20)
    scan = most_sensitive(student, OfRows(rows), LENGTH, count=6)
    assert sorted(layer for layer, _ in scan) == [0, 1, 2]
    assert [cost for _, cost in scan] == sorted((cost for _, cost in scan), reverse=True)
    chosen = torch.stack([rows.ids[i * 20 // 6] for i in range(6)])
    with torch.no_grad(), exact_attention(student):
        exact = student(input_ids=chosen, labels=chosen).loss
    with torch.no_grad(), exact_attention(student, recurrent_layers=[scan[0][0]]):
        alone = student(input_ids=chosen, labels=chosen).loss
    assert (alone - exact).item() == pytest.approx(scan[0][1], rel=1e-3)


# --- Stages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
@pytest.mark.parametrize("trained", ["maps", "attention", "all", "lora"])
def test_only_trained_parameters_change(tmp_path, model_type, trained):
    student, teacher = pair(model_type)
    before = weights(student)
    kind = type(student)
    student, losses = train(tmp_path, student, stage("distill", train=trained, lora_rank=2), teacher)
    after = changed(before, student)
    assert type(student) is kind
    assert set(weights(student)) == set(before)
    maps = {name for name in before if ".feature_map." in name}
    attention = {name for name in before if ".attn." in name or ".self_attn." in name}
    linear = {name for name in before if name.endswith(("proj.weight", "c_attn.weight", "c_fc.weight"))}
    expected = {"maps": maps, "attention": attention, "all": set(before), "lora": maps | linear}[trained]
    assert after == expected
    assert all(map(math.isfinite, losses))
    assert all(p.requires_grad for p in student.parameters())


def test_frozen_maps_do_not_change(tmp_path):
    for trained in ("all", "lora"):
        student, _ = pair(freeze_feature_map=True)
        before = weights(student)
        student, _ = train(tmp_path / trained, student, stage(train=trained, steps=1))
        assert changed(before, student)
        assert not any(".feature_map." in name for name in changed(before, student))
    with pytest.raises(T2RError, match="nothing to train"):
        train(tmp_path, pair(freeze_feature_map=True)[0], stage(train="maps"))


def test_learned_positions_are_trained(tmp_path):
    student, _ = pair("opt")
    before = weights(student)
    student, _ = train(tmp_path, student, stage(steps=1))
    assert "model.decoder.embed_positions.weight" in changed(before, student)


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
@pytest.mark.parametrize("objective", ["task", "transfer", "distill"])
def test_each_objective_lowers_its_loss(tmp_path, model_type, objective):
    student, teacher = pair(model_type)
    what = stage(objective, steps=10, learning_rate=2e-2 if objective == "transfer" else 2e-3)
    student, losses = train(tmp_path, student, what, teacher if objective == "distill" else None, Rows(4))
    assert len(losses) == 10
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("objective", ["task", "transfer", "distill"])
def test_accumulation_equals_one_large_batch(tmp_path, objective):
    """Also if blocks have different numbers of scored tokens, and one has none."""
    found = []
    rows = Rows(prompts=lambda index: LENGTH if index == 2 else 3 * index % LENGTH)
    for device_tokens in (None, LENGTH):
        student, teacher = pair(dtype=torch.float64)
        what = stage(objective, steps=3, optimizer="nag", momentum=0.9, device_tokens=device_tokens)
        folder = tmp_path / str(device_tokens)
        found.append(train(folder, student, what, teacher if objective == "distill" else None, rows))
    (whole, losses), *others = found
    for model, others_losses in others:
        assert others_losses == pytest.approx(losses, rel=1e-6)
        for (name, x), y in zip(whole.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11, msg=name)


def test_noise_replaces_tokens_by_others_of_the_batch():
    ids = torch.arange(1000, 3000).view(4, 500)
    torch.manual_seed(0)
    noisy = exchanged(ids, 0.3)
    moved = noisy != ids
    assert moved.float().mean().item() == pytest.approx(0.3, abs=0.05)  # 2,000 draws: five standard deviations
    assert set(noisy.flatten().tolist()) <= set(ids.flatten().tolist())
    assert torch.equal(exchanged(ids, 0.0), ids)


@pytest.mark.parametrize("objective", ["task", "transfer", "distill"])
def test_noise_changes_the_inputs_but_not_the_labels(tmp_path, monkeypatch, objective):
    """Teacher and student get the same inputs, and the labels are the original text."""
    monkeypatch.setattr(language_modeling, "exchanged", lambda ids, share: ids.flip(1))
    read, labels = [], []
    loss = learner.distillation_loss
    monkeypatch.setattr(
        learner, "distillation_loss", lambda x, y, target, **o: labels.append(target) or loss(x, y, target, **o)
    )
    rows = Rows(4)
    student, teacher = pair()
    what = stage(objective, steps=1, noise=0.5)
    for model in (student.base_model, teacher.base_model):
        model.register_forward_pre_hook(lambda m, a, o: read.append(o.get("input_ids", *a)), with_kwargs=True)
    train(tmp_path, student, what, teacher if objective == "distill" else None, rows=rows)
    whole = {tuple(row) for row in rows.ids.tolist()}
    read = [ids for ids in read if ids.shape == (4, LENGTH)]  # without the verification of the head
    assert len(read) == (2 if objective == "distill" else 1)
    assert all({tuple(row) for row in ids.flip(1).tolist()} == whole for ids in read)
    if objective != "transfer":
        assert {tuple(row[:-1]) for row in labels[0].view(4, LENGTH).tolist()} == {row[1:] for row in whole}


@pytest.mark.parametrize("begins", [1, 2, 3])
def test_noise_starts_with_a_given_reading(tmp_path, monkeypatch, begins):
    """Four blocks, two in a batch, three epochs: a row has noise from its n-th reading on, and not before."""
    monkeypatch.setattr(
        language_modeling, "exchanged", lambda ids, share: torch.where(torch.as_tensor(share) > 0, ids.flip(1), ids)
    )
    read = []
    rows, (student, _) = Rows(4), pair()
    student.base_model.register_forward_pre_hook(lambda m, a, o: read.append(o.get("input_ids", *a)), with_kwargs=True)
    what = stage("transfer", steps=6, batch_tokens=2 * LENGTH, noise=0.5, noise_from=begins)
    train(tmp_path, student, what, rows=rows)
    seen = {}
    for ids in read:
        for row in ids.tolist():
            plain = next(i for i, own in enumerate(rows.ids.tolist()) if sorted(own) == sorted(row))
            seen.setdefault(plain, []).append(row != rows.ids[plain].tolist())
    assert len(seen) == 4
    assert all(noisy == [reading >= begins for reading in (1, 2, 3)] for noisy in seen.values())


def test_a_stage_reads_its_data_in_order(tmp_path):
    """Every row is read once per epoch, in another order in each epoch, and in the same order for the same seed."""

    def reading(folder, seed):
        read, (student, _) = [], pair()
        student.base_model.register_forward_pre_hook(
            lambda m, a, o: read.append(o.get("input_ids", *a)), with_kwargs=True
        )
        train(tmp_path / folder, student, stage("transfer", steps=4, device_tokens=2 * LENGTH), seed=seed)
        return torch.cat(read).tolist()

    one, again, other = reading("a", 1), reading("b", 1), reading("c", 2)
    assert len(one) == 16  # two epochs of eight rows
    assert sorted(one[:8]) == sorted(one[8:]) == sorted(Rows().ids.tolist())
    assert one[:8] != one[8:]
    assert one == again
    assert one != other


def test_noise_must_be_a_fraction():
    for share in (-0.1, 1.0):
        with pytest.raises(T2RError, match="noise must be a number, at least 0 and below 1"):
            stage(noise=share)


def test_batch_shapes(monkeypatch):
    assert batch_shape(stage(batch_tokens=24 * LENGTH)) == (24, 1)
    assert batch_shape(stage(batch_tokens=24 * LENGTH, device_tokens=7 * LENGTH)) == (6, 4)
    assert batch_shape(stage(batch_tokens=24 * LENGTH, device_tokens=1)) == (1, 24)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert batch_shape(stage(batch_tokens=24 * LENGTH, device_tokens=4 * LENGTH)) == (3, 2)
    with pytest.raises(T2RError, match="cannot be divided evenly among 4"):
        batch_shape(stage(batch_tokens=6 * LENGTH))


def test_a_block_without_labels_gives_no_nan(tmp_path):
    student, _ = pair()
    before = weights(student)
    student, losses = train(tmp_path, student, stage(steps=2), rows=Rows(prompts=lambda _: LENGTH))
    assert losses == [0, 0]
    assert not changed(before, student)


def test_nag_matches_fairseq(tmp_path):
    """With a changing learning rate, fairseq's rescaled velocity, and two parameter groups."""
    what = stage(
        optimizer="nag",
        momentum=0.9,
        schedule="cosine",
        steps=6,
        warmup_steps=2,
        warmup_init=1e-3,
        map_learning_rate=0.03,
    )
    student, _ = pair(dtype=torch.float64)
    choose_trained(student, what)
    optimizer = make_optimizer(student, what)
    schedule = what.make_schedule(6)
    names = {id(p): name for name, p in student.named_parameters()}
    by_hand = weights(student)
    velocity = {name: torch.zeros_like(x) for name, x in by_hand.items()}
    initial = [group["lr"] for group in optimizer.param_groups]
    old = None
    for step in range(6):
        factor = schedule.at(step) / what.learning_rate
        for parameter in student.parameters():
            parameter.grad = torch.randn_like(parameter)
        for group, rate in zip(optimizer.param_groups, initial, strict=True):
            group["lr"] = rate * factor
            for parameter in group["params"]:
                p, v, grad = by_hand[names[id(parameter)]], velocity[names[id(parameter)]], parameter.grad
                correct = 1 if old is None else factor / old
                p.add_(v, alpha=0.9 * 0.9 * correct).add_(grad, alpha=-(1 + 0.9) * group["lr"])
                v.mul_(0.9 * correct).add_(grad, alpha=-group["lr"])
        old = factor
        optimizer.step()
    assert initial == [0.03, 0.01]
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(parameter.detach(), by_hand[name])


def test_learning_rates_and_clipping_of_a_stage(tmp_path):
    run = Run(tmp_path / "run", {})
    what = stage(
        schedule="cosine", steps=8, warmup_steps=3, warmup_init=1e-4, clip_norm=0.1, optimizer="nag", momentum=0.5
    )
    run_stage(run, Job(OfRows(Rows()), settings=Settings(progress=False)), pair()[0], what)
    schedule = what.make_schedule(8)
    rates = [entry["learning_rate"] for entry in run.facts["only.log"]]
    # Some versions of transformers log the learning rate of the next step, others that of the last one.
    assert rates in ([pytest.approx(schedule.at(i + k)) for i in range(8)] for k in (0, 1))


@pytest.mark.parametrize(
    ("budget", "steps"),
    [({"tokens": 9 * LENGTH}, 2), ({"tokens": 1}, 1), ({"epochs": 1.5}, 3), ({"minutes": 1e-9}, 1)],
)
def test_budgets(tmp_path, budget, steps):
    run = Run(tmp_path / "run", {})
    student, teacher = pair()
    run_stage(run, Job(OfRows(Rows()), teacher, Settings(progress=False)), student, stage("distill", **budget))
    assert run.facts["only.steps"] == steps


def test_a_stage_killed_at_its_first_write_keeps_its_deadline(tmp_path, monkeypatch):
    class Killed(Exception):
        pass

    def write(self, real=Run.write):
        real(self)
        raise Killed

    monkeypatch.setattr(running, "time_stage", lambda *args: Cost(0.0, 10.0))
    monkeypatch.setattr(Run, "write", write)
    with pytest.raises(Killed):
        run_stage(Run(tmp_path / "run", {}), Job(OfRows(Rows()), settings=Settings()), pair()[0], stage(minutes=1))
    facts = Run(tmp_path / "run", {}).facts
    assert facts.keys() >= {"only.steps", "only.batch_tokens"}
    assert facts["only.seconds"] == 60


def ticking(monkeypatch, seconds):
    """Replace the clock of stages with a time budget: a step takes this many seconds."""
    now = itertools.count(0, seconds)
    monkeypatch.setattr(deadline, "time", types.SimpleNamespace(monotonic=lambda: next(now)))


def test_training_by_time_equals_training_by_steps(tmp_path, monkeypatch):
    """If steps take as long as timed, a time budget gives the same weights as a number of steps."""
    monkeypatch.setattr(running, "time_stage", lambda *args, real=timing.time_stage: real(*args) and Cost(0.0, 20.0))
    monkeypatch.setattr(budget, "WANTED_STEPS", 1)
    ticking(monkeypatch, 20)
    timed, _ = train(tmp_path / "a", pair()[0], stage(minutes=1, schedule="linear", min_learning_rate=1e-3))
    counted, _ = train(tmp_path / "b", pair()[0], stage(steps=3, schedule="linear", min_learning_rate=1e-3))
    for x, y in zip(timed.parameters(), counted.parameters(), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(("seconds", "steps"), [(10, 6), (20, 3), (5, 12), (25, 2), (100, 1), (0.1, 48)])
def test_the_schedule_follows_the_elapsed_time(tmp_path, monkeypatch, seconds, steps):
    """Six steps of ten seconds are planned. However long they take, the learning rate follows the time."""
    monkeypatch.setattr(running, "time_stage", lambda *args: Cost(0.0, 10.0))
    monkeypatch.setattr(budget, "WANTED_STEPS", 1)
    ticking(monkeypatch, seconds)
    run = Run(tmp_path / "run", {})
    what = stage(minutes=1, schedule="linear")
    run_stage(run, Job(OfRows(Rows()), settings=Settings(progress=False)), pair()[0], what)
    assert (run.facts["only.steps"], run.facts["only.done"], run.facts["only.seconds"]) == (6, steps, 60)
    log, schedule = run.facts["only.log"], what.make_schedule(6)
    expected = [schedule.at(min(6, entry["step"] * seconds / 10)) for entry in log]
    before = [schedule.at((entry["step"] - 1) * seconds / 10) for entry in log]
    rates = [entry["learning_rate"] for entry in log]
    assert rates == pytest.approx(expected) or rates == pytest.approx(before)  # of the next step, or of the last one


def test_a_resumed_stage_with_a_time_budget_gets_the_same_weights(tmp_path, monkeypatch):
    """Ten steps of ten seconds are planned, each takes 14. Killed after step 4, the stage resumes with the rest of its
    time."""
    monkeypatch.setattr(running, "time_stage", lambda *args: Cost(0.0, 10.0))
    what = stage("distill", minutes=100 / 60, schedule="linear", noise=0.2)

    def go(folder, trainer=StageTrainer):
        ticking(monkeypatch, 14)
        monkeypatch.setattr(running, "StageTrainer", trainer)
        student, teacher = pair()
        run = Run(tmp_path / folder, {})
        run_stage(run, Job(OfRows(Rows(10)), teacher, Settings(progress=False, save_steps=2)), student, what)
        return student, run.facts

    whole, facts = go("whole")
    assert facts["only.done"] == 7
    monkeypatch.setattr(Dying, "left", 2)
    with pytest.raises(Killed):
        go("cut", Dying)
    assert last_checkpoint(tmp_path / "cut" / "only.checkpoints").name == "checkpoint-4"
    resumed, again = go("cut")
    assert again["only.done"] == 7
    assert again["only.log"] == facts["only.log"]
    for (name, x), y in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(x, y), name


# --- Failures -------------------------------------------------------------------------------------------------


class Failing(StageTrainer):
    """A trainer whose loss is wrong from step 3 on."""

    factor = math.nan

    def compute_loss(self, *args, **options):
        return super().compute_loss(*args, **options) * (self.factor if self.state.global_step >= 3 else 1)


@pytest.mark.parametrize(("save_steps", "every"), [(1, 1), (2, 1), (2, 5), (20, 1)])
def test_nan_stops_and_names_the_last_good_checkpoint(tmp_path, save_steps, every):
    student, _ = pair()
    settings = Settings(save_steps=save_steps, progress=False)
    trainer = Failing(Job(OfRows(Rows()), settings=settings), student, stage(), 8, tmp_path)
    trainer.args.logging_steps = every  # a checkpoint may come before the next log
    with pytest.raises(T2RError) as error:
        trainer.train()
    checkpoint = last_checkpoint(tmp_path)
    if save_steps > 3:
        assert checkpoint is None
        assert "there is no checkpoint yet" in str(error.value)
    else:
        assert checkpoint.name == f"checkpoint-{3 // save_steps * save_steps}"
        assert f"the last good checkpoint is {checkpoint}" in str(error.value)
        assert "lower the learning rate" in str(error.value)


def test_divergence_stops(tmp_path, monkeypatch):
    monkeypatch.setattr(Failing, "factor", 10.0)
    settings = Settings(save_steps=2, progress=False)
    trainer = Failing(Job(OfRows(Rows()), settings=settings), pair()[0], stage(learning_rate=1e-9), 20, tmp_path)
    with pytest.raises(T2RError, match=r"training diverges: .* by step 6; lower .* is .*checkpoint-4"):
        trainer.train()


def test_only_complete_checkpoints_count(tmp_path):
    for step, complete in ((2, True), (10, True), (12, False)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "weights").write_bytes(bytes(step))
        if complete:
            seal(folder)
    assert last_checkpoint(tmp_path).name == "checkpoint-10"
    assert last_checkpoint(tmp_path / "none") is None


class Killed(BaseException):
    pass


class Dying(StageTrainer):
    """Raises after a number of checkpoints, or in the middle of one."""

    left = 1

    def _save_checkpoint(self, *args, **options):
        super()._save_checkpoint(*args, **options)
        Dying.left -= 1
        if Dying.left == 0:
            raise Killed


@pytest.mark.parametrize("trained", ["all", "lora"])
@pytest.mark.parametrize("saved", [1, 3])
def test_a_resumed_stage_gets_the_same_weights(tmp_path, monkeypatch, trained, saved):
    """With dropout and noise, so that the random state matters. Six steps, with checkpoints after 2, 4 and 6; the last
    one is written when training is done but not yet recorded."""
    module = running

    def fresh():
        student, teacher = pair()
        for part in student.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.2
        return student, teacher

    what = stage("distill", steps=6, train=trained, lora_rank=2, device_tokens=2 * LENGTH, noise=0.2, noise_from=2)
    save = {"save_steps": 2, "rows": Rows(10)}
    student, teacher = fresh()
    whole, losses = train(tmp_path / "whole", student, what, teacher, **save)

    monkeypatch.setattr(module, "StageTrainer", Dying)
    monkeypatch.setattr(Dying, "left", saved)
    student, teacher = fresh()
    with pytest.raises(Killed):
        train(tmp_path / "cut", student, what, teacher, **save)
    monkeypatch.setattr(module, "StageTrainer", StageTrainer)
    torch.manual_seed(99)
    student, teacher = fresh()
    resumed, again = train(tmp_path / "cut", student, what, teacher, **save)
    for (name, x), y in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(x, y), name
    assert again == losses
    # The stage is finished: a third call only loads it.
    student, teacher = fresh()
    read, _ = train(tmp_path / "cut", student, what, teacher, **save)
    assert all(torch.equal(x, y) for x, y in zip(whole.parameters(), read.parameters(), strict=True))


@pytest.mark.parametrize("where", ["optimizer", "weights"])
def test_a_full_disk_is_one_error_and_the_run_can_be_resumed(tmp_path, monkeypatch, where):
    from t2r.training.sessions import run as module

    whole, _ = train(tmp_path / "whole", pair()[0], stage(), save_steps=1)
    with monkeypatch.context() as patch:
        if where == "optimizer":

            def full(self, folder, real=StageTrainer._save_optimizer_and_scheduler):
                if folder.endswith("-3"):
                    raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
                real(self, folder)

            patch.setattr(StageTrainer, "_save_optimizer_and_scheduler", full)
        else:

            def full(*args):
                raise OSError(28, "No space left on device")

            patch.setattr(module, "save_file", full)
        with pytest.raises(T2RError, match=r"cannot be written .*: free some disk space and repeat the command"):
            train(tmp_path / "full", pair()[0], stage(), save_steps=1)
    assert last_checkpoint(tmp_path / "full" / "run" / "only.checkpoints").name == (
        "checkpoint-2" if where == "optimizer" else "checkpoint-4"
    )
    resumed, _ = train(tmp_path / "full", pair()[0], stage(), save_steps=1)
    for x, y in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(x, y)


def test_weights_of_another_model_are_refused(tmp_path):
    save_weights(pair("gpt2")[0], tmp_path / "w.safetensors")
    with pytest.raises(T2RError, match="has the weights of another model"):
        load_weights(pair("llama")[0], tmp_path / "w.safetensors")
    model = pair("gpt2")[0]
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
    load_weights(model, tmp_path / "w.safetensors")
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.lm_head.weight.abs().sum() > 0


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_the_weights_of_a_finished_stage_are_loaded(model_type, tmp_path):
    """Encoder-decoders tie more than one name to the embeddings."""
    model = t2r.swap(tiny(model_type, torch.float32), feature_size=4, recurrent="both")
    save_weights(model, tmp_path / "w.safetensors")
    other = t2r.swap(tiny(model_type, torch.float32, seed=1), feature_size=4, recurrent="both")
    load_weights(other, tmp_path / "w.safetensors")
    ours, theirs = model.state_dict(), other.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- Settings of a stage ----------------------------------------------------------------------------------------


def test_a_failed_stage_leaves_nothing_compiled(tmp_path, monkeypatch):
    student, teacher = pair()

    def fail(self, *args, **options):
        assert all(layer._compiled_call_impl is not None for m in (student, teacher) for layer in m.transformer.h)
        assert student.is_gradient_checkpointing
        raise Killed

    monkeypatch.setattr(StageTrainer, "train", fail)
    with pytest.raises(Killed):
        train(tmp_path, student, stage("distill"), teacher, compiled=True, gradient_checkpointing=True)
    assert all(layer._compiled_call_impl is None for m in (student, teacher) for layer in m.transformer.h)
    assert not student.is_gradient_checkpointing
    assert all(p.requires_grad for p in student.parameters())


def test_gradient_checkpointing_recomputes_layers(tmp_path):
    for objective, times in (("transfer", 1), ("distill", 2), ("task", 2)):
        student, teacher = pair()
        calls = []
        student.transformer.h[0].ln_1.register_forward_pre_hook(lambda *args, calls=calls: calls.append(1))
        train(tmp_path / objective, student, stage(objective, steps=1), teacher, gradient_checkpointing=True)
        probes = 0 if objective == "transfer" else 2  # of the head
        assert len(calls) - probes == times


def test_a_model_without_gradient_checkpointing_is_refused(tmp_path):
    student, _ = pair()
    type(student).supports_gradient_checkpointing = False
    try:
        with pytest.raises(T2RError, match="gpt2 does not support gradient checkpointing"):
            train(tmp_path, student, stage(), gradient_checkpointing=True)
    finally:
        del type(student).supports_gradient_checkpointing


@pytest.mark.parametrize(("seconds", "saves"), [(1e9, 0), (0.0, 4)])
def test_checkpoints_follow_the_clock(tmp_path, monkeypatch, seconds, saves):
    monkeypatch.setattr(trainers, "SAVE_SECONDS", seconds)
    saved = []
    monkeypatch.setattr(trainers, "seal", lambda folder: saved.append(folder.name))
    train(tmp_path, pair()[0], stage())
    assert saved == [f"checkpoint-{i + 1}" for i in range(saves)]


def test_a_checkpoint_has_only_trained_parameters_and_buffers(tmp_path, monkeypatch):
    """A checkpoint of a transfer has only the maps."""
    found = {}
    monkeypatch.setattr(trainers, "seal", lambda folder: found.update(load_file(folder / trainers.LEARNED)))
    student, _ = pair(feature_map="rfa")
    train(tmp_path, student, stage("transfer", steps=1), save_steps=1)
    assert found
    assert all(".feature_map." in name for name in found)
    assert any(name.endswith(".bank") for name in found)
