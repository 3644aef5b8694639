"""Windows and states by head: however a text is read, batched, padded, saved or continued, the logits are the same."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import t2r
from families import VOCABULARY, tiny
from t2r.attention.recurrence import Recurrence, recurrent_sites
from t2r.generation.engine import Engine
from t2r.plans import MemoryPlan

HOW = {"activation": "softmax", "init": "identity", "key_weights": True, "shared": False, "decay": True}
FAMILIES = ("llama", "gpt2", "gpt_neox", "gemma2", "gptj", "opt", "marian")
TIME = 23


def plans(heads: int) -> dict[str, dict]:
    def rows(*rows: tuple[int, int]) -> list[list[int]]:
        return [list(itertools.islice(itertools.cycle(row), heads)) for row in rows]

    windows = rows((3, 7), (5, 5), (0, 9))
    states = [[size == 0 or bool(i % 2) for i, size in enumerate(row)] for row in windows]
    states[1] = [False] * heads
    return {
        "states": {"windows": windows, "sinks": 2},
        "some states": {"windows": windows, "sinks": 1, "states": states},
        "windows alone": {"windows": rows((3, 7), (1, 1), (30, 9)), "sinks": 2, "states": [[False] * heads] * 3},
        "8 bits": {"windows": windows, "sinks": 2, "nbits": 8},
        "a state alone": {"windows": rows((0, 0), (4, 4), (1, 2))},
    }


KINDS = tuple(plans(4))


def planned(model_type: str, kind: str = "states", dtype: torch.dtype = torch.float64, **options):
    base = tiny(model_type, dtype)
    family = t2r.surgery.adapters.family_of(base)
    heads = family.shape(next(iter(family.sites(base))).module).num_key_value_heads
    model = t2r.swap(base, feature_size=6, plan=plans(heads)[kind], **{**HOW, **options}).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # the weights of queries and keys start at zero, where they have no effect
        for site in recurrent_sites(model):
            for parameter in site.feature_map.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return model


def text(rows: int = 2, time: int = TIME, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, time), generator=torch.Generator().manual_seed(seed))


def inputs(model, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the inputs of a forward: of an encoder-decoder, with a source."""
    if not model.config.is_encoder_decoder:
        return {"input_ids": ids}
    return {"input_ids": text(ids.shape[0], 5, seed=9), "decoder_input_ids": ids}


