"""Another recurrence: a rule with a state of its own and a gate, which nothing but the tests knows."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import t2r
from families import EOS, batch, tiny
from t2r.attention.recurrence import recurrent_sites
from t2r.feature_maps import AffineMap


class Fast(NamedTuple):
    """Fast weights `[rows, heads, feature, value]`."""

    fast: Tensor

    def map(self, function):
        return Fast(function(self.fast))

    def check(self):
        if self.fast.dim() != 4:
            raise ValueError("not fast weights")


class GatedDelta(NamedTuple):
    """Fast weights are multiplied by a gate, and corrected by the difference between a value and what they answer."""

    heads: int
    features: int
    gate: Tensor
    """`[rows, time]`, computed from the inputs of the attention."""

    def empty(self, rows, value_size, dtype, device):
        return Fast(torch.zeros(rows, self.heads, self.features, value_size, dtype=dtype, device=device))

    def parallel(self, q, k, v, *, state=None, mask=None, starts=None, causal=True, normalized=True):
        assert starts is None
        assert causal
        assert normalized
        state = self.empty(k.shape[0], v.shape[3], v.dtype, v.device) if state is None else state
        outs = []
        for t in range(k.shape[2]):
            state = self.advanced(state, k, v, mask, t)
            read = state.fast.repeat_interleave(q.shape[1] // self.heads, dim=1)
            outs.append(torch.einsum("bhf,bhfv->bhv", q[:, :, t], read))
        return torch.stack(outs, dim=2), state

    def step(self, q, k, v, state, *, mask=None, inplace=False, features=None, normalized=True):
        assert features is None
        out, new = self.parallel(q, k, v, state=state, mask=mask, normalized=normalized)
        if inplace:
            state.fast.copy_(new.fast)
            new = state
        return out, new

    def replay(self, state, k, v, mask):
        for t in range(k.shape[2]):
            state = self.advanced(state, k, v, mask, t)
        return state

    def advanced(self, state, k, v, mask, t):
        key = torch.nn.functional.normalize(k[:, :, t], dim=-1)
        faded = state.fast * self.gate[:, t, None, None, None]
        error = v[:, :, t] - torch.einsum("bhf,bhfv->bhv", key, faded)
        new = faded + 0.5 * key[..., None] * error[:, :, None]
        return Fast(new if mask is None else torch.where(mask[:, t, None, None, None].bool(), new, state.fast))


class GatedMap(AffineMap):
    state_type = Fast

    def rule(self, hidden_states=None):
        gate = hidden_states.mean(-1).mul(20).sigmoid()
        return GatedDelta(self.key_heads, self.feature_size, gate)

    def empty_state(self, rows, value_size, dtype, device):
        return GatedDelta(self.key_heads, self.feature_size, torch.empty(0)).empty(rows, value_size, dtype, device)

    def step_features(self, scaling):
        return None


def gated(model_type, **options):
    model = t2r.swap(tiny(model_type, torch.float64), feature_size=8, recurrent="both", **options).eval()
    for site in recurrent_sites(model):
        site.feature_map.__class__ = type("Gated", (GatedMap, type(site.feature_map)), {})
    return model


families = pytest.mark.parametrize("model_type", ["llama", "gpt2"])


@families
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generation_is_recomputation(model_type, options):
    model, inputs = gated(model_type, softmax_layers=[1]), batch(model_type, padding="left")
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 6} | options
    expected = model.generate(**inputs, **options, use_cache=False)
    assert torch.equal(model.generate(**inputs, **options), expected)
    assert torch.equal(t2r.Engine(model).generate(**inputs, **options), expected)
    assert len({tuple(row) for row in expected[:, -6:].tolist()}) > 1


@families
def test_tokens_are_removed_with_the_gates_of_their_own_calls(model_type):
    model, ids = gated(model_type), batch(model_type, padding=None)["input_ids"]
    ids[ids == EOS] += 1

    def read(*lengths):
        cache, done = model.make_cache(), 0
        cache.activate_past_recording()
        with torch.no_grad():
            for length in lengths:
                model(ids[:, done : done + length], past_key_values=cache, use_cache=True)
                done += length
        return cache

    cache, expected = read(3, 2, 1, 3), read(4)
    cache.crop(-5)
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        torch.testing.assert_close(layer.recurrence.state.fast, other.recurrence.state.fast)


def test_its_states_are_saved_and_continued(tmp_path):
    model, ids = gated("llama"), batch("llama", padding=None)["input_ids"][:1]
    cache = model.make_cache()
    with torch.no_grad():
        model(ids[:, :5], past_key_values=cache, use_cache=True)
        cache.save(tmp_path / "state")
        loaded = model.load_state(tmp_path / "state")
        for own in (cache, loaded):
            found = model(ids[:, 5:], past_key_values=own, use_cache=True).logits
            torch.testing.assert_close(found, model(ids, use_cache=False).logits[:, 5:])
    assert loaded.nbytes == cache.nbytes
