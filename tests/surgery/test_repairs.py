"""What a base model computes wrongly with some versions of transformers is repaired in every model that t2r gets."""

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma2PreTrainedModel,
    UMT5Config,
    UMT5ForConditionalGeneration,
)
from transformers.models.umt5 import modeling_umt5

import t2r
from families import GEMMA2, T5, batch
from t2r import compat
from t2r.attention.interface import PADDED
from t2r.evaluation.translation import opened
from t2r.hub import load_model, load_shell
from t2r.pipelines.pretrain import make_model
from t2r.surgery.adapters import repaired
from translating import make_tokenizer


@pytest.fixture
def config(monkeypatch):
    """The configuration of a UMT5 model. Its models are as in transformers 5.17, whatever the version."""
    build = modeling_umt5.UMT5LayerSelfAttention.__init__

    def build_as_before(layer, *args, **kwargs):
        build(layer, *args, **kwargs)
        layer.SelfAttention.is_causal = False

    monkeypatch.setattr(modeling_umt5.UMT5LayerSelfAttention, "__init__", build_as_before)
    return UMT5Config(**T5, attn_implementation="sdpa")


@torch.no_grad()
def reads_later_tokens(model):
    inputs = batch("umt5", padding=None)
    before = model.eval()(**inputs).logits
    inputs["decoder_input_ids"][:, -1] += 1
    return not torch.allclose(model(**inputs).logits[:, :-1], before[:, :-1], atol=1e-5)


def test_the_decoder_of_umt5_is_causal_however_t2r_gets_it(config, tmp_path):
    stock = UMT5ForConditionalGeneration(config)
    stock.save_pretrained(tmp_path)
    assert reads_later_tokens(stock)  # or nothing is to be repaired
    assert not reads_later_tokens(load_model(str(tmp_path)))
    assert not reads_later_tokens(make_model(config, {}, seed=0))
    assert not reads_later_tokens(t2r.swap(UMT5ForConditionalGeneration(config), softmax_layers=[0]))
    shell = load_shell(str(tmp_path))
    assert all(block.layer[0].SelfAttention.is_causal for block in shell.decoder.block)
    assert not any(block.layer[0].SelfAttention.is_causal for block in shell.encoder.block)
    opened(stock, make_tokenizer(), "auto", "cpu")
    assert not reads_later_tokens(stock)


@torch.no_grad()
@pytest.mark.parametrize("padding", [None, "left"])
def test_a_repaired_umt5_computes_the_same_with_every_attention(config, padding):
    """`eager` is right without a repair: it always has a mask. `PADDED` is the attention of captured training."""
    model, inputs = UMT5ForConditionalGeneration(config).eval(), batch("umt5", padding=padding)
    compat.set_attention_implementation(model, "eager")
    expected = model(**inputs).logits
    for name in ("eager", "sdpa", PADDED):
        compat.set_attention_implementation(repaired(model), name)
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_gemma_2_caps_its_scores(monkeypatch, tmp_path):
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)  # as in transformers 5.17
    stock = Gemma2ForCausalLM(Gemma2Config(**GEMMA2)).eval()
    assert compat.attention_implementation(stock) == "sdpa"
    stock.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    compat.set_attention_implementation(stock, "eager")
    inputs = batch("gemma2", padding=None)
    torch.testing.assert_close(loaded(**inputs).logits, stock(**inputs).logits)
    swapped = t2r.swap(loaded)
    assert compat.attention_implementation(repaired(swapped)) == "t2r"
