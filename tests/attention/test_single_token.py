"""The faster code paths, for single tokens and without rotation, give the same results."""

import pytest
import torch

import t2r
from families import batch, tiny
from t2r.attention.masks import fixed_mask
from t2r.attention.recurrence import recurrent_sites
from t2r.feature_maps import make_feature_map, repeat_heads
from t2r.ops import State, normalize, reference, step

PLAIN = ["gemma", "granite", "llama", "mistral", "phi", "qwen2", "stablelm"]


@pytest.mark.parametrize("model_type", PLAIN)
@torch.no_grad()
def test_no_rotation_is_a_rotation_by_zero(model_type):
    model = t2r.swap(tiny(model_type, torch.float64), feature_size=8, recurrent="both", rotary=False).eval()
    given = batch(model_type, padding="left")
    sites = recurrent_sites(model)
    assert all(site.direct for site in sites)
    direct = model(**given).logits
    for site in sites:
        site.direct = False
    torch.testing.assert_close(direct, model(**given).logits, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "olmo"])
def test_the_stock_forward_is_used_if_the_map_does_not_follow_the_projections(model_type):
    rotary = model_type == "llama"
    model = t2r.swap(tiny(model_type, torch.float64), feature_size=8, recurrent="both", rotary=rotary)
    assert not any(site.direct for site in recurrent_sites(model))


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("key_weights", [True, False])
@pytest.mark.parametrize("name", ["t2r", "hedgehog"])
def test_the_map_of_one_token(name, grouped, shared, key_weights):
    options = {"feature_size": 8, "grouped": grouped, "shared": shared, "key_weights": key_weights, "init": "paper"}
    made = make_feature_map(name, num_heads=6, num_key_value_heads=2, head_dim=4, **options).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    q, k = torch.randn(3, 6, 1, 4).double(), torch.randn(3, 2, 1, 4).double()
    for rows in (3, 1):
        expected = made(q[:rows], k[:rows])
        with torch.no_grad():
            for got in (made(q[:rows], k[:rows]), made.of_token(q[:rows], k[:rows])):
                for own, other in zip(got, expected, strict=True):
                    torch.testing.assert_close(own, other.detach(), rtol=1e-12, atol=1e-12)


def test_heads_are_repeated_one_by_one():
    x = torch.randn(2, 3, 4, 5)
    assert torch.equal(repeat_heads(x, 6), x.repeat_interleave(2, dim=1))
    assert repeat_heads(x, 3) is x


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("decay", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@torch.no_grad()
def test_a_step_in_place_is_the_step(heads, decay, padded):
    q, k, v = torch.rand(3, heads, 1, 8), torch.rand(3, 2, 1, 8), torch.randn(3, 2, 1, 5)
    q[1] = 0  # all weights are zero
    rates = torch.rand(2, 8) if decay else None
    one = State(torch.randn(3, 2, 8, 5), torch.rand(3, 2, 8))
    other = one.map(torch.clone)
    mask = torch.tensor([[True], [True], [False]]) if padded else None
    out, _ = step(q, k, v, one, mask=mask, decay=rates, inplace=True)
    sums, _ = reference.step(q, k, v, other, mask=mask, decay=rates, inplace=True)
    expected = normalize(sums, v.dtype)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(one.s, other.s)
    torch.testing.assert_close(one.z, other.z)


@pytest.mark.parametrize("kept", [None, [1]])
def test_generated_tokens_need_no_mask(kept):
    """A token that `generate` appended is not padding, so only softmax layers need the mask of the prompt."""
    model = t2r.swap(tiny("llama", torch.float64), feature_size=8, softmax_layers=kept).eval()
    masks = []
    model.register_forward_pre_hook(lambda _, args, given: masks.append(given["attention_mask"]), with_kwargs=True)
    given = batch("llama", padding="left")
    asked = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    made = model.generate(**given, **asked, output_logits=True, return_dict_in_generate=True)
    assert [mask is None for mask in masks] == [False, kept is None, kept is None]
    new = made.sequences[:, given["input_ids"].shape[1] :]
    mask = torch.cat([given["attention_mask"], torch.ones_like(new)], dim=1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    whole = model(made.sequences, attention_mask=mask, position_ids=positions).logits[:, -4:-1]
    torch.testing.assert_close(torch.stack(made.logits, 1).double(), whole, rtol=1e-6, atol=1e-6)


def test_the_mask_of_a_window_is_that_of_its_last_tokens():
    """A layer with a sliding window has fewer keys than the mask has columns."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1]])
    assert fixed_mask(torch.tensor(6), 3, mask).tolist() == [[True, False, True]]
    assert fixed_mask(torch.tensor(2), 5, mask[:, :3]).tolist() == [[False, False, True, False, False]]
