"""Operations on states: save, load, fork, take, stack and crop."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.cache_utils import DynamicCache

import t2r
from families import EOS, VOCABULARY, batch, is_seq2seq, tiny
from processes import same_threads
from t2r.attention.cache import SiteLayer, cache_bytes
from t2r.attention.masks import Padding
from t2r.attention.state_file import FORMAT

GREEDY = {"do_sample": False, "eos_token_id": None}


def swapped(model_type, dtype=torch.float64, **options):
    return t2r.swap(tiny(model_type, dtype), **{"feature_size": 8, "recurrent": "both", "init": "identity"} | options)


def text(rows=1, length=12, seed=0):
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def read(model, ids, attention_mask=None, record=False):
    """Return a cache that has processed these tokens, at the positions that `generate` uses."""
    options, cache = {}, model.make_cache()
    if record:
        cache.activate_past_recording()
    if attention_mask is not None:
        positions = (attention_mask.cumsum(1) - 1).clamp_min(0)
        options = {"attention_mask": attention_mask, "position_ids": positions}
    with torch.no_grad():
        return model(ids, past_key_values=cache, **options).past_key_values


def contents(cache):
    return {
        f"{name}.{i}.{key}": value
        for name, layers in cache.parts().items()
        for i, layer in enumerate(layers)
        for key, value in layer.tensors().items()
    }


def assert_alike(actual, expected, tolerance=0.0):
    mine, theirs = contents(actual), contents(expected)
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert mine[name].shape == theirs[name].shape, name
        assert (mine[name] - theirs[name]).abs().max() <= tolerance, name
    assert actual.get_seq_length() == expected.get_seq_length()


pure_and_kept = pytest.mark.parametrize(
    ("model_type", "kept"),
    [("llama", None), ("llama", [0]), ("llama", [1]), ("gpt2", None), ("gpt2", [1])],
)


# --- Save and resume ----------------------------------------------------------------------------------------

MODELS = {"pure": ("llama", None), "kept": ("gpt2", [1]), "seq2seq": ("marian", [0])}

RESUME = """
import sys, torch, t2r
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from safetensors.torch import load_file, save_file
root, found = sys.argv[1], {}
for name in sys.argv[2:]:
    auto = AutoModelForSeq2SeqLM if name == "seq2seq" else AutoModelForCausalLM
    model = auto.from_pretrained(f"{root}/{name}")
    cache, given = model.load_state(f"{root}/{name}.state"), load_file(f"{root}/{name}.tokens")
    found[name] = model.generate(**given, past_key_values=cache, max_new_tokens=6, do_sample=False, eos_token_id=None)
