"""Notices of families when they are swapped, and behavior of single families."""

import copy
import logging

import pytest
import torch
import transformers

import t2r
from families import GPT_NEOX, POSITIONS, TOKENS, VOCABULARY, batch, tiny


@pytest.fixture
def notices(caplog):
    def swap(model_type, **options):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "t2r"):
            t2r.swap(tiny(model_type), feature_size=8, recurrent="both", **options)
        return caplog.text

    return swap


@pytest.mark.parametrize(
    ("model_type", "kept", "words"),
    [
        ("mistral", None, "a sliding window of 5 tokens in its recurrent layers; recurrent layers have no window"),
        ("gemma2", None, "a sliding window of 5 tokens in 2 of its recurrent layers"),
        ("gemma3_text", None, "a sliding window of 5 tokens in 2 of its recurrent layers"),
        ("gemma2", [1], "a sliding window of 5 tokens in its recurrent layers"),
    ],
)
def test_windows_are_counted_by_layer(notices, model_type, kept, words):
    assert words in notices(model_type, softmax_layers=kept)


def test_layers_with_windows_of_a_plan_give_no_notice(notices):
    heads = tiny("gemma3_text").config.num_key_value_heads
    assert "window" not in notices("gemma3_text", plan={"windows": [[4] * heads] * 3, "sinks": 1})


def test_softmax_layers_with_a_window_give_no_notice(notices):
    assert "window" not in notices("gemma2", softmax_layers=[0, 2])
    assert "window" not in notices("llama")


def test_a_swap_has_notices_and_a_saved_model_does_not_repeat_them(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "t2r"):
        t2r.swap(tiny("mistral"), feature_size=8).save_pretrained(tmp_path)
        assert "a sliding window of 5 tokens" in caplog.text
        caplog.clear()
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not caplog.text


def test_capped_scores_and_relative_positions_are_named(notices):
    assert "caps its attention scores at 2.0; the 2 recurrent layers" in notices("gemma2", softmax_layers=[0])
    assert "which the 3 recurrent decoder layers do not have" in notices("t5")


def test_t5_computes_its_bias_only_for_layers_that_use_it(monkeypatch):
    computed = []
    for kept in (None, [2]):
        model, inputs = t2r.swap(tiny("t5"), feature_size=8, recurrent="both", softmax_layers=kept), batch("t5")
        first = model.decoder.block[0].layer[0].SelfAttention
        stock = first.compute_bias
        monkeypatch.setattr(
            first, "compute_bias", lambda *a, stock=stock, **k: computed.append(a[:2]) or stock(*a, **k)
        )
        cache = model(**inputs, use_cache=True).past_key_values
        step = inputs | {"decoder_input_ids": inputs["decoder_input_ids"][:, :1]}
        model(**step, past_key_values=cache)
        computed.append(kept)
    assert computed == [None, (9, 9), (1, 10), [2]]


# --- Families with variants ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variant",
    [
        {"multi_query": True},
        {"multi_query": False, "bias": True},
        {"multi_query": False, "parallel_attn": False},
        {"new_decoder_architecture": True, "num_kv_heads": 2},
    ],
)
def test_every_layout_of_falcon(variant):
    torch.manual_seed(0)
    teacher = transformers.FalconForCausalLM(transformers.FalconConfig(**GPT_NEOX, **variant)).double().eval()
    for parameter in teacher.parameters():
        parameter.data.mul_(4)
    model = t2r.swap(copy.deepcopy(teacher), softmax_layers=[1])
    inputs = batch("falcon")
    real = inputs["attention_mask"].bool()
    with torch.no_grad(), t2r.exact_attention(model):
        assert (model(**inputs).logits - teacher(**inputs).logits)[real].abs().max() < 1e-9


def test_falcon_with_alibi_is_refused():
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**GPT_NEOX, alibi=True))
    classes = [type(module) for module in model.modules()]
    with pytest.raises(t2r.T2RError, match=r"a bias on the attention scores \(ALiBi\).* rotary positions"):
        t2r.swap(model)
    assert [type(module) for module in model.modules()] == classes


def test_gptj_rotates_whole_heads_where_it_has_no_rotary_dim():
    fields = TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 1, "n_positions": 32, "rotary_dim": 32}
    torch.manual_seed(0)
    teacher = transformers.GPTJForCausalLM(transformers.GPTJConfig(**fields)).eval()
    model, inputs = t2r.swap(copy.deepcopy(teacher)), batch("gptj")
    real = inputs["attention_mask"].bool()
    with torch.no_grad(), t2r.exact_attention(model):
        assert (model(**inputs).logits - teacher(**inputs).logits)[real].abs().max() < 1e-4


