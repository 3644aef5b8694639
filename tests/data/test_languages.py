"""Languages of multilingual translation models, with real tokenizers of NLLB, mBART-50 and mBART."""

import string

import pytest
import torch
from transformers import M2M100Config, M2M100ForConditionalGeneration, MBart50Tokenizer, MBartTokenizer, NllbTokenizer

import t2r
from families import SEQ2SEQ, tiny
from t2r.data.languages import set_languages
from t2r.errors import T2RError
from translating import make_tokenizer

LETTERS = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "▁": 4} | {
    c: 5 + i for i, c in enumerate(string.ascii_lowercase)
}


def nllb():
    return NllbTokenizer(vocab=LETTERS)


def model_for(tokenizer):
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "decoder_layers": 1, "encoder_layers": 1, "init_std": 0.3}
    return M2M100ForConditionalGeneration(M2M100Config(**SEQ2SEQ | {"pad_token_id": 1} | sizes)).eval()


def test_a_translation_begins_with_its_language():
    tokenizer = nllb()
    model = model_for(tokenizer)
    with pytest.raises(T2RError, match="give --target-language"):
        t2r.generate(model, "abc", tokenizer=tokenizer)
    swapped = t2r.swap(model, feature_size=4, recurrent="both")
    found = []
    forward = swapped.forward
    swapped.forward = lambda *args, **given: found.append(given["decoder_input_ids"].clone()) or forward(*args, **given)
    chosen = {"source_language": "zho_Hans", "target_language": "deu_Latn"}
    text = t2r.generate(swapped, "abc", tokenizer=tokenizer, max_new_tokens=4, num_beams=2, **chosen)[0].text
    assert "deu_Latn" not in text
    assert tokenizer("abc")["input_ids"][0] == tokenizer.convert_tokens_to_ids("zho_Hans")
    assert swapped.generation_config.forced_bos_token_id == tokenizer.convert_tokens_to_ids("deu_Latn")
    assert tokenizer.convert_tokens_to_ids("deu_Latn") in torch.cat([ids.flatten() for ids in found])
    with pytest.raises(T2RError, match="does not know the language 'de'"):
        t2r.generate(swapped, "abc", tokenizer=tokenizer, target_language="de")


@pytest.mark.parametrize(
    ("kind", "field"), [(MBart50Tokenizer, "forced_bos_token_id"), (MBartTokenizer, "decoder_start_token_id")]
)
def test_the_languages_of_mbart(kind, field):
    tokenizer = kind()
    model = model_for(tokenizer)
    set_languages(model, tokenizer, "en_XX", "de_DE")
    assert getattr(model.generation_config, field) == tokenizer.convert_tokens_to_ids("de_DE")
    assert (tokenizer.src_lang, tokenizer.tgt_lang) == ("en_XX", "de_DE")
    set_languages(model, tokenizer)  # the model has a target language now


@pytest.mark.parametrize("kind", [NllbTokenizer, MBart50Tokenizer, MBartTokenizer])
def test_targets_are_marked_with_the_language_that_the_model_writes(kind):
    """A model may have a target language that its tokenizer lacks, which then marks targets with another one."""
    german, chinese = ("deu_Latn", "zho_Hans") if kind is NllbTokenizer else ("de_DE", "zh_CN")
    chosen = kind()
    model = model_for(chosen)
    set_languages(model, chosen, target=german)
    tokenizer = kind()
    assert tokenizer(text_target="a") != chosen(text_target="a")
    set_languages(model, tokenizer)
    assert tokenizer(text_target="a") == chosen(text_target="a")
    set_languages(model, tokenizer, source=chinese)
    assert tokenizer(text_target="a") == chosen(text_target="a")


def test_a_source_language_alone_is_not_enough():
    tokenizer = nllb()
    with pytest.raises(T2RError, match="give --target-language"):
        set_languages(model_for(tokenizer), tokenizer, source="zho_Hans")


def test_a_model_of_one_pair_has_no_languages():
    with pytest.raises(T2RError, match="no languages to choose from"):
        set_languages(tiny("marian"), make_tokenizer(), target="de")
    set_languages(tiny("marian"), make_tokenizer())
