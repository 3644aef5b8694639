"""Text from tokens as they come, with real kinds of tokenizers, and stop strings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from t2r.serving.text import Detokenizer, StopStrings


def by_bytes():
    """Return a tokenizer whose tokens are bytes, so that a character may have four."""
    vocabulary = {each: i for i, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocabulary | {"<end>": 256}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", clean_up_tokenization_spaces=False)
    assert made.decode(made("aé 日本🙂").input_ids) == "aé 日本🙂"
    return made


BYTES = by_bytes()


@given(st.lists(st.integers(0, 256), max_size=60), st.integers(1, 4))
def test_pieces_are_the_text_whatever_the_tokens(tokens, size):
    """Also of bytes that are no characters."""
    text = Detokenizer(BYTES)
    pieces = [text.add(tokens[i : i + size], i + size >= len(tokens)) for i in range(0, len(tokens), size)]
    assert "".join(pieces).replace("\ufffd", "") == BYTES.decode(tokens, skip_special_tokens=True).replace("\ufffd", "")


def test_a_character_comes_whole():
    text = Detokenizer(BYTES)
    tokens = BYTES("a日🙂b").input_ids
    pieces = [text.add([token]) for token in tokens]
    assert [piece for piece in pieces if piece] == ["a", "日", "🙂", "b"]


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_stop_strings(text, strings, data):
    """However a text is divided, it ends before the first stop string, and nothing is held back at the end."""
    stops, passed, left = StopStrings(strings), "", text
    while left and not stops.found:
        size = data.draw(st.integers(1, len(left)))
        passed += stops.add(left[:size], last=size == len(left))
        left = left[size:]
    places = [text.find(string) for string in strings if string in text]
    # A longer string may begin before a shorter one, which is found first.
    if places:
        assert stops.found
        assert text.startswith(passed)
        assert not any(string in passed for string in strings)
    else:
        assert passed == text


@pytest.mark.parametrize(("pieces", "passed"), [(["ab", "c"], ["", ""]), (["ab", "d"], ["", "abd"])])
def test_the_beginning_of_a_stop_string_is_held_back(pieces, passed):
    stops = StopStrings(["abc"])
    assert [stops.add(piece) for piece in pieces] == passed
