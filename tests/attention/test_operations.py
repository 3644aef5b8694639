"""The number of tensor operations of a decoding step, which bounds its speed for small models and batches.

There an operation takes as long to dispatch as to compute, on a GPU and on a CPU, so each one counts. The numbers are
per layer and relative to softmax attention of the same model in the same versions of torch and transformers.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import t2r
from t2r.ops import registry
from t2r.ops.constants import constant_weights

DEFAULT = {"activation": "softmax", "key_weights": True, "shared": False, "grouped": False, "decay": True}
MODELS = {"llama": DEFAULT | {"rotary": False, "feature_size": 8}, "gpt2": {"feature_size": 8}}
MISSING = registry.BACKENDS["triton"].missing()


class Count(TorchDispatchMode):
    """Counts all operations that reach the dispatcher, including views."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += 1
        return function(*args, **(kwargs or {}))


def build(model_type, layers):
    if model_type == "llama":
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes, **heads)).eval()
    sizes = {"vocab_size": 32, "n_embd": 16, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, **sizes)).eval()


@torch.no_grad()
def operations(model, rows, padded):
    """Count the operations of a step as in `generate`, where values that depend only on the weights are kept."""
    mask = torch.ones(rows, 6, dtype=torch.long)
    mask[0, 0] = int(not padded)
    with constant_weights({}):
        cache = model(torch.ones(rows, 4, dtype=torch.long), attention_mask=mask[:, :4]).past_key_values
        for length in (5, 6):  # the first step also derives what is kept
            given = {"attention_mask": mask[:, :length]} if padded else {}
            with Count() as count:
                model(torch.ones(rows, 1, dtype=torch.long), past_key_values=cache, **given)
    return count.operations


def per_layer(make, rows, padded=False):
    """The operations of one more layer."""
    return operations(make(3), rows, padded) - operations(make(2), rows, padded)


def recurrent(model_type, merged):
    def make(layers):
        model = t2r.swap(build(model_type, layers), **MODELS[model_type]).eval()
        return t2r.merge(model) if merged else model

    return make


# More than softmax attention. GPT-2 has few operations: one projection instead of three after a merge, no rotation, and
# one fused operation for attention, where a step in plain PyTorch updates S and z, reads both and divides.
PLAIN = {
    ("llama", False, 1): 6,
    ("llama", False, 2): 14,  # the matrix products of the maps are by head, so rows and heads are transposed
    ("llama", True, 1): -1,
    ("llama", True, 2): -1,
    ("gpt2", False, 1): 14,
    ("gpt2", True, 1): 14,
}


@pytest.mark.parametrize(("model_type", "merged", "rows"), PLAIN)
def test_a_step_in_plain_pytorch(model_type, merged, rows):
    teacher = per_layer(lambda layers: build(model_type, layers), rows)
    assert per_layer(recurrent(model_type, merged), rows) - teacher <= PLAIN[model_type, merged, rows]


def test_padding_adds_as_few_operations_as_in_softmax_attention():
    makes = (recurrent("llama", False), lambda layers: build("llama", layers))
    ours, teachers = (per_layer(make, 2, padded=True) - per_layer(make, 2) for make in makes)
    assert ours <= teachers


class Nothing:
    """In place of a kernel: launches nothing."""

    def __getitem__(self, grid):
        return lambda *args, **how: None


# A merged GPT-2 has three projections, of 11 operations, where GPT-2 has one, of 3.
AROUND = {("llama", False): -21, ("llama", True): -21, ("gpt2", False): -5, ("gpt2", True): 2}


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("model_type", "merged"), AROUND)
def test_around_the_kernel_of_a_step(model_type, merged, padded, monkeypatch):
    """On a GPU, one launch computes a step. These are the operations around it, and the launch."""
    monkeypatch.setitem(registry.PREFERENCE, "cpu", ("triton",))
    monkeypatch.setattr("t2r.ops.triton.decode._decode.kernel", Nothing())
    monkeypatch.setattr(registry.BACKENDS["triton"], "parallel", registry.BACKENDS["chunked"].parallel, raising=False)
    teacher = per_layer(lambda layers: build(model_type, layers), 2, padded)
    assert 1 + per_layer(recurrent(model_type, merged), 2, padded) - teacher <= AROUND[model_type, merged]
