"""In conversations, answers from a state are the same as answers from the whole text."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import t2r
from families import POSITIONS, tiny
from t2r.errors import T2RError
from t2r.generation.chat import Conversation

TURNS = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}|{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}a:{% endif %}"
REWRITING = TEMPLATE.replace("{% for m in messages %}", "{{ messages | length }}{% for m in messages %}")


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """Return a tokenizer of characters, so that a text has the same tokens if it is split anywhere."""
    characters = [chr(code) for code in range(33, 127)]
    backend = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="!"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="!", clean_up_tokenization_spaces=False)
    made.chat_template = template
    return made


@pytest.mark.parametrize("template", [None, TEMPLATE, REWRITING], ids=["text", "template", "rewriting"])
@pytest.mark.parametrize("swapped", [False, True], ids=["base", "swapped"])
def test_answers_are_the_same_as_for_the_whole_text(template, swapped):
    model = tiny("llama", torch.float64).eval()
    model.generation_config.eos_token_id = None
    if swapped:
        model = t2r.swap(model, feature_size=8, init="identity")
    words = tokenizer(template)
    conversation = Conversation(model, words, max_new_tokens=7)
    messages, text = [], ""
    for line in ("hello", "and(then)?", "more"):
        if template is None:
            text += f"\n{line}" if text else line
        else:
            messages.append({"role": "user", "content": line})
            text = words.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = torch.tensor([words(text, add_special_tokens=False).input_ids])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, pad_token_id=0)
        expected = words.decode(out[0, ids.shape[1] :])
        heard: list[str] = []
        assert conversation.say(line, heard.append) == expected == "".join(heard)
        messages.append({"role": "assistant", "content": expected})
        text += expected
    if swapped and template != REWRITING:
        assert conversation.state.get_seq_length() == len(words(text, add_special_tokens=False).input_ids) - 1


@pytest.mark.parametrize("template", [None, TEMPLATE, REWRITING], ids=["text", "template", "rewriting"])
@pytest.mark.parametrize("swapped", [False, True], ids=["base", "swapped"])
def test_a_turn_that_fails_is_not_part_of_the_conversation(template, swapped):
    model = tiny("gpt2", torch.float64).eval()
    model.generation_config.eos_token_id = None
    if swapped:
        model = t2r.swap(model, feature_size=8, init="identity")
    conversation, expected = (Conversation(model, tokenizer(template), max_new_tokens=4) for _ in range(2))
    for line in ("one", "two"):
        with pytest.raises(T2RError, match="positions"):
            conversation.say("x" * POSITIONS)
        assert conversation.say(line) == expected.say(line)
    assert (conversation.text, conversation.messages) == (expected.text, expected.messages)


@pytest.mark.parametrize("swapped", [False, True], ids=["base", "swapped"])
def test_an_answer_ends_at_a_stop_string(swapped):
    model = tiny("llama", torch.float64).eval()
    model.generation_config.eos_token_id = None
    if swapped:
        model = t2r.swap(model, feature_size=8, init="identity")
    free = Conversation(model, tokenizer(None), max_new_tokens=7).say("hello")
    model.generation_config.stop_strings = [free[3]]
    said = Conversation(model, tokenizer(None), max_new_tokens=7).say("hello")
    assert said == free[: free.index(free[3]) + 1]


def test_conversation_errors():
    with pytest.raises(T2RError, match="requires a language model"):
        Conversation(tiny("marian", torch.float32), tokenizer(None))
    with pytest.raises(T2RError, match="one answer at a time"):
        Conversation(tiny("gpt2", torch.float32), tokenizer(None), num_beams=2)
    with pytest.raises(T2RError, match="not valid Unicode"):
        Conversation(tiny("gpt2", torch.float32), tokenizer(None)).say("\ud800")