save_file(found, f"{root}/found")
"""


def test_another_process_resumes_and_finds_the_same_tokens(tmp_path):
    expected = {}
    for name, (model_type, kept) in MODELS.items():
        model = swapped(model_type, softmax_layers=kept)
        model.save_pretrained(tmp_path / name)
        inputs = {
            k: v
            for k, v in batch(model_type, padding="right" if name == "seq2seq" else "left").items()
            if k != "decoder_input_ids"
        }
        expected[name] = model.generate(**inputs, **GREEDY, max_new_tokens=11)
        first = model.generate(**inputs, **GREEDY, max_new_tokens=5, return_dict_in_generate=True)
        first.past_key_values.save(tmp_path / f"{name}.state")
        written = {("decoder_input_ids" if name == "seq2seq" else "input_ids"): first.sequences}
        if name != "seq2seq":
            inputs["attention_mask"] = torch.cat([inputs["attention_mask"], torch.ones(3, 5).long()], dim=1)
        save_file({k: v.contiguous() for k, v in (inputs | written).items()}, tmp_path / f"{name}.tokens")
    subprocess.run(
        [sys.executable, "-c", RESUME, str(tmp_path), *MODELS],
        env=same_threads(),
        check=True,
    )
    found = load_file(tmp_path / "found")
    for name in MODELS:
        assert torch.equal(found[name], expected[name]), name


@pure_and_kept
def test_a_saved_state_is_the_state(model_type, kept, tmp_path):
    model = swapped(model_type, softmax_layers=kept)
    inputs = batch(model_type)
    cache = read(model, inputs["input_ids"], attention_mask=inputs["attention_mask"])
    cache.save(tmp_path / "state")
    again = model.load_state(tmp_path / "state")
    assert_alike(again, cache)
    assert all(map(torch.equal, again.padding, cache.padding))
    assert again.rows == 3
    assert again.nbytes == cache.nbytes
    assert [type(layer) for layer in again.layers] == [type(layer) for layer in cache.layers]
    assert not list(tmp_path.glob("*.tmp"))
    more = text(3, 4, seed=5)
    expected = model.continue_from(cache, more, **GREEDY, max_new_tokens=5)
    assert torch.equal(model.continue_from(again, more, **GREEDY, max_new_tokens=5), expected)


def test_a_saved_state_keeps_its_precision(tmp_path):
    model = swapped("llama", torch.bfloat16, softmax_layers=[1])
    cache = read(model, text())
    cache.save(tmp_path / "state")
    again = model.load_state(tmp_path / "state")
    assert_alike(again, cache)
    assert again.layers[0].state.s.dtype == torch.float32
    assert again.layers[1].keys.dtype == torch.bfloat16


def test_a_sliding_window_is_saved_too(tmp_path):
    model = swapped("mistral", softmax_layers=[1])
    ids = text(2, 12)
    cache = read(model, ids)
    cache.save(tmp_path / "state")
    more = text(2, 3, seed=5)
    expected = model.generate(torch.cat([ids, more], dim=1), **GREEDY, max_new_tokens=8)[:, 12:]
    actual = model.continue_from(model.load_state(tmp_path / "state"), more, **GREEDY, max_new_tokens=8)
    assert torch.equal(actual, expected)


def test_an_empty_state_is_saved_too(tmp_path):
    model = swapped("llama")
    model.make_cache().save(tmp_path / "state")
    again = model.load_state(tmp_path / "state")
    assert (again.get_seq_length(), again.rows, again.nbytes) == (0, 0, 0)


def test_extended_positions_do_not_change_the_fingerprint(tmp_path):
    """The table of positions of Marian grows with the sequence, and saved states still load."""
    model, source = swapped("marian"), batch("marian", size=1)["input_ids"]
    out = model.generate(source, **GREEDY, max_length=70, return_dict_in_generate=True)
    out.past_key_values.save(tmp_path / "state")
    swapped("marian").load_state(tmp_path / "state")


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1, "init": "paper"},
        {"feature_size": 16},
        {"feature_map": "hedgehog"},
        {"activation": "tanh"},
        {"shared": False},
        {"grouped": False},
        {"softmax_layers": [0]},
        {"feature_map": "elu", "feature_size": None, "init": None},
    ],
    ids=str,
)
def test_a_state_of_another_model_is_refused(other, tmp_path):
    model = swapped("llama")
    read(model, text()).save(tmp_path / "state")
    refused(swapped("llama", **other), tmp_path / "state", "is the state of another model")


def test_options_that_leave_no_trace_in_the_weights_are_told_apart(tmp_path):
    options = {"feature_map": "elu", "feature_size": None, "init": None}
    model = swapped("llama", **options, softmax_layers=[0])
    read(model, text()).save(tmp_path / "state")
    refused(swapped("llama", **options, softmax_layers=[1]), tmp_path / "state", "another model")


def test_other_weights_make_another_model(tmp_path):
    model = swapped("llama")
    read(model, text()).save(tmp_path / "state")
    model.load_state(tmp_path / "state")
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.add_(1e-3)
    refused(model, tmp_path / "state", "another model")
    refused(swapped("llama", torch.float32), tmp_path / "state", "another model")
    refused(swapped("gpt2"), tmp_path / "state", "another model")


def refused(model, path, match):
    with pytest.raises(t2r.T2RError, match=match) as caught:
        model.load_state(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_a_state_is_refused(tmp_path):
    model, path = swapped("llama"), tmp_path / "state"
    refused(model, path, "there is no file")
    path.mkdir()
    refused(model, path, "there is no file")
    path.rmdir()
    path.write_text("a text, which is no state at all")
    refused(model, path, "is not a saved state, or is truncated")
    save_file({"x": torch.zeros(2)}, path)
    refused(model, path, "a safetensors file, but not a saved state")
    path.unlink()  # a state replaces nothing but a state
    read(model, text()).save(path)
    whole = path.read_bytes()
    for length in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        refused(model, path, "is not a saved state, or is truncated")


def test_another_format_is_refused(tmp_path):
    model, path = swapped("llama"), tmp_path / "state"
    read(model, text()).save(path)
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["t2r_state"])
    held = load_file(path)
    save_file(held, path, metadata={"t2r_state": json.dumps(header | {"format": FORMAT + 1})})
    refused(model, path, f"state format {FORMAT + 1}; this version of t2r supports up to {FORMAT}")
    held.pop("self.1.s")
    save_file(held, path, metadata={"t2r_state": json.dumps(header)})
    refused(model, path, "damaged")
    save_file(held, path, metadata={"t2r_state": "{"})
    refused(model, path, "not a saved state")


def test_a_cache_without_a_model_cannot_be_saved(tmp_path):
    with pytest.raises(t2r.T2RError, match="this cache has no model"):
        t2r.T2RCache([SiteLayer()]).save(tmp_path / "state")


def test_a_state_that_cannot_be_written(tmp_path):
    model = swapped("llama")
    with pytest.raises(t2r.T2RError, match="cannot be written"):
        read(model, text()).save(tmp_path / "nowhere" / "state")


# --- Fork, take, stack --------------------------------------------------------------------------------------


@pure_and_kept
def test_one_state_many_continuations(model_type, kept):
    model, ids = swapped(model_type, softmax_layers=kept), text()
    cache = read(model, ids)
    before = copy.deepcopy(cache)
    questions = text(4, 3, seed=9)
    answers = model.continue_from(cache, questions, **GREEDY, max_new_tokens=5)
    whole = model.generate(torch.cat([ids.expand(4, -1), questions], dim=1), **GREEDY, max_new_tokens=5)[:, 12:]
    assert torch.equal(answers, whole)
    assert_alike(cache, before)
    many = cache.fork(4)
    assert many.rows == 4
    assert torch.equal(model.continue_from(many, questions, **GREEDY, max_new_tokens=5), answers)
    assert_alike(cache, before)
    for row in range(4):
        alone = model.continue_from(cache, questions[row : row + 1], **GREEDY, max_new_tokens=5)
        assert torch.equal(alone[0], answers[row])
    again = model.continue_from(cache, questions, **GREEDY, max_new_tokens=5)  # the cache did not change
    assert torch.equal(again, answers)


def test_a_fork_is_a_copy():
    """Steps update a state in place, so two caches must not share one."""
    model = swapped("llama", softmax_layers=[1])
    cache = read(model, text())
    fork, before = cache.fork(), copy.deepcopy(cache)
    with torch.no_grad():
        model(text(length=1), past_key_values=fork)
        model(text(length=1), past_key_values=fork)
    assert fork.get_seq_length() == 14
    assert_alike(cache, before)


def test_a_state_that_was_read_with_gradients():
    model = swapped("llama", softmax_layers=[1])
    cache = model(text(), past_key_values=model.make_cache()).past_key_values
    assert cache.layers[0].state.s.requires_grad
    fork = cache.fork(2)
    assert not fork.layers[0].state.s.requires_grad
    expected = model.continue_from(read(model, text()), text(2, 3, seed=1), **GREEDY, max_new_tokens=4)
    assert torch.equal(model.continue_from(fork, text(2, 3, seed=1), **GREEDY, max_new_tokens=4), expected)
    assert cache.take(0).rows == 1
    assert type(cache).stack([cache, cache]).rows == 2


@pure_and_kept
def test_one_out_of_a_padded_batch(model_type, kept):
    model, inputs = swapped(model_type, softmax_layers=kept), batch(model_type)
    cache = read(model, inputs["input_ids"], attention_mask=inputs["attention_mask"])
    for row in range(3):
        real = inputs["input_ids"][row][inputs["attention_mask"][row].bool()][None]
        alone, taken = read(model, real), cache.take(row)
        assert_alike(taken, alone, 1e-10)
        assert taken.padding is None
        more = text(1, 2, seed=row)
        expected = model.generate(torch.cat([real, more], dim=1), **GREEDY, max_new_tokens=6)
        assert torch.equal(model.continue_from(taken, more, **GREEDY, max_new_tokens=6), expected[:, real.shape[1] :])


def test_what_rearranges_the_batch_rearranges_its_padding():
    model, inputs = swapped("llama"), batch("llama")
    cache = read(model, inputs["input_ids"], inputs["attention_mask"])
    assert cache.padding.tokens.tolist() == [0, 2, 4]
    cache.batch_repeat_interleave(2)
    assert cache.padding.tokens.tolist() == [0, 0, 2, 2, 4, 4]
    cache.batch_select_indices(torch.tensor([0, 2, 4]))
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert cache.padding.tokens.tolist() == [4, 0, 0]
    assert cache.fork(2).padding.tokens.tolist() == [4, 4, 0, 0, 0, 0]
    assert cache.attention_mask(1).sum(1).tolist() == [6, 10, 10]


@pure_and_kept
def test_states_of_different_lengths_together(model_type, kept):
    model = swapped(model_type, softmax_layers=kept)
    texts = [text(1, length, seed=length) for length in (4, 12, 1, 9)]
    states = [read(model, ids) for ids in texts]
    before = copy.deepcopy(states)
    together = t2r.T2RCache.stack(states)
    assert together.rows == 4
    assert together.padding.tokens.tolist() == [8, 0, 11, 3]
    more = text(4, 3, seed=2)
    out = model.continue_from(together, more, **GREEDY, max_new_tokens=8)
    for row, ids in enumerate(texts):
        alone = model.generate(torch.cat([ids, more[row : row + 1]], dim=1), **GREEDY, max_new_tokens=8)
        assert torch.equal(out[row], alone[0, ids.shape[1] :]), row
        assert_alike(states[row], before[row])
        assert_alike(together.take(row), states[row], 1e-10)
    # Stack two batches, each with its own padding.
    twice = t2r.T2RCache.stack([states[0], together])
    assert twice.padding.tokens.tolist() == [8, 8, 0, 11, 3]
    out_again = model.continue_from(twice, torch.cat([more[:1], more]), **GREEDY, max_new_tokens=8)
    assert torch.equal(out_again[1:], out)
    assert torch.equal(out_again[0], out[0])


@pytest.mark.parametrize("model_type", ["opt", "gpt_neox", "qwen3", "gemma3_text"])
def test_stacking_other_families(model_type):
    model = swapped(model_type)
    texts = [text(1, length, seed=length) for length in (5, 11)]
    together = t2r.T2RCache.stack([read(model, ids) for ids in texts])
    more = text(2, 2, seed=2)
    out = model.continue_from(together, more, **GREEDY, max_new_tokens=6)
    for row, ids in enumerate(texts):
        alone = model.generate(torch.cat([ids, more[row : row + 1]], dim=1), **GREEDY, max_new_tokens=6)
        assert torch.equal(out[row], alone[0, ids.shape[1] :]), row


def test_stacked_states_are_saved_and_padded_prompts_too(tmp_path):
    model = swapped("llama", softmax_layers=[2])
    texts = [text(1, length, seed=length) for length in (4, 9)]
    t2r.T2RCache.stack([read(model, ids) for ids in texts]).save(tmp_path / "state")
    together = model.load_state(tmp_path / "state")
    more, mask = text(2, 4, seed=2), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1]])
    out = model.continue_from(together, more, attention_mask=mask, **GREEDY, max_new_tokens=6)
    for row, ids in enumerate(texts):
        alone = model.generate(torch.cat([ids, more[row : row + 1]], dim=1), **GREEDY, max_new_tokens=6)
        assert torch.equal(out[row], alone[0, ids.shape[1] :])


def test_a_kept_sliding_window():
    """A window holds no padding, so rows of different lengths and paddings are independent."""
    model = swapped("mistral", softmax_layers=[1])
    texts = [text(1, 12, seed=1), text(1, 7, seed=2)]
    together = t2r.T2RCache.stack([read(model, ids) for ids in texts])
    more = text(2, 2, seed=3)
    out = model.continue_from(together, more, **GREEDY, max_new_tokens=7)
    for row, ids in enumerate(texts):
        alone = model.generate(torch.cat([ids, more[row : row + 1]], dim=1), **GREEDY, max_new_tokens=7)
        assert torch.equal(out[row], alone[0, ids.shape[1] :])
        assert_alike(together.take(row), read(model, ids), 1e-10)
    inputs = batch("mistral")
    padded = read(model, inputs["input_ids"], attention_mask=inputs["attention_mask"])
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        assert_alike(padded.take(row), read(model, inputs["input_ids"][row : row + 1, mask]), 1e-10)


@pytest.mark.parametrize("first", [1, 3, 5])
def test_padding_of_a_text_in_two_parts(first):
    masks = torch.cartesian_prod(*[torch.tensor([0, 1])] * 6)
    whole, before, after = (Padding.of(part) for part in (masks, masks[:, :first], masks[:, first:]))
    joined = before.followed_by(after, first)
    assert torch.equal(joined.tokens, whole.tokens)
    assert torch.equal(joined.start < 0, whole.start < 0)
    known, padded = whole.start >= 0, whole.tokens > 0
    assert torch.equal(joined.start[known & padded], whole.start[known & padded])
    for length in range(6):
        cut, expected = whole.map(lambda x: x[known]).cropped(length), masks[known][:, :length]
        assert torch.equal(cut.mask(length), expected)


@pure_and_kept
@pytest.mark.parametrize("way", ["continue_from", "chunks", "forward"])
def test_padding_after_the_first_tokens_is_known(model_type, kept, way, tmp_path):
    model, first, second = swapped(model_type, softmax_layers=kept), text(2, 6), text(2, 5, seed=1)
    mask = torch.ones_like(second)
    mask[1, :3] = 0
    whole = torch.cat([torch.ones_like(first), mask], dim=1)
    if way == "continue_from":
        out = model.continue_from(
            read(model, first), second, attention_mask=mask, max_new_tokens=1, return_dict_in_generate=True, **GREEDY
        )
        cache = out.past_key_values
    elif way == "chunks":  # a prompt that is padded on the left, beyond its first chunk
        whole = torch.ones(2, 11, dtype=torch.long)
        whole[1, :7] = 0
        how = {"max_new_tokens": 1, "return_dict_in_generate": True, **GREEDY}
        ids = torch.cat([first, second], dim=1)
        cache = model.generate(ids, attention_mask=whole, prefill_chunk_size=4, **how).past_key_values
    else:
        cache, positions = read(model, first), (whole.cumsum(1) - 1)[:, 6:]
        with torch.no_grad():
            # Softmax layers read a mask of all tokens, recurrent ones that of the new ones.
            model(second, attention_mask=whole if kept else mask, position_ids=positions, past_key_values=cache)
    cache.save(tmp_path / "state")
    assert torch.equal(model.load_state(tmp_path / "state").attention_mask(), whole)
    alone = read(model, torch.cat([first, second], dim=1)[1:][:, whole[1].bool()])
    assert_alike(cache.take(1), alone, 1e-12)


def test_padding_is_forgotten_with_its_tokens():
    model, mask = swapped("gpt2"), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    cache = read(model, text(2, 4), mask, record=True)
    cache.crop(-1)
    assert torch.equal(cache.attention_mask(), mask[:, :3])
    cache.reset()
    with torch.no_grad():
        model(text(2, 4), past_key_values=cache)
    assert torch.equal(cache.attention_mask(), torch.ones_like(mask))


def test_the_mask_of_a_continuation():
    model, new = swapped("llama"), text(1, 3, seed=1)
    cache = read(model, text())
    how = {"max_new_tokens": 4, **GREEDY}
    expected = model.continue_from(cache, new, **how)
    for mask in (None, torch.ones_like(new), torch.ones(1, 15, dtype=torch.long)):
        assert torch.equal(model.continue_from(cache, new, attention_mask=mask, **how), expected)
    with pytest.raises(t2r.T2RError, match="that of the new tokens, or of all tokens"):
        model.continue_from(cache, new, attention_mask=torch.ones(1, 14), **how)


@pytest.mark.parametrize("mask", [[1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1]])
def test_a_window_counts_no_padding(mask):
    model, ids = swapped("mistral", softmax_layers=[1]), text(2, 6)
    masks, more = torch.tensor([[1] * 6, mask]), text(2, 12, seed=3)
    cache = read(model, ids, masks)
    positions = masks.sum(1)[:, None] + torch.arange(12)
    with torch.no_grad():
        whole = torch.cat([masks, torch.ones_like(more)], dim=1)
        together = model(more, past_key_values=cache, attention_mask=whole, position_ids=positions).logits
        for row, real in enumerate(masks.bool()):
            alone = read(model, ids[row : row + 1, real])
            expected = model(more[row : row + 1], past_key_values=alone).logits[0]
            torch.testing.assert_close(together[row], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "falcon"])
def test_packed_documents_are_refused_with_a_given_cache(model_type):
    model = swapped(model_type)
    with pytest.raises(t2r.T2RError, match="packed documents"):
        model(text(), position_ids=torch.arange(12)[None] % 6, past_key_values=model.make_cache())


def test_states_of_different_models_are_not_stacked():
    states = [
        read(t2r.swap(tiny("llama", torch.float64), **{"feature_size": 8, **options}), text())
        for options in ({}, {"softmax_layers": [1]}, {"feature_size": 4}, {"feature_map": "rfa"})
    ]
    for other in states[1:]:
        with pytest.raises(t2r.T2RError, match="different models"):
            t2r.T2RCache.stack([states[0], other])
    empty = swapped("llama", softmax_layers=[1]).make_cache()
    with pytest.raises(t2r.T2RError, match="empty"):
        t2r.T2RCache.stack([empty, empty])


def test_what_cannot_be_stacked():
    model = swapped("llama")
    with pytest.raises(t2r.T2RError, match="at least one cache"):
        t2r.T2RCache.stack([])
    with pytest.raises(t2r.T2RError, match="empty cache"):
        t2r.T2RCache.stack([read(model, text()), model.make_cache()])


@pytest.mark.parametrize("kept", [None, [1]])
@torch.no_grad()
def test_the_states_of_an_encoder_decoder(kept):
    model = swapped("marian", softmax_layers=kept)
    inputs = batch("marian", padding=None)
    states = []
    for row in range(3):
        one = {name: x[row : row + 1] for name, x in inputs.items()}
        states.append(model(**one, past_key_values=model.make_cache()).past_key_values)
    whole = model(**inputs, past_key_values=model.make_cache()).past_key_values
    together = type(states[0]).stack(states)
    assert_alike(together, whole, 1e-10)
    assert_alike(whole.take(1), states[1], 1e-10)
    forked, before = states[0].fork(2), copy.deepcopy(states[0])
    assert forked.rows == 2
    source = {"encoder_outputs": model.get_encoder()(inputs["input_ids"])}
    new = text(3, 1)
    expected = model(**source, decoder_input_ids=new, past_key_values=whole).logits
    actual = model(**source, decoder_input_ids=new, past_key_values=together).logits
    assert (actual - expected).abs().max() < 1e-10
    assert_alike(states[0], before)
    with pytest.raises(t2r.T2RError, match="at equal lengths"):
        type(whole).stack([whole, states[0]])
    with pytest.raises(t2r.T2RError, match="continue_from supports language models"):
        model.continue_from(whole, new)


@torch.no_grad()
def test_sources_of_different_lengths():
    """States of recurrent cross attention have no length. Keys and values of softmax attention do."""
    for kept in (None, [0]):
        model = swapped("marian", softmax_layers=kept)
        start = torch.tensor([[EOS]])
        sources = [text(1, length, seed=length) for length in (4, 9)]
        states = [
            model(ids, decoder_input_ids=start, past_key_values=model.make_cache()).past_key_values for ids in sources
        ]
        if kept:
            with pytest.raises(t2r.T2RError, match="sources of different lengths"):
                type(states[0]).stack(states)
            continue
        together, new = type(states[0]).stack(states), text(2, 1)
        out = model(encoder_outputs=(torch.zeros(2, 9, 32).double(),), decoder_input_ids=new, past_key_values=together)
        for row, ids in enumerate(sources):
            written = torch.cat([start, new[row : row + 1]], dim=1)
            alone = model(ids, decoder_input_ids=written, use_cache=False).logits[0, -1]
            assert (out.logits[row, -1] - alone).abs().max() < 1e-9


# --- Continuing ---------------------------------------------------------------------------------------------

WAYS = {
    "beam": {"num_beams": 3, "do_sample": False},
    "several": {"num_return_sequences": 2, "do_sample": True},
    "several beams": {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
    "lengths": {"max_length": 16, "min_length": 15, "max_new_tokens": None, "do_sample": False},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kept", [None, [1]])
def test_continuing_is_generating_from_the_whole_text(way, kept):
    model, inputs = swapped("llama", softmax_layers=kept), batch("llama")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    cache = read(model, ids, attention_mask=mask)
    more = text(3, 3, seed=1)
    options = {"max_new_tokens": 6} | WAYS[way]
    torch.manual_seed(0)
    actual = model.continue_from(cache, more, **options)
    for name in {"max_length", "min_length"} & options.keys():
        options[name] += 9
    whole = {
        "input_ids": torch.cat([ids, more], dim=1),
        "attention_mask": torch.cat([mask, torch.ones_like(more)], 1),
    }
    torch.manual_seed(0)
    assert torch.equal(actual, model.generate(**whole, **options)[:, 9:])


def test_continuing_returns_what_generate_returns():
    model = swapped("llama")
    cache, more = read(model, text()), text(1, 3, seed=1)
    plain = model.continue_from(cache, more, **GREEDY, max_new_tokens=4)
    out = model.continue_from(cache, more, **GREEDY, max_new_tokens=4, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain)
    assert out.past_key_values.get_seq_length() == 12 + 3 + 3
    assert cache.get_seq_length() == 12


def test_a_state_and_prompts_that_do_not_match():
    model = swapped("llama")
    with pytest.raises(t2r.T2RError, match="3 prompts for a state of 2 sequences"):
        model.continue_from(read(model, text(2)), text(3, 2), max_new_tokens=2)


def test_positions_end_where_the_table_ends():
    model = swapped("gpt2")
    with pytest.raises(t2r.T2RError, match="beyond the 64 positions"):
        model.continue_from(read(model, text(1, 60)), text(1, 2), **GREEDY, max_new_tokens=5)


# --- Cropping -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature_map", ["t2r", "rfa"])  # rfa: signed features, a third tensor in the state
@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize(("model_type", "kept"), [("llama", None), ("gpt2", [1]), ("mistral", [2])])
@torch.no_grad()
def test_a_cropped_state_equals_a_state_of_fewer_tokens(model_type, kept, feature_map, decay):
    init = "identity" if feature_map == "t2r" else None
    model = swapped(model_type, softmax_layers=kept, feature_map=feature_map, init=init, decay=decay)
    ids = text(2, 14)
    for start in (0, 5):  # recording from the beginning, and from the middle
        cache = model.make_cache()
        if start:
            model(ids[:, :start], past_key_values=cache)
        cache.activate_past_recording()
        model(ids[:, start : start + 4], past_key_values=cache)
        for t in range(start + 4, start + 8):
            model(ids[:, t : t + 1], past_key_values=cache)
        cache.crop(-3)
        expected = read(model, ids[:, : start + 5])
        assert cache.get_seq_length() == start + 5
        for name, tensor in contents(expected).items():
            mine = contents(cache)[name]
            assert (
                (mine[..., -tensor.shape[-2] :, :] - tensor).abs().max() < 1e-10
                if ("keys" in name or "values" in name)
                else (mine - tensor).abs().max() < 1e-10
            ), name
        actual = model(ids[:, start + 5 : start + 9], past_key_values=cache).logits
        wanted = model(ids[:, start + 5 : start + 9], past_key_values=expected).logits
        assert (actual - wanted).abs().max() < 1e-10
        cache.crop(-4)
        again = model(ids[:, start + 5 : start + 9], past_key_values=cache).logits
        assert (again - wanted).abs().max() < 1e-10


@pytest.mark.parametrize("decay", [False, True])
@torch.no_grad()
def test_cropping_a_padded_batch(decay):
    model, inputs = swapped("llama", softmax_layers=[1], decay=decay), batch("llama")
    cache = read(model, inputs["input_ids"], inputs["attention_mask"], record=True)
    cache.crop(-2)
    expected = read(model, inputs["input_ids"][:, :7], attention_mask=inputs["attention_mask"][:, :7])
    assert_alike(cache, expected, 1e-10)


@pytest.mark.parametrize("decay", [False, True])
@torch.no_grad()
def test_beams_and_forks_of_a_recording_are_cropped_with_it(decay):
    model, ids = swapped("llama", decay=decay), text(2, 8)
    cache = model.make_cache()
    cache.activate_past_recording()
    model(ids[:, :5], past_key_values=cache)
    fork = cache.fork(2)
    model(ids[:, 5:].repeat_interleave(2, 0), past_key_values=fork)
    fork.crop(-3)
    assert_alike(fork, cache.fork(2), 1e-10)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.crop(-2)
    assert_alike(cache, read(model, ids[[1, 0], :3]), 1e-10)
    stacked = t2r.T2RCache.stack([fork, fork])
    with pytest.raises(t2r.T2RError, match="only recorded tokens can be removed"):
        stacked.crop(-1)


@pytest.mark.parametrize("kept", [None, [0]])
def test_cropping_without_a_record_is_refused(kept):
    model = swapped("llama", softmax_layers=kept)
    cache = read(model, text())
    before = copy.deepcopy(cache)
    assert not cache.is_croppable
    with pytest.raises(t2r.T2RError, match="activate_past_recording"):
        cache.crop(-2)
    assert_alike(cache, before)  # softmax layers are not cropped either
    cache.crop(0)
    cache.activate_past_recording()
    assert cache.is_croppable
    with pytest.raises(t2r.T2RError, match="0 tokens since the last crop"):
        cache.crop(-2)
    with pytest.raises((t2r.T2RError, ValueError), match="negative"):
        cache.crop(5)
    assert_alike(cache, before)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "marian"])
@pytest.mark.parametrize("kept", [None, [1]])
@pytest.mark.parametrize("decay", [{}, {"decay": True, "rotary": False}], ids=["plain", "decay"])
def test_assisted_decoding_is_greedy_decoding(model_type, kept, decay):
    model = swapped(model_type, softmax_layers=kept, **decay)
    ids = text(1, 8)
    expected = model.generate(ids, do_sample=False, max_new_tokens=12)
    if is_seq2seq(model_type):
        assistants = [tiny(model_type), swapped(model_type, softmax_layers=[0])]
    else:
        assistants = [swapped(model_type, seed=3), tiny(model_type), swapped(model_type, softmax_layers=kept)]
    for assistant in assistants:
        actual = model.generate(ids, do_sample=False, max_new_tokens=12, assistant_model=assistant)
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gpt2", "marian", "t5"])
@pytest.mark.parametrize("kept", [None, [1]])
def test_prompt_lookup_is_greedy_decoding(model_type, kept):
    model = swapped(model_type, softmax_layers=kept)
    ids = text(1, 5).repeat(1, 3)  # repeated tokens, which prompt lookup can find
    # Without an end token: transformers 5.17 treats the decoder start token as one, in every model.
    expected = model.generate(ids, **GREEDY, max_new_tokens=20)
    actual = model.generate(ids, **GREEDY, max_new_tokens=20, prompt_lookup_num_tokens=3)
    assert torch.equal(actual, expected)


# --- Bytes --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_bytes_are_those_of_the_tensors():
    for model_type, kept in (("llama", None), ("llama", [1]), ("marian", [1])):
        model = swapped(model_type, torch.float32, softmax_layers=kept)
        cache = model(**batch(model_type), past_key_values=model.make_cache()).past_key_values
        held = sum(x.numel() * x.element_size() for x in contents(cache).values())
        assert cache.nbytes == cache_bytes(cache) == held > 0
    state = 3 * 2 * (8 * 8 + 8) * 4  # rows, key heads, s and z, float32
    cache = read(swapped("llama", torch.float32), text(3))
    assert cache.nbytes == 3 * state  # layers


@torch.no_grad()
def test_the_bytes_do_not_grow():
    model = swapped("llama", torch.float32)
    cache = read(model, text())
    held, where = cache.nbytes, cache.layers[0].state.s.data_ptr()
    for _ in range(20):
        model(text(length=1), past_key_values=cache)
    model(text(length=7), past_key_values=cache)
    assert cache.nbytes == held
    assert cache.get_seq_length() == 12 + 27
    cache = read(model, text())
    where = cache.layers[0].state.s.data_ptr()
    model(text(length=1), past_key_values=cache)
    assert cache.layers[0].state.s.data_ptr() == where  # updated in place
    stock = DynamicCache()
    model(text(), past_key_values=stock)
    assert cache_bytes(stock) == held


@torch.no_grad()
def test_a_record_takes_room_until_it_is_cropped():
    model = swapped("llama", torch.float32)
    cache = read(model, text())
    held = cache.nbytes
    cache.activate_past_recording()
    model(text(length=4), past_key_values=cache)
    assert cache.nbytes > 2 * held  # the previous state and the recorded tokens
    cache.crop(0)
    assert cache.nbytes == held


@pytest.mark.parametrize(("model_type", "options"), [("gpt2", {}), ("llama", {"softmax_layers": [1]})])
def test_a_pickled_state_is_continued(model_type, options):
    """As a state that is sent to another process; the model is not sent with it."""
    model = swapped(model_type, **options).eval()
    state = read(model, text())
    again = pickle.loads(pickle.dumps(state))
    how = GREEDY | {"max_new_tokens": 4}
    expected = model.continue_from(state, text(length=2, seed=1), **how)
    assert torch.equal(model.continue_from(again, text(length=2, seed=1), **how), expected)
    assert again.model() is None
    assert copy.deepcopy(state).model() is model
