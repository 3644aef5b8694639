"""Tests of variants: windows with sinks, rounded states, and memory."""

import pytest
import torch

import t2r
from families import tiny
from t2r import T2RError
from t2r.attention.cache import cache_bytes
from t2r.evaluation import Variant
from t2r.evaluation.generation import wilson
from t2r.evaluation.logits import logits_by_slice
from t2r.evaluation.sizes import Memory, memory_of, translation_memory
from t2r.evaluation.translation import memory_at
from t2r.model.windows import with_windows
from t2r.ops import Draws
from t2r.ops.rounding import rounded
from t2r.surgery.adapters import family_of

CLOSE = {"atol": 1e-5, "rtol": 1e-5}  # float64, except that logits are rounded to float32
DECODERS = ["gpt2", "opt", "llama", "gpt_neox", "qwen2"]


def logits(model, ids, variant=None):
    return torch.cat(list(logits_by_slice(model, ids, 0, ids.shape[1], variant)), dim=1).detach()


def ids_of(length=20, rows=2):
    return torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(0))


def kept(name="llama", **options):
    """Return a swapped model of three layers, of which the second is a softmax layer."""
    return t2r.swap(tiny(name, torch.float64), feature_size=6, recurrent="both", softmax_layers=[1], **options).eval()


def one_layer(name):
    """Return a model with a single layer, in which tokens affect each other only by one attention."""
    model = tiny(name, torch.float64)
    del family_of(model).decoder_layers(model)[1:]
    return model


@pytest.mark.parametrize("name", DECODERS)
def test_a_window_as_long_as_the_text_is_the_full_model(name):
    model, ids = tiny(name, torch.float64).eval(), ids_of()
    torch.testing.assert_close(logits(model, ids, Variant(window=20)), logits(model, ids), **CLOSE)
    torch.testing.assert_close(logits(model, ids, Variant(window=1, sinks=20)), logits(model, ids), **CLOSE)


def test_a_window_in_eight_bits_is_off_by_the_rounding():
    model, ids = tiny("llama", torch.float64).eval(), ids_of()
    full = logits(model, ids)
    error = (logits(model, ids, Variant(window=20, nbits=8)) - full).abs().max()
    assert 1e-5 < error < 0.02 * full.abs().max()
    with pytest.raises(T2RError, match="nbits must be 8 or 16; got 4"):
        Variant(window=20, nbits=4)
    with pytest.raises(T2RError, match="nbits requires a window"):
        Variant(state="bfloat16", nbits=8)


@pytest.mark.parametrize("name", DECODERS)
def test_only_the_window_and_the_sinks_are_seen(name):
    model, ids, variant = one_layer(name), ids_of(), Variant(window=5, sinks=2)
    before = logits(model, ids, variant)[:, -1]
    for position, matters in {0: True, 1: True, 2: False, 10: False, 14: False, 15: True, 18: True}.items():
        changed = ids.clone()
        changed[:, position] = (changed[:, position] + 1) % 90
        after = logits(model, changed, variant)[:, -1]
        assert torch.equal(before, after) != matters, position