def whole(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs(model, ids), use_cache=False).logits


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", FAMILIES)
@torch.no_grad()
def test_a_text_in_parts(model_type, kind):
    model, ids = planned(model_type, kind), text()
    expected = whole(model, ids)
    for pieces in ([23], [1, 22], [2, 9, 12], [9, 1, 1, 1, 1, 1, 9], [1] * 23):
        cache, found = model.make_cache(), []
        for part in ids.split(pieces, dim=1):
            found.append(model(**inputs(model, part), past_key_values=cache).logits)
        assert_same(torch.cat(found, dim=1), expected)
        assert cache.get_seq_length() == TIME


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2"])
@torch.no_grad()
def test_a_static_cache(model_type, kind):
    """Rows start at different times, from prefills of different lengths."""
    model, ids = planned(model_type, kind), text(3)
    expected, cache = whole(model, ids), model.make_static_cache(rows=3, max_length=TIME)
    starts = [1, 12, 4]
    for row, start in enumerate(starts):
        cache.put(row, model(ids[row : row + 1, :start], use_cache=True).past_key_values)
    for i in range(10):
        tokens = torch.stack([ids[row, start + i] for row, start in enumerate(starts)])[:, None]
        logits = model(tokens, past_key_values=cache, **cache.step_inputs()).logits[:, 0]
        assert_same(logits, torch.stack([expected[row, start + i] for row, start in enumerate(starts)]))
    for row, start in enumerate(starts):
        taken = cache.take(row)
        rest = model(ids[row : row + 1, start + 10 :], past_key_values=taken).logits
        assert_same(rest, expected[row : row + 1, start + 10 :])


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {"plan": plans(2)["states"]}),
        ("opt", {"plan": plans(4)["some states"]}),
        ("mistral", {"softmax_layers": [0]}),
    ],
)
@torch.no_grad()
def test_padded_prompts_in_a_static_cache(model_type, options):
    """Lengths of a static cache count padding, and windows do not."""
    model = t2r.swap(tiny(model_type), feature_size=6, **options).eval()
    ids, mask = text(3, 12), torch.ones(3, 12, dtype=torch.long)
    mask[1, :7], mask[2, :2] = 0, 0
    how = {"attention_mask": mask, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **how)
    assert torch.equal(model.generate(ids, **how, cache_implementation="static"), expected)

    cache = model.make_static_cache(rows=3, max_length=40)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    taken, other = cache.take(1), model.make_static_cache(rows=2, max_length=40)
    other.put(1, cache, 1)
    other.put(0, cache, 2)
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    assert cache.layers[0].window.seen.tolist() == [5, 5, 12]
    assert other.lengths.tolist() == [10, 5]
    alone = model(ids[1:2, 7:], use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
    expected = model(torch.cat([ids[1:2, 7:], alone], dim=1), use_cache=False).logits[:, -1]
    assert_same(model(alone, past_key_values=taken).logits[:, -1], expected)
    assert_same(model(alone.expand(2, 1), past_key_values=other, **other.step_inputs()).logits[1:, -1], expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", ["llama", "gpt_neox"])
@torch.no_grad()
def test_padding(model_type, kind):
    """Padding anywhere changes nothing, and neither do its places in two prompts."""
    model, ids = planned(model_type, kind), text()
    for padded in ([0, 1, 2, 3, 4, 5], [17, 18], [0, 7, 8, 20]):
        mask = torch.ones_like(ids)
        mask[1, padded] = 0
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        alone = whole(model, ids[1:, mask[1].bool()])[0]
        given = {"attention_mask": mask, "position_ids": positions}
        assert_same(model(ids, **given, use_cache=False).logits[1, mask[1].bool()], alone)
        cache, found = model.make_cache(), []
        for start, end in ((0, 8), (8, 19), (19, 20), (20, TIME)):
            part = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
            found.append(model(ids[:, start:end], **part, past_key_values=cache).logits)
        assert_same(torch.cat(found, dim=1)[1, mask[1].bool()], alone)
        if cache.padding.is_known:
            more = text(1, 3, seed=4)
            again = model(more, past_key_values=cache.take(1)).logits
            assert_same(again, whole(model, torch.cat([ids[1:, mask[1].bool()], more], dim=1))[:, -3:])


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@torch.no_grad()
def test_packed_documents(model_type):
    model, ids = planned(model_type), text()
    positions = torch.cat([torch.arange(9), torch.arange(14)])[None].expand(2, -1)
    packed = model(ids, position_ids=positions, use_cache=False).logits
    assert_same(packed, torch.cat([whole(model, ids[:, :9]), whole(model, ids[:, 9:])], dim=1))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_removing_tokens(kind):
    model, ids = planned("llama", kind), text()
    expected, cache = whole(model, ids), model.make_cache()
    model(ids[:, :4], past_key_values=cache)
    cache.activate_past_recording()
    model(ids[:, 4:12], past_key_values=cache)
    for t in (12, 13):
        model(ids[:, t : t + 1], past_key_values=cache)
    cache.crop(-5)
    assert cache.get_seq_length() == 9
    model(text(2, 3, seed=5), past_key_values=cache)
    cache.crop(-3)
    assert_same(model(ids[:, 9:], past_key_values=cache).logits, expected[:, 9:])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_states_are_saved_forked_stacked_and_continued(kind, tmp_path):
    model, ids = planned("llama", kind), text(2, 12)
    caches = [model(ids[:1], use_cache=True).past_key_values, model(ids[1:, :7], use_cache=True).past_key_values]
    more = text(2, 4, seed=3)
    caches[0].save(tmp_path / "state")
    loaded = model.load_state(tmp_path / "state")
    assert all(
        torch.equal(x, y)
        for mine, other in zip(loaded.layers, caches[0].layers, strict=True)
        for x, y in zip(mine.tensors().values(), other.tensors().values(), strict=True)
    )
    together = t2r.T2RCache.stack([loaded, caches[1]]).fork(2)
    found = model.continue_from(together, more.repeat_interleave(2, dim=0), max_new_tokens=9, do_sample=False)
    for row, start in enumerate((12, 7)):
        prompt = torch.cat([ids[row : row + 1, :start], more[row : row + 1]], dim=1)
        alone = model.generate(prompt, max_new_tokens=9, do_sample=False, use_cache=False)
        assert torch.equal(found[2 * row], alone[0, start:])
        assert torch.equal(found[2 * row + 1], alone[0, start:])
    assert caches[0].nbytes == sum(layer.row_bytes(12) for layer in caches[0].layers) + seen_bytes(caches[0])


@torch.no_grad()
def test_a_state_of_other_bits_is_refused(tmp_path):
    caches = []
    for kind, other in itertools.permutations(("states", "8 bits")):
        model = planned("llama", kind)
        caches.append(model.make_cache())
        model(text(1, 12), past_key_values=caches[-1])
        caches[-1].save(tmp_path / "state")
        with pytest.raises(t2r.T2RError, match="the state of another model"):
            planned("llama", other).load_state(tmp_path / "state")
    wide, narrow = (cache.layers[0].window for cache in caches)
    with pytest.raises(ValueError, match="of this number of bits"):
        narrow.check(wide.tensors())
    for name, x in (("scales", narrow.scales[:, :3]), ("keys", narrow.keys.float()), ("scales", narrow.scales.long())):
        with pytest.raises(ValueError, match="of this number of bits"):
            narrow.check(narrow.tensors() | {name: x})


def seen_bytes(cache) -> int:
    """Return what is not part of a row in the engine: the count of tokens, and slots that are not filled yet."""
    unused = 0
    for layer in cache.layers:
        if layer.window is not None:
            unused += layer.window.seen.nbytes
            unused += layer.row_bytes(10**6) - layer.row_bytes(12)
    return unused


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "marian"])
@pytest.mark.parametrize("beams", [1, 3])
def test_the_engine(model_type, kind, beams):
    model, ids = planned(model_type, kind), text(3, 9)
    mask = torch.ones_like(ids)
    if not model.config.is_encoder_decoder:
        ids[1, :4], mask[1, :4] = 0, 0
    how = {"attention_mask": mask, "max_new_tokens": 16, "min_new_tokens": 16, "num_beams": beams, "do_sample": False}
    expected = model.generate(ids, **how, use_cache=False) if beams == 1 else model.generate(ids, **how)
    assert torch.equal(Engine(model).generate(ids, **how), expected)


