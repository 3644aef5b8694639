"""Fewer operations in a recorded step on a CPU: the norms of families, values, and the number of operations."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import t2r
from families import tiny
from t2r.generation.engine.fusion.norms import norm_of, shorten_norms
from t2r.generation.engine.fusion.replacing import Replacing
from t2r.generation.engine.recording import Recording
from t2r.generation.engine.step import DecodeStep
from t2r.training.recipes.recipe import load_recipe


@pytest.mark.parametrize("model_type", ["llama", "gemma", "olmo2", "qwen3", "t5"])
@torch.no_grad()
def test_the_norms_of_families(model_type):
    model = tiny(model_type, torch.float32).eval()
    norm = [module for module in model.modules() if norm_of(module) is not None][-1]
    norm.weight.copy_(torch.randn(norm.weight.shape))
    inputs = [3 * torch.randn(2, time, norm.weight.numel()) for time in (1, 3)]
    expected = [norm(x) for x in inputs]
    with Replacing() as replacing:
        shorten_norms(norm, replacing)
        assert list(replacing.modules.values()) == [norm]
        found = [norm(x) for x in inputs]
    torch.testing.assert_close(found, expected)
    assert torch.equal(found[1], expected[1])  # more than one token: the model's own


@torch.no_grad()
def test_other_norms_stay():
    """Layer norms, and formulas that round to float32."""
    with Replacing() as replacing:
        for model_type, dtype in (("gpt2", torch.float32), ("llama", torch.bfloat16), ("llama", torch.float64)):
            shorten_norms(tiny(model_type, dtype).eval(), replacing)
        assert not replacing.modules


def converted(layers: int):
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 3, "num_key_value_heads": 1}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_hidden_layers=layers, pad_token_id=0, **sizes)).eval()
    options = load_recipe("distill-lm").swap | {"feature_size": 4, "softmax_layers": [0]}
    return t2r.swap(base, **options).requires_grad_(False)


def test_a_recorded_step_has_fewer_operations(monkeypatch):
    """Of a recurrent layer of a Llama: three projections are one product, a norm has four operations, and the scale of
    queries is in their map."""
    counts, build = [], Recording.__init__

    def counting(self, *args):
        build(self, *args)
        counts.append(len(self.calls))

    monkeypatch.setattr(Recording, "__init__", counting)
    for layers in (2, 3):
        DecodeStep(converted(layers), 2, 16).run()
    assert counts[1] - counts[0] == 30


def test_values_of_recorded_steps():
    """With rows of different lengths, in recurrent and in softmax layers."""
    model = converted(2)
    steps = [DecodeStep(m, 2, 16) for m in (model, copy.deepcopy(model))]
    for tokens in ([[3], [5]], [[7], [11]], [[13], [17]]):
        for step in steps:
            step.active.fill_(1)
            step.tokens.copy_(torch.tensor(tokens))
        steps[0].run()
        steps[1].eager()
        torch.testing.assert_close(steps[0].logits, steps[1].logits)
    assert steps[0].captured_as == "recording"
    for found, expected in zip(*(step.own.tensors() for step in steps), strict=True):
        torch.testing.assert_close(found, expected)
    assert not any("forward" in vars(module) for module in model.modules())