def test_gemma3_reads_images_from_left_to_right(caplog):
    """Exact attention matches the base model without its image mask, and generation matches recomputation."""
    teacher = tiny("gemma3")
    token = VOCABULARY - 1
    teacher.config.image_token_id = token
    torch.nn.init.normal_(teacher.model.multi_modal_projector.mm_input_projection_weight)  # zeros in a fresh model
    with caplog.at_level(logging.WARNING, "t2r"):
        model = t2r.swap(copy.deepcopy(teacher), feature_size=8, softmax_layers=[1])
    assert "in the base model, the tokens of an image attend to each other" in caplog.text
    ids = torch.randint(3, token, (1, 9), generator=torch.Generator().manual_seed(0))
    ids[:, 2:6] = token
    inputs = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 8, 8, dtype=torch.float64)}
    kinds = {"token_type_ids": (ids == token).long()}  # processors return them with and without images
    with torch.no_grad():
        with t2r.exact_attention(model):
            exact = model(**inputs, **kinds).logits
        assert (exact - teacher(**inputs).logits).abs().max() < 1e-9
        assert (exact - teacher(**inputs, **kinds).logits).abs().max() > 1e-3
        other = inputs | {"pixel_values": inputs["pixel_values"] + 1}
        assert (model(**inputs).logits - model(**other).logits)[:, -1].abs().max() > 1e-6
    options = {"max_new_tokens": 6, "do_sample": False, "suppress_tokens": [0, token]}
    made = model.generate(**inputs, **kinds, **options)
    assert torch.equal(made, model.generate(**inputs, **kinds, **options, use_cache=False))


def test_a_table_of_positions_is_complete_when_it_is_replaced(monkeypatch):
    model = t2r.swap(tiny("marian"), feature_size=8, recurrent="both")
    table = model.model.decoder.embed_positions
    stock, before, seen = type(table).create_weight, table.weight, []

    def create_weight(self):
        seen.append(table.weight)  # what the forward pass of another thread reads
        return stock(self)

    monkeypatch.setattr(type(table), "create_weight", create_weight)
    draws = torch.get_rng_state()
    model.check_generated_length(POSITIONS + 1)
    assert [weight is before for weight in seen] == [True]
    assert torch.equal(torch.get_rng_state(), draws)
    torch.testing.assert_close(table.weight[:POSITIONS], before)
    longer = table.weight
    assert longer.shape[0] == table.num_embeddings == 2 * POSITIONS
    model.check_generated_length(2 * POSITIONS)
    assert table.weight is longer


def test_a_forward_that_was_replaced_is_refused():
    """It would hide the recurrent one."""
    model = tiny("gpt2")
    stock = model.transformer.h[1].attn.forward
    model.transformer.h[1].attn.forward = stock  # as accelerate leaves it
    swapped = t2r.swap(copy.deepcopy(tiny("gpt2")), feature_size=4)
    left = t2r.swap(model, feature_size=4)
    given = batch("gpt2")
    with torch.no_grad():
        torch.testing.assert_close(left(**given).logits, swapped(**given).logits)
    other = tiny("gpt2")
    patched = other.transformer.h[1].attn
    patched.forward = lambda *args, **kwargs: type(patched).forward(patched, *args, **kwargs)
    with pytest.raises(t2r.T2RError, match=r"the forward of transformer.h.1.attn was replaced"):
        t2r.swap(other, feature_size=4)


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
def test_bidirectional_attention_is_refused(family):
    model = tiny(family)
    model.config.use_bidirectional_attention = True
    with pytest.raises(t2r.T2RError, match="bidirectional attention"):
        t2r.swap(model, feature_size=4)


def test_quantized_weights_are_refused():
    model = tiny("llama", torch.float32)
    for layer in model.model.layers:
        for name, x in list(layer.self_attn.named_parameters()):
            owner = layer.self_attn.get_submodule(name.rpartition(".")[0])
            owner.weight = torch.nn.Parameter(x.to(torch.uint8), requires_grad=False)
    with pytest.raises(t2r.T2RError, match="are quantized: load the model without quantization"):
        t2r.swap(model, feature_size=4)


@pytest.mark.parametrize("family", ["marian", "fsmt"])
def test_weights_are_restored_after_a_long_generation(family):
    model = t2r.swap(tiny(family), feature_size=4).eval()
    given = {name: x for name, x in batch(family).items() if not name.startswith("decoder")}
    how = {"max_length": POSITIONS + 30, "min_length": POSITIONS + 30, "num_beams": 1}
    before = {name: x.clone() for name, x in model.state_dict().items()}
    expected = model.generate(**given, **how)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.1)
    model.load_state_dict(before)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    fresh = t2r.swap(tiny(family), feature_size=4).eval()
    assert torch.equal(fresh.generate(**given, **how), expected)
