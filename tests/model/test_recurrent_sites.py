"""What becomes recurrent is a choice: causal attention, cross attention, or both."""

import copy
import json

import pytest
import torch

import t2r
from families import PAD, VOCABULARY, tiny
from t2r.attention.recurrence import exact_attention, recurrent_sites
from t2r.errors import T2RError
from t2r.reporting.inspection import inspect_model

both = pytest.mark.parametrize("recurrent", ["causal", "cross"])
SIZES = {"feature_size": 4}
OF_CROSS = SIZES | {"cross_feature_size": 6}
families = pytest.mark.parametrize("name", ["marian", "bart", "t5", "fsmt"])


def inputs(rows=3, source=9, target=7):
    torch.manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (rows, source))
    mask = torch.ones_like(ids)
    ids[0, 5:], mask[0, 5:] = PAD, 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "decoder_input_ids": torch.randint(3, VOCABULARY, (rows, target)),
    }


def swapped(name, recurrent):
    base, sizes = tiny(name, torch.float32).eval(), SIZES if recurrent == "causal" else OF_CROSS
    return base, t2r.swap(copy.deepcopy(base), **sizes, recurrent=recurrent).eval()


@both
@families
def test_only_these_sites_have_maps(name, recurrent):
    base, model = swapped(name, recurrent)
    layers = model.count_layers()
    sizes = [site.feature_map.feature_size for site in recurrent_sites(model)]
    assert sizes == [6 if recurrent == "cross" else 4] * layers
    rows = inspect_model(model).sites
    assert [(row.cross, row.recurrent) for row in rows] == [
        (cross, cross == (recurrent == "cross")) for _ in range(layers) for cross in (False, True)
    ]
    given = inputs()
    with torch.no_grad(), exact_attention(model):
        exact = model(**given, use_cache=False).logits
    with torch.no_grad():
        expected = base(**given, use_cache=False).logits
        ours = model(**given, use_cache=False).logits
    torch.testing.assert_close(exact, expected, atol=1e-4, rtol=1e-4)
    assert (ours - expected).abs().max() > 1e-3


@both
@families
def test_token_by_token_is_all_at_once(name, recurrent):
    _, model = swapped(name, recurrent)
    given = inputs()
    with torch.no_grad():
        whole = model(**given, use_cache=False).logits
        cache, steps = model.make_cache(), []
        encoded = model.get_encoder()(input_ids=given["input_ids"], attention_mask=given["attention_mask"])
        for i in range(whole.shape[1]):
            out = model(
                encoder_outputs=encoded,
                attention_mask=given["attention_mask"],
                decoder_input_ids=given["decoder_input_ids"][:, i : i + 1],
                past_key_values=cache,
                use_cache=True,
            )
            steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-4, rtol=1e-4)


@both
def test_it_is_saved_merged_and_generates(tmp_path, recurrent):
    _, model = swapped("marian", recurrent)
    given = {name: x for name, x in inputs().items() if name != "decoder_input_ids"}
    options = {"num_beams": 2, "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**given, **options)
    model.save_pretrained(tmp_path)
    again = t2r.load(str(tmp_path))
    assert again.t2r_config.recurrent == recurrent
    assert torch.equal(again.generate(**given, **options), expected)
    t2r.merge(again, force=True)
    assert torch.equal(again.generate(**given, **options), expected)


def test_cross_attention_stays_exact_by_default():
    model = t2r.swap(tiny("marian"), feature_size=4)
    assert model.t2r_config.recurrent == "causal"
    assert len(recurrent_sites(model)) == model.count_layers()


def test_both_and_its_former_name(tmp_path):
    """Until `both`, the option was a list; before that, there was none, and both became recurrent."""
    models = [t2r.swap(tiny("marian"), **OF_CROSS, recurrent=word) for word in ("both", "causal,cross")]
    assert [model.t2r_config.recurrent for model in models] == ["both", "both"]
    models[0].save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["recurrent"] == "both"
    for former in ({"recurrent": "causal,cross"}, {}):
        rest = {name: value for name, value in saved.items() if name != "recurrent"}
        (tmp_path / "config.json").write_text(json.dumps(rest | former))
        again = t2r.load(str(tmp_path))
        assert again.t2r_config.recurrent == "both"
        assert len(recurrent_sites(again)) == 2 * again.count_layers()


def test_mistakes():
    with pytest.raises(T2RError, match="cross_feature_size=6 changes nothing: cross attention stays exact"):
        t2r.swap(tiny("marian"), **OF_CROSS)
    with pytest.raises(T2RError, match="recurrent=cross: gpt2 has no such attention"):
        t2r.swap(tiny("gpt2"), recurrent="cross")
    with pytest.raises(T2RError, match="recurrent"):
        t2r.swap(tiny("marian"), recurrent="encoder")
    kept = t2r.swap(tiny("gpt2"), recurrent="causal")
    assert len(recurrent_sites(kept)) == kept.count_layers()
