"""A static cache gives the results of the default cache, at fixed addresses and without device synchronization."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import t2r
from families import FAMILIES, PAD, VOCABULARY, batch, is_seq2seq, tiny
from t2r import T2RError

LANGUAGE_MODELS = sorted(name for name in FAMILIES if not is_seq2seq(name))
WINDOWED = [name for name in LANGUAGE_MODELS if "sliding_window" in FAMILIES[name].fields]
DECAY = {"decay": True, "rotary": False, "activation": "softmax", "shared": False, "feature_size": 8}
KINDS = {"pure": {}, "decay": DECAY, "kept": {"softmax_layers": [1]}, "signed": {"feature_map": "rfa"}}


def swapped(model_type, dtype=torch.float64, layers=None, **options):
    return t2r.swap(
        tiny(model_type, dtype, layers=layers), **({"feature_size": 8, "recurrent": "both"} | options)
    ).eval()


class NoWaiting(TorchDispatchMode):
    """Raise if a tensor value is read, which synchronizes with the device on a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func), "a tensor value is read"
        assert "nonzero" not in str(func), "a shape depends on values"
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def decode(model, cache, tokens, wait=True):
    """Return the logits of tokens that are processed one at a time."""
    logits = []
    for t in range(tokens.shape[1]):
        inputs = cache.step_inputs()
        if "position_ids" not in model._forward_names:
            del inputs["position_ids"]
        if wait:
            logits.append(model(tokens[:, t : t + 1], past_key_values=cache, **inputs).logits)
        else:
            with NoWaiting():
                logits.append(model(tokens[:, t : t + 1], past_key_values=cache, **inputs).logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", LANGUAGE_MODELS)
@torch.no_grad()
def test_rows_of_different_lengths_are_what_each_is_alone(model_type, kind):
    if model_type in WINDOWED and kind == "kept":
        pytest.skip("softmax layers of this family have a sliding window")
    model, lengths = swapped(model_type, **KINDS[kind]), (5, 1, 9)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, VOCABULARY, (1, n + 6), generator=generator) for n in lengths]
    cache = model.make_static_cache(rows=3, max_length=20)
    addresses = [x.data_ptr() for layer in cache.layers for x in vars(layer).values() if isinstance(x, torch.Tensor)]
    for row, (text, n) in enumerate(zip(texts, lengths, strict=True)):
        prefilled = model.make_cache()
        model(text[:, :n], past_key_values=prefilled)
        cache.put(row, prefilled)
    new = torch.cat([text[:, n:] for text, n in zip(texts, lengths, strict=True)])
    logits = decode(model, cache, new)
    for row, text in enumerate(texts):
        expected = model(text, use_cache=False).logits[:, -6:]
        torch.testing.assert_close(logits[row : row + 1], expected, rtol=1e-9, atol=1e-9)
    after = [x.data_ptr() for layer in cache.layers for x in vars(layer).values() if isinstance(x, torch.Tensor)]
    assert after == addresses
    assert cache.lengths.tolist() == [11, 7, 15]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["decay", "signed"])