def test_a_window_alone_is_exact_attention_to_it():
    """With windows as long as the text, the logits are those of the base model, whatever the maps are."""
    for model_type in FAMILIES:
        base, ids = tiny(model_type, torch.float64).eval(), text()
        expected = whole(base, ids)
        family = t2r.surgery.adapters.family_of(base)
        heads = family.shape(next(iter(family.sites(base))).module).num_key_value_heads
        model = t2r.swap(base, feature_size=6, **HOW, plan={"windows": [[TIME] * heads] * 3, "sinks": 1})
        if model_type != "gemma2":  # it has a sliding window of its own in some layers
            # GPT-NeoX and others compute the softmax of stock attention in float32.
            assert (whole(model, ids) - expected).abs().max() < 1e-5 * expected.abs().max()
        with t2r.exact_attention(model):
            assert (whole(model, ids) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("model_type", ["llama", "marian"])
def test_saving_and_loading(model_type, tmp_path):
    model = planned(model_type, "some states")
    model.save_pretrained(tmp_path / "model")
    fields = json.loads((tmp_path / "model" / "config.json").read_text())
    assert fields["format"] == 3
    kind = AutoModelForSeq2SeqLM if model_type == "marian" else AutoModelForCausalLM
    loaded = kind.from_pretrained(tmp_path / "model", dtype=torch.float64)
    assert loaded.t2r_config.plan == model.t2r_config.plan
    assert_same(whole(loaded, text()), whole(model, text()))


def test_gradients_reach_every_parameter():
    model, ids = planned("llama", "some states"), text()
    model(ids, labels=ids, use_cache=False).loss.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not missing
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_heads_without_a_state_have_no_map():
    model = planned("llama", "some states")
    sites = [m for m in model.modules() if isinstance(m, Recurrence)]
    assert [site.has_map for site in sites] == [True, False, True]
    assert [site.stateful for site in sites] == [(1,), (), (0, 1)] or sites[2].stateful in (None, (0,), (1,))
    assert sites[0].feature_map.num_key_value_heads == 1


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"windows": [[3, 3]] * 2}, "it has 2 layers, and the model 3"),
        ({"windows": [[3]] * 3}, "layer 0 has 1 windows, and the model 2 key-value heads"),
        ({"windows": [[3, -1]] * 3}, "0 or more"),
        ({"windows": [[3, 1.5]] * 3}, "whole number"),
        ({"windows": 3}, "lists of lists"),
        ({"windows": [[0, 3]] * 3, "states": [[False, True]] * 3}, "requires a state"),
        ({"windows": [[3, 3]] * 3, "states": [[True]] * 3}, "a value for each window"),
        ({"windows": [[3, 3]] * 3, "sinks": -1}, "sinks"),
        ({"windows": [[3, 3]] * 3, "nbits": 4}, "nbits must be 8 or 16; got 4"),
        ({"windows": [[3, 3]] * 3, "nbits": True}, "nbits must be 8 or 16; got True"),
        ({"window": [[3, 3]] * 3}, "expected a mapping"),
        ("8MiB", "expected a mapping"),
    ],
)
def test_plans_that_do_not_fit_are_refused(plan, message):
    base = tiny("llama")
    with pytest.raises(t2r.T2RError, match=message):
        t2r.swap(base, plan=plan)
    assert not isinstance(base, t2r.SwappedModel)


def test_options_that_a_plan_excludes():
    plan = {"windows": [[3, 3]] * 3}
    for options, message in (
        ({"softmax_layers": [1]}, "softmax_layers"),
        ({"rotary": False}, "rotary=True"),
        ({"feature_map": "rfa"}, "negative features"),
    ):
        with pytest.raises(t2r.T2RError, match=message):
            t2r.swap(tiny("llama"), plan=plan, **options)
    with pytest.raises(t2r.T2RError, match="bias on the scores"):
        t2r.swap(tiny("t5"), plan={"windows": [[3] * 4] * 3})
    with pytest.raises(t2r.T2RError, match="cannot be merged"):
        t2r.merge(planned("gpt2"))


def test_a_plan_is_read_from_its_own_form():
    plan = MemoryPlan(((3, 0), (1, 2)), 2, ((True, True), (False, True)))
    for each in (plan, replace(plan, nbits=8)):
        assert MemoryPlan.of(json.loads(json.dumps(each.to_dict()))) == each
    assert "nbits" not in plan.to_dict()  # earlier versions read it
    assert [plan.stateful(i) for i in (0, 1)] == [(0, 1), (1,)]
