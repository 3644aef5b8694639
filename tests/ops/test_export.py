"""Linear attention and whole models exported by torch.export, as torch.onnx.export does it."""

import pytest
import torch
from torch import nn
from torch.export import Dim

import t2r
from families import tiny
from ops.cases import make_case
from t2r import ops
from t2r.ops import State

LONGEST = 300
"""Several chunks: a loop over the chunks of the example would be wrong."""


class Attention(nn.Module):
    def __init__(self, signed):
        super().__init__()
        self.signed = signed

    def forward(self, q, k, v, s, z, z_abs, mask, starts, decay):
        how = {"mask": mask, "starts": starts, "decay": decay, "signed": self.signed}
        return ops.linear_attention(q, k, v, state=State(s, z, z_abs), **how)


def tensors(case):
    return case.q, case.k, case.v, *case.state, case.mask, case.starts, case.decay


@pytest.mark.parametrize(
    ("options", "strict"),
    [
        ({"decay": True, "mask": "left"}, False),
        pytest.param({"decay": True, "mask": "left"}, True, marks=pytest.mark.slow),
        ({"signed": True, "starts": True}, False),
    ],
    ids=str,
)
@torch.no_grad()
def test_an_open_length_is_right_for_every_length(options, strict):
    example = make_case(time=9, state=True, **options)
    batch, time = Dim("batch"), Dim("time", min=2, max=LONGEST)
    shapes = [{0: batch, 2: time}] * 3 + [{0: batch}] * 3 + [{0: batch, 1: time}] * 2 + [{}]
    given = tensors(example)
    shapes = tuple(None if x is None else shape for x, shape in zip(given, shapes, strict=True))
    how = {"strict": strict, "prefer_deferred_runtime_asserts_over_guards": True}  # those of torch.onnx.export
    program = torch.export.export(Attention(example.signed), given, dynamic_shapes=shapes, **how)
    for size, length in ((3, 2), (1, 200)):
        other = make_case(batch=size, time=length, seed=1, state=True, **options)
        out, new = program.module()(*tensors(other))
        expected, left = ops.linear_attention(other.q, other.k, other.v, state=other.state, **other.options)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(State(*new), left)


class Step(nn.Module):
    """One decoding step with the states as inputs and outputs, as in docs/tools.md."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, token, position, states):
        cache = self.model.make_cache()
        for layer, state in zip(cache.layers, states, strict=True):
            layer.load(state, 1)
        logits = self.model(token, position_ids=position, past_key_values=cache).logits
        return logits[:, -1], [layer.tensors() for layer in cache.layers]


@torch.no_grad()
def test_a_decoding_step_reads_a_text():
    model = t2r.swap(tiny("llama", layers=1), decay=True, key_weights=True, feature_size=8)
    ids = torch.randint(3, 90, (2, 6))
    states = [layer.tensors() for layer in model.make_static_cache(rows=2).layers]
    program = torch.export.export(Step(model).eval(), (ids[:, :1], torch.zeros(2, 1, dtype=torch.long), states))
    clamps = [node.args[1:] for node in program.graph.nodes if node.target is torch.ops.aten.clamp.default]
    assert clamps
    assert all(type(bound) is float for bounds in clamps for bound in bounds)  # torch.onnx.export refuses 0 and 1.0
    for place in range(ids.shape[1]):
        logits, states = program.module()(ids[:, place : place + 1], torch.full((2, 1), place), states)
    torch.testing.assert_close(logits, model(ids).logits[:, -1])