@torch.no_grad()
def test_states_in_half_precision_are_those_of_their_own_text(kind, dtype):
    """How they are rounded at random does not depend on the row, on other rows, or on when the text is read."""
    model, (text, other) = swapped("llama", **KINDS[kind]), torch.randint(3, VOCABULARY, (2, 1, 12))
    alone, cache = (model.make_static_cache(rows, state_dtype=dtype) for rows in (1, 3))
    prefilled = model.make_cache()
    model(text[:, :4], past_key_values=prefilled)
    alone.put(0, prefilled)
    decode(model, alone, text[:, 4:])
    decode(model, cache, other.expand(3, -1, -1)[:, 0, :5])
    cache.put(2, prefilled)
    decode(model, cache, torch.cat([other, other, text])[:, 4:])
    for x, y in zip(alone.tensors(), cache.tensors(), strict=True):
        assert torch.equal(x[0], y[2])
    other_way = model.make_static_cache(1, state_dtype=dtype)
    other_way.put(0, prefilled)
    other_way.lengths.add_(1)  # another count of tokens
    decode(model, other_way, text[:, 4:])
    assert not all(torch.equal(x, y) for x, y in zip(alone.tensors(), other_way.tensors(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "qwen3", "opt"])
def test_a_step_does_not_wait_for_the_device(model_type, kind):
    model = swapped(model_type, torch.float32, **KINDS[kind])
    cache = model.make_static_cache(rows=2, max_length=8)
    decode(model, cache, torch.randint(3, VOCABULARY, (2, 3)), wait=False)
    assert cache.lengths.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("model_type", "kind", "state_dtype"),
    [
        ("gpt2", "decay", None),
        ("llama", "kept", None),
        *(
            pytest.param(*other, marks=pytest.mark.slow)
            for other in (("gpt2", "kept", None), ("llama", "decay", None), ("gpt2", "decay", torch.bfloat16))
        ),
    ],
)
@torch.no_grad()
def test_a_step_compiles_once_to_one_graph(model_type, kind, state_dtype):
    torch._dynamo.reset()
    model, graphs = swapped(model_type, torch.float32, layers=2, **KINDS[kind]), []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=count)
    eager, cache = (model.make_static_cache(rows=2, max_length=12, state_dtype=state_dtype) for _ in range(2))
    tokens = torch.randint(3, VOCABULARY, (2, 10))
    expected = decode(model, eager, tokens)
    got = [compiled(tokens[:, t : t + 1], past_key_values=cache, **cache.step_inputs()).logits for t in range(10)]
    torch.testing.assert_close(torch.cat(got, 1), expected)
    assert len(graphs) == 1


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("kind", ["pure", "kept"])
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "marian", "t5"])
def test_generate_with_a_static_cache_is_generate(model_type, kind, options):
    if (model_type, kind) == ("t5", "kept"):
        pytest.skip("softmax layers of this family have a relative position bias")
    model, inputs = swapped(model_type, **KINDS[kind]), batch(model_type)
    inputs = {k: v for k, v in inputs.items() if not k.startswith("decoder")}
    how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD, **options}
    expected = model.generate(**inputs, **how)
    assert torch.equal(model.generate(**inputs, **how, cache_implementation="static"), expected)


@torch.no_grad()
def test_a_row_can_be_reset_and_filled_again():
    model = swapped("llama", softmax_layers=[1])
    cache, text = model.make_static_cache(rows=2, max_length=16), torch.randint(3, VOCABULARY, (2, 4))
    decode(model, cache, text)
    cache.reset(1)
    assert cache.lengths.tolist() == [4, 0]
    again = decode(model, cache, text)
    fresh = decode(model, model.make_static_cache(rows=2, max_length=16), text)
    torch.testing.assert_close(again[1], fresh[1])
    assert not torch.allclose(again[0], fresh[0])
    cache.reset()
    assert cache.lengths.tolist() == [0, 0]
    torch.testing.assert_close(decode(model, cache, text), fresh)


