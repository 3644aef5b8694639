"""What a family says when it is swapped, and what only one of them does."""

import logging

import pytest

import t2r
from families import batch, tiny


@pytest.fixture
def notices(caplog):
    def swap(model_type, **options):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "t2r"):
            t2r.swap(tiny(model_type), feature_size=8, **options)
        return caplog.text

    return swap


@pytest.mark.parametrize(
    ("model_type", "kept", "words"),
    [
        ("mistral", None, "a window of 5 tokens in its recurrent layers, which now remember from the beginning"),
        ("gemma2", None, "a window of 5 tokens in 2 of its recurrent layers"),
        ("gemma3_text", None, "a window of 5 tokens in 2 of its recurrent layers"),
        ("gemma2", [1], "a window of 5 tokens in its recurrent layers"),
    ],
)
def test_windows_are_counted_by_layer(notices, model_type, kept, words):
    assert words in notices(model_type, softmax_layers=kept)


def test_layers_that_keep_their_window_need_no_notice(notices):
    assert "window" not in notices("gemma2", softmax_layers=[0, 2])
    assert "window" not in notices("llama")


def test_capped_scores_and_relative_positions_are_named(notices):
    assert "caps its attention scores at 2.0; the 2 recurrent layers" in notices("gemma2", softmax_layers=[0])
    assert "the 3 recurrent layers of the decoder have no scores and lose it" in notices("t5")


def test_t5_computes_its_bias_only_for_layers_that_take_it(monkeypatch):
    computed = []
    for kept in (None, [2]):
        model, inputs = t2r.swap(tiny("t5"), feature_size=8, softmax_layers=kept), batch("t5")
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
