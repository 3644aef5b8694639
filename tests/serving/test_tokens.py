"""The bytes of single tokens, of real kinds of tokenizers."""

import math

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from t2r.generation.engine.sequences import LogProbability
from t2r.serving.text import Detokenizer
from t2r.serving.tokens import LOWEST, TokenTexts


def by_pieces():
    """Return a tokenizer of the kind of SentencePiece, with a byte fallback. It removes the first space of a text."""
    pieces = ["<unk>", "</s>", "▁the", "▁cat", "s", "▁", ",", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    start = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), start])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


def by_bytes():
    """Return a tokenizer whose tokens are bytes, and two of a space and a part of a character."""
    vocabulary = {each: i for i, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocabulary | {"ĠðŁ": 256, "<end>": 257}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


PIECES, BYTES = by_pieces(), by_bytes()


def ids(tokenizer, *names):
    return tokenizer.convert_tokens_to_ids(list(names))


# A tokenizer, tokens, the bytes of each, and the names of those that are no whole characters.
TOKENS = [
    (PIECES, ids(PIECES, "▁the", "▁cat", "s", ",", "▁"), [b" the", b" cat", b"s", b",", b" "], {}),
    (PIECES, ids(PIECES, "<0xE6>", "<0x97>", "<0xA5>"), [b"\xe6", b"\x97", b"\xa5"], {1: r"bytes:\x97"}),
    (PIECES, ids(PIECES, "</s>"), [b"</s>"], {}),
    (BYTES, BYTES(" aé").input_ids, [b" ", b"a", b"\xc3", b"\xa9"], {2: r"bytes:\xc3"}),
    (BYTES, ids(BYTES, "ĠðŁ", "<end>"), [b" \xf0\x9f", b"<end>"], {0: r"bytes:\x20\xf0\x9f"}),
    (BYTES, [9999], [b""], {}),  # a model may have more tokens than its tokenizer
]


@pytest.mark.parametrize(("tokenizer", "tokens", "wanted", "parts"), TOKENS)
def test_the_bytes_of_tokens(tokenizer, tokens, wanted, parts):
    words = TokenTexts(tokenizer)
    assert [words.bytes_of(token) for token in tokens] == wanted
    for place, name in parts.items():
        assert words.name(tokens[place]) == name
    if not parts:
        assert [words.name(token).encode() for token in tokens] == wanted
    whole = b"".join(wanted).decode(errors="replace").removeprefix(" " if tokenizer is PIECES else "")
    assert tokenizer.decode([token for token in tokens if token < 9999]) == whole


def test_tokens_of_one_name_do_not_hide_each_other():
    """U+FFFD stands for any part of a character, and the least likely one had its name."""
    parts = ids(PIECES, "<0xE6>", "<0x97>")
    found = TokenTexts(PIECES).top(LogProbability(-0.1, [(parts[0], -0.1), (parts[1], -2.0), (4, -math.inf)]))
    assert found == {r"bytes:\xe6": -0.1, r"bytes:\x97": -2.0, "s": LOWEST}
    same = TokenTexts(BYTES).top(LogProbability(-0.1, [(8000, -0.1), (9000, -0.5)]))
    assert same == {"": -0.1}  # the most likely one


@pytest.mark.parametrize(
    ("before", "tokens", "text"),
    [
        ((), ("▁the", "▁cat"), "the cat"),
        (("▁the",), ("▁cat", "s"), " cats"),
        (("▁the", "▁cat"), ("s", "▁the"), "s the"),
        (("▁the", "<0xE6>"), ("<0x97>", "<0xA5>", "s"), "\ufffd\ufffds"),  # the end of what was begun cannot be told
    ],
)
def test_a_text_goes_on_with_its_space(before, tokens, text):
    made = Detokenizer(PIECES, ids(PIECES, *before))
    assert "".join(made.add([token]) for token in ids(PIECES, *tokens)) + made.add([], True) == text
    assert made.count == len(tokens)