@torch.no_grad()
def test_a_row_of_a_padded_batch_and_a_saved_state_can_be_put_in(tmp_path):
    model, inputs = swapped("gpt2", softmax_layers=[0]), batch("gpt2", padding="left")
    prefilled = model.make_cache()
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    model(**inputs, position_ids=positions, past_key_values=prefilled)
    prefilled.take(2).save(tmp_path / "state")
    cache = model.make_static_cache(rows=2, max_length=20)
    cache.put(0, prefilled, other_row=1)
    cache.put(1, model.load_state(tmp_path / "state"))
    assert cache.lengths.tolist() == [7, 5]
    new = torch.randint(3, VOCABULARY, (2, 3))
    logits = decode(model, cache, new)
    for row, source in enumerate((1, 2)):
        real = inputs["input_ids"][source][inputs["attention_mask"][source].bool()]
        whole = torch.cat([real, new[row]])[None]
        torch.testing.assert_close(logits[row], model(whole, use_cache=False).logits[0, -3:], rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_padding_requires_no_room():
    model, inputs = swapped("gpt2", softmax_layers=[0]), batch("gpt2", padding="left")
    prefilled = model.make_cache()
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    model(**inputs, position_ids=positions, past_key_values=prefilled)
    cache = model.make_static_cache(rows=2, max_length=8)
    cache.put_rows(torch.tensor([1, 0]), prefilled, torch.tensor([1, 2]))
    assert cache.lengths.tolist() == [5, 7]
    new = torch.randint(3, VOCABULARY, (2, 1))
    logits = decode(model, cache, new)
    for row, source in enumerate((2, 1)):
        real = inputs["input_ids"][source][inputs["attention_mask"][source].bool()]
        expected = model(torch.cat([real, new[row]])[None], use_cache=False).logits[0, -1:]
        torch.testing.assert_close(logits[row], expected, rtol=1e-9, atol=1e-9)
    with pytest.raises(T2RError, match="9 tokens do not fit"):
        cache.put(0, prefilled, other_row=0)


@torch.no_grad()
def test_several_tokens_in_softmax_layers_require_rows_of_equal_length():
    model, texts = swapped("gpt2", softmax_layers=[1]), torch.randint(3, VOCABULARY, (2, 9))
    cache = model.make_static_cache(rows=2, max_length=16)
    for row, length in enumerate((3, 7)):
        prefilled = model.make_cache()
        model(texts[row : row + 1, :length], past_key_values=prefilled)
        cache.put(row, prefilled)
    before = [x.clone() for x in cache.tensors()]
    with pytest.raises(T2RError, match="3 to 7 tokens"):
        model(texts[:, 7:], past_key_values=cache)
    assert all(torch.equal(x, old) for x, old in zip(cache.tensors(), before, strict=True))
    equal = model.make_static_cache(rows=2, max_length=16)
    parts = [model(part, past_key_values=equal).logits for part in (texts[:, :5], texts[:, 5:])]
    expected = model(texts, use_cache=False).logits
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kept", [None, [1]])
def test_a_row_that_was_read_with_padding_is_taken_without_it(kept):
    model, mask = swapped("llama", softmax_layers=kept), torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    ids = torch.randint(3, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(0))
    how = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    out = model.generate(ids, attention_mask=mask, cache_implementation="static", disable_compile=True, **how)
    taken, alone = out.past_key_values.take(1), model.generate(ids[1:, 2:], **how).past_key_values
    assert taken.get_seq_length() == alone.get_seq_length() == 6
    following = {"input_ids": out.sequences[1:, -1:], "position_ids": torch.tensor([[6]])}
    with torch.no_grad():
        logits = [model(**following, past_key_values=cache).logits for cache in (taken, alone)]
    torch.testing.assert_close(*logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("model_type", ["gpt2", "bart"])
def test_what_cannot_be_done_with_rows_at_fixed_addresses(model_type, tmp_path):
    cache = swapped(model_type).make_static_cache(rows=2)
    for what, attempt in {
        "saved": lambda: cache.save(tmp_path / "state"),
        "copied": lambda: cache.fork(2),
        "divided": lambda: cache.batch_select_indices(torch.tensor([0])),
        "repeated": lambda: cache.batch_repeat_interleave(2),
    }.items():
        with pytest.raises(T2RError, match=f"a static cache cannot be {what}"):
            attempt()
    assert not list(tmp_path.iterdir())


def test_refusals():
    model = swapped("gpt2", softmax_layers=[0])
    with pytest.raises(T2RError, match="max_length"):
        model.make_static_cache(rows=2)
    with pytest.raises(T2RError, match="do not fit"), torch.no_grad():
        model(torch.zeros(2, 9, dtype=torch.long), past_key_values=model.make_static_cache(rows=2, max_length=8))
    with pytest.raises(T2RError, match="relative bias"):
        swapped("t5", softmax_layers=[0]).make_static_cache(rows=2, max_length=8)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["decay", "kept"])
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
@torch.no_grad()
def test_a_step_is_captured_as_a_cuda_graph(model_type, kind, state_dtype):
    """Eager steps do not synchronize, and replays of a captured step give the same results. States in half precision
    are rounded at random, by the number of tokens: each replay has new random numbers."""
    model = swapped(model_type, torch.float32, **KINDS[kind]).cuda()
    tokens = torch.randint(3, VOCABULARY, (2, 8), device="cuda")
    eager, cache = (model.make_static_cache(rows=2, max_length=16, state_dtype=state_dtype) for _ in range(2))
    model(tokens[:, :1], past_key_values=eager, **eager.step_inputs())  # compiles kernels, which may synchronize
    eager.reset()
    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = decode(model, eager, tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    token, stream = tokens[:, :1].clone(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(token, past_key_values=cache, **cache.step_inputs())
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(token, past_key_values=cache, **cache.step_inputs()).logits
    cache.reset()
    for t in range(8):
        token.copy_(tokens[:, t : t + 1])
        graph.replay()
        torch.testing.assert_close(logits[:, 0], expected[:, t])
    assert cache.lengths.tolist() == [8, 8]
