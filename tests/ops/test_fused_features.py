"""A step that also computes the features of queries and keys, compared with the feature map and a plain step."""

from __future__ import annotations

import pytest
import torch

import t2r
from families import batch, tiny
from t2r import ops
from t2r.feature_maps import make_feature_map
from t2r.ops import registry
from t2r.ops.constants import constant_weights

MISSING = registry.BACKENDS["triton"].missing()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

MAPS = {
    "paper": {"activation": "relu", "feature_size": 5},
    "default": {"activation": "softmax", "feature_size": 12, "shared": False, "key_weights": True, "decay": True},
    "per head": {"activation": "softmax", "feature_size": 16, "grouped": False, "key_weights": True},
    "separate": {"activation": "relu", "feature_size": 17, "grouped": False, "shared": False, "decay": True},
}


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", MAPS.values(), ids=MAPS)
def test_features_and_step_in_one_kernel(options, dtype):
    given = {"head_dim": 6, "num_heads": 4, "num_key_value_heads": 2}
    made = make_feature_map("t2r", **given, **options).to(DEVICE, dtype).requires_grad_(False)
    for parameter in made.parameters():  # key weights start at 0
        parameter.copy_(torch.randn(parameter.shape, dtype=torch.float32))
    mask = torch.tensor([[True], [False]], device=DEVICE)
    q, k, v = (torch.randn(2, heads, 1, size, device=DEVICE).to(dtype) for heads, size in ((4, 6), (2, 6), (2, 7)))
    state = made.rule().empty(2, 7, torch.float32, DEVICE).map(lambda x: x + torch.rand(x.shape, device=DEVICE))
    own = state.map(torch.clone)
    with torch.no_grad():
        phi_q, phi_k = made.double()(q.double() * 0.4, k.double())
        spread = v.double().repeat_interleave(made.key_heads // 2, 1)
        how = {"mask": mask, "decay": made.decay}
        expected, after = ops.step(phi_q, phi_k, spread, state.map(torch.Tensor.double), **how, backend="recurrent")
        made.to(dtype)
        features = made.step_features(0.4)
        how["decay"] = made.decay
        out, _ = ops.step(q, k, v, own, **how, inplace=True, features=features, backend="triton")
    near = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(out.double(), expected, **near)
    torch.testing.assert_close(own.s.double(), after.s, **near)
    torch.testing.assert_close(own.z.double(), after.z, **near)


@needs_triton
@pytest.mark.slow  # the interpreter takes a minute for each; the mark is ignored by `-m cuda`
@pytest.mark.cuda
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_a_model_generates_the_same(model_type, merged, monkeypatch):
    """Features are computed inside the step, also of a merged model and under `constant_weights`."""
    options = {"activation": "softmax", "key_weights": True, "shared": False, "decay": True, "feature_size": 4}
    if model_type == "llama":
        options |= {"grouped": False, "rotary": False}
    model = t2r.swap(tiny(model_type, torch.float32), **options).to(DEVICE).eval()
    if merged:
        model = t2r.merge(model)
    inputs = {name: x.to(DEVICE) for name, x in batch(model_type, padding="left").items()}
    asked = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    monkeypatch.setitem(registry.PREFERENCE, DEVICE, ())
    expected = model.generate(**inputs, **asked)
    used = []
    real = ops.step

    def watched(*args, features=None, **how):
        used.append(features is not None)
        return real(*args, features=features, **how)

    monkeypatch.setitem(registry.PREFERENCE, DEVICE, ("triton",))
    monkeypatch.setattr("t2r.attention.layers.step", watched)
    with constant_weights({}):
        got = model.generate(**inputs, **asked)
    assert used
    assert all(used)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


def test_where_features_are_not_computed_in_the_step():
    q, v = torch.zeros(1, 2, 1, 4, dtype=torch.float64), torch.zeros(1, 2, 1, 4, dtype=torch.float64)
    assert not ops.computes_features(q, v, 8)
    made = make_feature_map("t2r", head_dim=4, num_heads=2, activation="tanh")
    assert made.step_features(1.0) is None
    state = made.rule().empty(1, 4, torch.float64, "cpu")
    with pytest.raises(t2r.T2RError, match="features computed in the step"):
        ops.step(q, q, v, state, features=ops.Features(32, "relu"), backend="recurrent")
