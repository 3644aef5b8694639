"""Parameter groups of the optimizers."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import t2r
from families import batch, tiny
from t2r.surgery.frozen import unfreeze
from t2r.training.recipes.recipe import Stage
from t2r.training.steps.optimizers import choose_trained, make_optimizer


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "muon", "nag"])
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "adaptive_lm"])
def test_weight_decay_excludes_norms_biases_embeddings_and_decay_rates(model_type, optimizer):
    model = t2r.swap(tiny(model_type), feature_map="t2r", recurrent="both", decay=True, key_weights=True, shared=False)
    stage = Stage("only", "task", steps=1, optimizer=optimizer, weight_decay=0.1, momentum=0.9)
    choose_trained(model, stage)
    names = {id(p): name for name, p in model.named_parameters()}
    decays = {}
    for group in make_optimizer(model, stage).param_groups:
        for p in group["params"]:
            decays[names[id(p)]] = group["weight_decay"]
    assert set(decays) == set(names.values())
    assert set(decays.values()) == {0.0, 0.1}
    spared = {name for name, decay in decays.items() if not decay}
    words = ("norm", "ln_", "bias", "decay_logits", "embed", "wte", "wpe", "lm_head")
    expected = {name for name in decays if any(word in name for word in words)}
    assert spared == expected
    assert any("decay_logits" in name for name in spared)
    assert any("feature_map.key_map.weight" in name for name in set(decays) - spared)


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "muon", "nag"])
def test_weight_decay_is_decoupled(optimizer):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 2.0)
    stage = Stage("only", "task", steps=1, optimizer=optimizer, weight_decay=0.1, learning_rate=0.01)
    made = make_optimizer(model, stage)
    model.weight.grad = torch.zeros(1, 1)
    for _ in range(3):
        made.step()
    assert model.weight.item() == pytest.approx(2 * (1 - 0.01 * 0.1) ** 3)
    assert made.param_groups[0]["weight_decay"] == 0.1


def test_without_weight_decay_groups_differ_by_learning_rate_only():
    model = t2r.swap(tiny("gpt2"), feature_map="elu")
    stage = Stage("only", "task", steps=1)
    choose_trained(model, stage)
    assert len(make_optimizer(model, stage).param_groups) == 1


@pytest.mark.parametrize("model_type", ["t5", "mt5", "umt5", "bart"])
@pytest.mark.parametrize(
    "options", [{}, {"softmax_layers": [0]}, {"softmax_layers": [1]}, {"recurrent": "causal"}, {"recurrent": "cross"}]
)
def test_everything_that_is_trained_gets_a_gradient(model_type, options):
    """Distributed training fails otherwise. The bias of T5 has no effect if all causal attention is recurrent."""
    model = t2r.swap(tiny(model_type, torch.float32), **{"recurrent": "both"} | options)
    unfreeze(model)  # as after a stage
    choose_trained(model, Stage("only", "task", "all", steps=1))
    inputs = batch(model_type, padding="right")
    model(**inputs, labels=inputs["decoder_input_ids"]).loss.backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert all("relative_attention_bias" in name for name in frozen)
    keeps = options.get("recurrent") == "cross" or ("softmax_layers" in options and model_type != "umt5")
    assert bool(frozen) == (model_type != "bart" and not keeps)


@pytest.mark.parametrize("model_type", ["t5", "mt5", "umt5", "marian"])
def test_several_processes_train_every_family(model_type, tmp_path):
    """DDP raises at the next forward if a parameter that is trained had no gradient."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    parallel = None
    try:
        model = t2r.swap(tiny(model_type, torch.float32), recurrent="both")
        unfreeze(model)  # as after a stage
        choose_trained(model, Stage("only", "task", "all", steps=1))
        parallel = DistributedDataParallel(model, find_unused_parameters=False)
        inputs = batch(model_type, padding="right")
        for _ in range(2):
            parallel(**inputs, labels=inputs["decoder_input_ids"]).loss.backward()
    finally:
        # The last reference to the group must not be that of `parallel`, which ends gloo's thread while it holds the
        # GIL: torch then hangs if that thread still has to free a tensor.
        parallel = None
        gc.collect()
        dist.destroy_process_group()
