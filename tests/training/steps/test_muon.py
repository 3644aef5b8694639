"""The Muon optimizer: its updates, the parameters it applies to, and resuming."""

from __future__ import annotations

import copy
import lzma
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer

import t2r
from families import tiny
from repository import example
from t2r.attention.recurrence import recurrent_sites
from t2r.training.recipes.recipe import Stage, load_recipe
from t2r.training.steps.muon import Muon, orthogonal
from t2r.training.steps.objectives import transferring
from t2r.training.steps.optimizers import choose_trained, make_optimizer

TEACHER = Path(__file__).parents[3] / "examples" / "teacher"


@pytest.mark.parametrize("shape", [(6, 6), (3, 9), (9, 3), (4, 5, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_orthogonal(shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64) * 1e-6
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    turned = orthogonal(x.to(dtype)).double()
    values = torch.linalg.svdvals(turned)
    assert values.min() > 0.5
    assert values.max() < 1.3
    likeness = (turned * (u @ v)).sum((-2, -1)) / (turned.norm(dim=(-2, -1)) * (u @ v).norm(dim=(-2, -1)))
    assert likeness.min() > 0.97


def test_a_zero_gradient_makes_no_step():
    assert torch.equal(orthogonal(torch.zeros(2, 3, 3)), torch.zeros(2, 3, 3))


def groups(train, objective):
    model = t2r.swap(tiny("gpt2"), feature_map="hedgehog", shared=False, decay=True, key_weights=True)
    stage = Stage(
        "s",
        objective,
        train=train,
        steps=1,
        optimizer="muon",
        learning_rate=1e-3,
        map_learning_rate=1e-2,
        block_size=16,
    )
    choose_trained(model, stage)
    return model, make_optimizer(model, stage)


def test_muon_updates_matrices_but_not_embeddings():
    model, optimizer = groups("all", "distill")
    names = {p: name for name, p in model.named_parameters()}
    turned = {names[p] for group in optimizer.param_groups if group["orthogonal"] for p in group["params"]}
    rest = {names[p] for group in optimizer.param_groups if not group["orthogonal"] for p in group["params"]}
    assert turned | rest == set(names.values())
    assert not turned & rest
    assert all(name.endswith("weight") for name in turned)
    assert any("key_map" in name for name in turned)
    assert any("c_fc" in name for name in turned)
    assert any("decay_logits" in name for name in rest)
    assert any("key_weight" in name for name in rest)  # one row for each head
    assert {"transformer.wte.weight", "transformer.wpe.weight"} <= rest
    rates = {(group["orthogonal"], round(group["lr"], 9)) for group in optimizer.param_groups}
    pace = recurrent_sites(model)[0].feature_map.head_dim ** 0.25  # queries learn faster by it, keys slower
    maps = {(True, round(1e-2 * pace, 9)), (True, round(1e-2 / pace, 9)), (False, round(1e-2 / pace, 9)), (False, 1e-2)}
    assert rates == maps | {(True, 1e-3), (False, 1e-3)}


def test_the_map_of_each_head_is_orthogonalized_separately():
    """The update of a head does not depend on the gradients of others, and entries change by the learning rate."""
    model, optimizer = groups("maps", "transfer")
    feature_map = recurrent_sites(model)[0].feature_map
    weight = feature_map.key_map.weight
    rate = 1e-2 * feature_map.paces()[weight]
    before = weight.detach().clone()
    weight.grad = torch.randn_like(weight)
    weight.grad[0] *= 1e4
    optimizer.step()
    moved = (weight.detach() - before).square().mean((-2, -1)).sqrt()
    assert moved.min() > 0.5 * rate
    assert moved.max() < 1.3 * rate
    assert weight.grad is not None


def test_other_parameters_use_adamw():
    torch.manual_seed(0)
    ours, theirs = nn.Linear(4, 4), nn.Linear(4, 4)
    theirs.load_state_dict(ours.state_dict())
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    muon = Muon(
        [{"params": [ours.bias], "orthogonal": False}, {"params": [ours.weight], "orthogonal": True}], **options
    )
    adam = torch.optim.AdamW([theirs.bias], **options)
    for _ in range(3):
        x = torch.randn(5, 4)
        for model, optimizer in ((ours, muon), (theirs, adam)):
            model.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours.bias, theirs.bias)
    assert not torch.equal(ours.weight, theirs.weight)


def test_the_optimizer_state_can_be_resumed():
    torch.manual_seed(0)
    inputs = torch.randn(8, 5, 4)

    def run(model, optimizer, xs):
        for x in xs:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    def make(model):
        parts = [{"params": [model.weight], "orthogonal": True}, {"params": [model.bias], "orthogonal": False}]
        return Muon(parts, lr=1e-2, betas=(0.8, 0.95), fused=True)

    whole = nn.Linear(4, 6)
    halved = copy.deepcopy(whole)
    run(whole, make(whole), inputs)
    first = make(halved)
    run(halved, first, inputs[:4])
    second = make(halved)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(halved, second, inputs[4:])
    assert torch.equal(whole.weight, halved.weight)
    assert torch.equal(whole.bias, halved.bias)


@pytest.mark.slow
def test_muon_needs_fewer_steps_for_maps_of_small_heads():
    """Compares both optimizers on the demo's teacher, each at the best of several learning rates (3e-2 to 7e-2, and
    3e-2 to 1.2e-1)."""
    example("teacher/model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32)
    with lzma.open(TEACHER.parent / "novels" / "valid.txt.xz", "rt", encoding="utf-8") as file:
        ids = AutoTokenizer.from_pretrained(TEACHER)(file.read(100_000), return_tensors="pt").input_ids[0]
    assert transferred(base, ids, "muon", 5e-2) < 0.98 * transferred(base, ids, "adamw", 8e-2)


def transferred(base, ids, optimizer, rate, count=60, rows=2, length=128):
    """Return the error of attention outputs on unseen text after a short transfer with the demo's schedule."""
    options = load_recipe("distill-lm").swap | {"feature_size": 32}
    model = t2r.swap(copy.deepcopy(base), **options)
    common = {"betas": [0.8, 0.95], "schedule": "linear", "block_size": length, "batch_tokens": rows * length}
    stage = Stage("s", "transfer", train="maps", steps=count, optimizer=optimizer, learning_rate=rate, **common)
    choose_trained(model, stage)
    steps = make_optimizer(model, stage)
    falls = LambdaLR(steps, lambda step: stage.make_schedule(count).at(step) / rate)
    blocks = ids[: (count + 4) * rows * length].view(count + 4, rows, length)
    for block in blocks[:count]:
        steps.zero_grad()
        with transferring(model) as errors:
            model(input_ids=block, use_cache=False)
        torch.stack(errors).mean().backward()
        steps.step()
        falls.step()
    with transferring(model) as errors, torch.no_grad():
        model(input_ids=blocks[count:].flatten(0, 1), use_cache=False)
    return torch.stack(errors).mean().item()
