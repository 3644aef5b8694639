"""In conversations, answers from a state are the same as answers from the whole text."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import t2r
from families import POSITIONS, tiny
from t2r.attention.state_file import read_header
from t2r.errors import T2RError
from t2r.generation.chat import Conversation
from t2r.generation.state import describe_state, read_document
from t2r.generation.turns import MARK, Transcript, by_user, next_turn, rendered, transcript_of

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
    assert conversation.now.said == expected.now.said


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


# --- States -------------------------------------------------------------------------------------------------

DOCUMENT = "it(was)a/dark-night"
QUESTION = "who?"


@pytest.fixture(scope="module")
def model():
    made = t2r.swap(tiny("llama", torch.float64).eval(), feature_size=8, init="identity")
    made.generation_config.eos_token_id = None
    return made


def continued(model, words, text: str, tokens: int = 7) -> str:
    """Return what `generate` appends to a text."""
    ids = torch.tensor([words(text, add_special_tokens=False).input_ids])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, pad_token_id=0)
    return str(words.decode(out[0, ids.shape[1] :]))


def test_a_document_begins_a_message(model):
    words = tokenizer(TEMPLATE)
    state = read_document(model, words, DOCUMENT + "\n", chat=True)
    expected = continued(model, words, f"u:{DOCUMENT}\n\n{QUESTION}|a:")
    conversation = Conversation(model, words, state, max_new_tokens=7)
    assert conversation.say(QUESTION) == expected
    assert conversation.messages == [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": expected},
    ]
    both = f"u:{DOCUMENT}\n\n{QUESTION}|a:{expected}|u:more|a:"
    assert conversation.say("more") == continued(model, words, both)
    conversation.reset()
    assert conversation.say(QUESTION) == expected
    # In a batch, for each prompt, and for documents that are stacked.
    found = t2r.generate(model, [QUESTION, "why?"], tokenizer=words, state=state, chat=True, max_new_tokens=7)
    assert [x.text for x in found] == [expected, continued(model, words, f"u:{DOCUMENT}\n\nwhy?|a:")]
    stacked = t2r.T2RCache.stack([state, read_document(model, words, "short", chat=True)])
    found = t2r.generate(model, [QUESTION, QUESTION], tokenizer=words, state=stacked, chat=True, max_new_tokens=7)
    assert [x.text for x in found] == [expected, continued(model, words, f"u:short\n\n{QUESTION}|a:")]


def test_a_document_is_read_on_in_its_message(model, tmp_path):
    words = tokenizer(TEMPLATE)
    read_document(model, words, "one", chat=True).save(tmp_path / "state")
    state = read_document(model, words, "two", model.load_state(tmp_path / "state"))
    expected = continued(model, words, f"u:one\n\ntwo\n\n{QUESTION}|a:")
    assert Conversation(model, words, state, max_new_tokens=7).say(QUESTION) == expected


def test_a_document_may_be_read_after_an_answer(model, tmp_path):
    words = tokenizer(TEMPLATE)
    conversation = Conversation(model, words, max_new_tokens=7)
    answer = conversation.say("hello")
    conversation.save(tmp_path / "state")
    state = read_document(model, words, DOCUMENT, model.load_state(tmp_path / "state"), chat=True)
    expected = continued(model, words, f"u:hello|a:{answer}|u:{DOCUMENT}\n\n{QUESTION}|a:")
    assert Conversation(model, words, state, max_new_tokens=7).say(QUESTION) == expected
    plain = read_document(model, words, DOCUMENT, model.load_state(tmp_path / "state"))  # not in a message
    assert plain.chat is None
    expected = continued(model, words, f"u:hello|a:{answer}{DOCUMENT}u:{QUESTION}|a:")
    assert Conversation(model, words, plain, max_new_tokens=7).say(QUESTION) == expected


@pytest.mark.parametrize("bos", [None, "~", "a"], ids=["none", "first", "role"])
def test_a_conversation_after_a_plain_text(model, bos):
    """The BOS token of a template is not repeated, unless it is also part of it elsewhere."""
    words = tokenizer(TEMPLATE if bos != "~" else "~" + TEMPLATE)
    words.bos_token = bos
    state = read_document(model, words, DOCUMENT)
    assert state.chat is None
    first = continued(model, words, f"{DOCUMENT}u:{QUESTION}|a:")
    conversation = Conversation(model, words, state, max_new_tokens=7)
    assert conversation.say(QUESTION) == first
    assert conversation.say("more") == continued(model, words, f"{DOCUMENT}u:{QUESTION}|a:{first}|u:more|a:")


@pytest.mark.parametrize("document", [None, "plain", "message"])
@pytest.mark.parametrize("template", [None, TEMPLATE, REWRITING], ids=["text", "template", "rewriting"])
def test_a_saved_conversation_is_resumed(model, template, document, tmp_path):
    if template is None and document == "message":
        with pytest.raises(T2RError, match="no chat template"):
            read_document(model, tokenizer(None), DOCUMENT, chat=True)
        return
    words, state = tokenizer(template), None
    if document is not None:
        state = read_document(model, words, DOCUMENT, chat=document == "message")
    kept = Conversation(model, words, state, max_new_tokens=7)
    kept.say("hello")
    for line in ("and(then)?", "more"):
        kept.save(tmp_path / "state")
        assert describe_state(tmp_path / "state")["messages"] == len(kept.messages)
        resumed = Conversation(model, words, model.load_state(tmp_path / "state"), max_new_tokens=7)
        assert resumed.now.said == kept.now.said
        if template == REWRITING and document is not None:
            # To read everything again, the state after the document alone would be needed, which is not saved.
            assert len(resumed.say(line)) == 7
            assert resumed.now.said.text.startswith(f"{kept.now.said.text}|u:{line}|a:")
            continue
        assert resumed.say(line) == kept.say(line)
        assert resumed.now.said == kept.now.said
    header = read_header(tmp_path / "state")
    assert header["format"] == 2  # older versions ignore what was said
    assert header["chat"]["tokens"] == max(header["lengths"].values())


def test_a_given_state_is_not_changed(model, tmp_path):
    words = tokenizer(TEMPLATE)
    state = read_document(model, words, DOCUMENT)
    conversation = Conversation(model, words, state, max_new_tokens=3)
    conversation.save(tmp_path / "state")
    assert model.load_state(tmp_path / "state").chat is not None
    conversation.say("hello")
    assert state.chat is None
    assert state.get_seq_length() == len(DOCUMENT)


@pytest.mark.parametrize("swapped", [False, True], ids=["base", "swapped"])
@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["text", "template"])
def test_an_answer_is_stopped_and_stays_in_the_conversation(model, template, swapped, tmp_path):
    words, other = tokenizer(template), model if swapped else tiny("llama", torch.float64).eval()
    other.generation_config.eos_token_id = None
    heard: list[str] = []
    conversation = Conversation(other, words, max_new_tokens=9)
    stopped = conversation.say("hello", heard.append, lambda: True)
    assert stopped == "".join(heard) == Conversation(other, words, max_new_tokens=1).say("hello")
    count = iter(range(3))
    second = conversation.say("more", stop=lambda: next(count) == 2)
    expected = Conversation(other, words, max_new_tokens=1)
    expected.say("hello")
    expected.options["max_new_tokens"] = 3
    assert second == expected.say("more")
    assert conversation.now.said == expected.now.said
    assert conversation.state.get_seq_length() == expected.state.get_seq_length()  # both have a state in the engine
    expected.options["max_new_tokens"] = 9
    assert conversation.say("last") == expected.say("last")


def test_what_was_read_after_a_conversation_ends_it(model):
    words = tokenizer(TEMPLATE)
    state = read_document(model, words, DOCUMENT, chat=True)
    assert transcript_of(state, words).text == "u:"
    with torch.no_grad():
        model(torch.tensor([[5, 6]]), past_key_values=state)
    assert transcript_of(state, words) == Transcript([], "", True)


def test_what_follows_an_answer_if_the_template_changes_earlier_turns():
    words = tokenizer(REWRITING)
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    for text in ("1u:one|a:two", "1u:one|a:two|"):  # with and without the end of the answer
        said = Transcript(messages, text, True)
        new = next_turn(words, said, rendered(words, messages, "three"), [by_user("three")])
        assert text + new == "1u:one|a:two|u:three|a:"
    assert MARK not in new


def test_templates_that_hide_messages_are_refused(model):
    with pytest.raises(T2RError, match="does not show messages"):
        read_document(model, tokenizer("{{ messages | length }}"), DOCUMENT, chat=True)


@pytest.mark.parametrize("chat", [{}, [], {"messages": [{}], "text": "", "document": True, "tokens": 3}, {"text": 1}])
def test_a_damaged_conversation(model, chat, tmp_path):
    state = read_document(model, tokenizer(None), DOCUMENT)
    state.chat = chat
    state.save(tmp_path / "state")
    with pytest.raises(T2RError, match="its header is damaged"):
        model.load_state(tmp_path / "state")


def test_only_swapped_models_save_a_conversation(tmp_path):
    model = tiny("llama", torch.float64).eval()
    conversation = Conversation(model, tokenizer(None), max_new_tokens=2)
    conversation.say("hello")
    with pytest.raises(T2RError, match="only a swapped model has a state"):
        conversation.save(tmp_path / "state")
    swapped = t2r.swap(tiny("llama", torch.float64).eval(), feature_size=8)
    with pytest.raises(T2RError, match="nothing was said yet"):
        Conversation(swapped, tokenizer(None)).save(tmp_path / "state")
    assert not list(tmp_path.iterdir())