def test_windows_of_several_layers_add_up(seed):
    model, ids, variant = tiny("llama", torch.float64).eval(), ids_of(), Variant(window=5)
    before = logits(model, ids, variant)[:, -1]
    changed = {}
    for position in (6, 8):  # three layers with four previous tokens each: 19 - 12 = 7
        other = ids.clone()
        other[:, position] += 1
        changed[position] = not torch.equal(before, logits(model, other, variant)[:, -1])
    assert changed == {6: False, 8: True}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_softmax_layers_support_a_window(name):
    model, ids = kept(name), ids_of()
    full = logits(model, ids)
    torch.testing.assert_close(logits(model, ids, Variant(window=20)), full, **CLOSE)
    limited = logits(model, ids, Variant(window=4, sinks=1))
    torch.testing.assert_close(limited[:, :5], full[:, :5], **CLOSE)  # all tokens are within the window
    assert not torch.allclose(limited[:, 6:], full[:, 6:], atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma"])
def test_windows_are_the_memory_of_the_model(name):
    """The model that is evaluated also decodes with ring buffers, and gives the same logits. Padding is not a sink."""
    model, ids = tiny(name, torch.float64).eval(), ids_of()
    before = {name: x.clone() for name, x in model.named_parameters()}
    limited = with_windows(model, 4, sinks=2)
    expected, padded = logits(model, ids, Variant(window=4, sinks=2)), 3
    for start in (0, padded):
        cache, found, mask = limited.make_cache(), [], torch.ones_like(ids)
        mask[:, :start] = 0
        text = torch.cat([ids[:, :start] * 0, ids[:, : 20 - start]], dim=1)
        with torch.no_grad():
            for part in (slice(0, 9), *(slice(i, i + 1) for i in range(9, 20))):
                positions = (mask.cumsum(1) - 1).clamp_min(0)[:, part]
                step = {"input_ids": text[:, part], "attention_mask": mask[:, : part.stop], "position_ids": positions}
                found.append(limited(**step, past_key_values=cache, use_cache=True).logits[:, -1:])
        torch.testing.assert_close(torch.cat(found, dim=1).float(), expected[:, 8 - start : 20 - start], **CLOSE)
    assert all(torch.equal(x, before[name]) for name, x in model.named_parameters())
    assert type(model).__module__.startswith("transformers")
    assert all(x is y for x, y in zip(model.parameters(), limited.parameters(), strict=True))


def test_unsupported_variants():
    ids = ids_of()
    with pytest.raises(T2RError, match="no softmax attention"):
        logits(t2r.swap(tiny("llama", torch.float32), feature_size=6), ids, Variant(window=4))
    with pytest.raises(T2RError, match="no recurrent state"):
        logits(tiny("llama", torch.float32), ids, Variant(state="bfloat16"))
    with pytest.raises(T2RError, match="already has a sliding window of 5 tokens"):
        logits(tiny("gemma2", torch.float32), ids, Variant(window=6))


@pytest.mark.parametrize("name", ["gemma3_text", "mistral", "phi3"])
def test_layers_with_a_sliding_window_can_have_a_smaller_one(name):
    """One as large as their own changes layers without one only; the memory is that of the windows."""
    model, ids = tiny(name, torch.float32).eval(), ids_of()
    own = model.config.sliding_window
    full, same, less = (logits(model, ids, variant) for variant in (None, Variant(window=own), Variant(window=3)))
    if name == "gemma3_text":  # every second layer has no window
        assert not torch.allclose(same[:, own:], full[:, own:], atol=1e-4)
        torch.testing.assert_close(same[:, :own], full[:, :own], **CLOSE)
    else:
        torch.testing.assert_close(same, full, **CLOSE)
    torch.testing.assert_close(less[:, :3], full[:, :3], **CLOSE)
    assert not torch.allclose(less[:, 3:], full[:, 3:], atol=1e-4)
    layers, sliding = model.config.num_hidden_layers, model.config.layer_types if name == "gemma3_text" else None
    windows = sum(kind == "sliding_attention" for kind in sliding) if sliding else layers
    memory, limited = memory_of(model), memory_of(model, Variant(window=3))
    assert memory is not None
    assert limited is not None
    per_token = limited.at(1)
    assert memory.at(100) * layers == per_token * (windows * own + (layers - windows) * 100)
    assert limited.at(100) == 3 * per_token


@pytest.mark.parametrize("every", [1, 7, 64])
def test_a_state_in_float32_changes_nothing_and_one_in_bfloat16_a_little(every):
    model, ids = t2r.swap(tiny("llama", torch.float32), feature_size=6, decay=True).eval(), ids_of()
    full = logits(model, ids)
    same = logits(model, ids, Variant(state="float32", every=every))
    torch.testing.assert_close(same, full, atol=1e-4, rtol=1e-4)
    rounded = logits(model, ids, Variant(state="bfloat16", every=every))
    torch.testing.assert_close(rounded[:, :every], full[:, :every], atol=1e-4, rtol=1e-4)  # the state is not read yet
    if every < 20:
        error = (rounded[:, every:] - full[:, every:]).abs().max()
        assert 1e-4 < error < 0.3 * full.abs().max()


def test_the_state_is_rounded_after_every_step(monkeypatch):
    """Compare with a loop that rounds the state to bfloat16 after each step."""
    model, ids = kept(decay=True), ids_of(rows=1)
    cache, expected = model.make_cache(), []
    with torch.no_grad():
        for i, token in enumerate(ids[0]):
            expected.append(model(token.view(1, 1), past_key_values=cache, use_cache=True).logits)
            for number, layer in enumerate(cache.layers):
                if (memory := layer.recurrence) is not None:
                    state = rounded(memory.state, torch.bfloat16, Draws(torch.tensor([i]), number))
                    memory.state = state.map(torch.Tensor.double)
    found = logits(model, ids, Variant(state="bfloat16"))
    torch.testing.assert_close(found, torch.cat(expected, dim=1).float(), atol=1e-5, rtol=1e-5)


def test_memory_is_what_the_cache_holds():
    teacher = tiny("llama", torch.bfloat16)
    cache = teacher(ids_of(12, rows=1), use_cache=True).past_key_values
    held = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    assert memory_of(teacher).at(12) == memory_of(tiny("llama", torch.float32)).at(12) == held
    limited = memory_of(teacher, Variant(window=5, sinks=2))
    assert limited.at(6) == held // 2
    assert limited.at(7) == limited.at(1000) == held * 7 // 12
    eight = memory_of(teacher, Variant(window=5, sinks=2, nbits=8))
    size = teacher.config.hidden_size // teacher.config.num_attention_heads
    assert eight.at(7) == limited.at(7) * (size + 2) // (2 * size)  # a number is a byte, and a vector has a scale
    rnn = t2r.swap(tiny("llama", torch.float32), feature_size=6)
    with torch.no_grad():
        state = rnn(ids_of(12, rows=1), use_cache=True).past_key_values.nbytes
    assert memory_of(rnn) == Memory(state, 0, None)
    assert memory_of(rnn, Variant(state="bfloat16")).at(1000) == state // 2


def test_memory_of_causal_and_cross_attention():
    def held(model, source, target):
        with torch.no_grad():
            cache = model(ids_of(source, rows=1), decoder_input_ids=ids_of(target, rows=1)).past_key_values
        return cache_bytes(cache.self_attention_cache), cache_bytes(cache.cross_attention_cache)

    teacher = tiny("marian", torch.bfloat16)
    causal, cross = translation_memory(teacher)
    assert (causal.at(5), cross.at(9)) == held(teacher, source=9, target=5)
    rnn = t2r.swap(tiny("marian", torch.float32), feature_size=4, recurrent="both", cross_feature_size=8)
    assert translation_memory(rnn) == tuple(Memory(size, 0) for size in held(rnn, source=9, target=5))
    assert memory_at(rnn, 9) == memory_at(rnn, 30)
    kept = t2r.swap(tiny("marian", torch.float32), feature_size=4, recurrent="both", softmax_layers=[0])
    assert memory_at(kept, 9)["kept_tokens"] == 9
    assert memory_at(rnn, 9)["cross_bytes"] < memory_at(kept, 30)["cross_bytes"]
    assert memory_of(rnn) is None  # of an encoder-decoder: see above


@pytest.mark.parametrize(
    "text", ["", "window", "window=", "window=-1", "window=0", "sinks=4", "state=int8", "window=4,window=5", "far=3",
             "window=4,state=bfloat16", "state=bfloat16,every=0", "every=2"],
)  # fmt: skip
def test_invalid_variants(text):
    with pytest.raises(T2RError, match="variant"):
        Variant.parse(text)


def test_variant_names():
    assert str(Variant.parse("window=386,sinks=4")) == "window 386 + 4 sinks"
    assert str(Variant.parse("state=bfloat16, every=64")) == "state in bfloat16 every 64 tokens"


def test_wilson():
    low, high = wilson(0, 256)
    assert low == 0
    assert high == pytest.approx(0.0148, abs=1e-4)
    assert wilson(256, 256) == pytest.approx((1 - high, 1.0))
    assert wilson(128, 256) == pytest.approx((0.4392, 0.5608), abs=1e-4)  # a published example: 50 % of 256
