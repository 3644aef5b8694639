"""Tests of tokenizers trained on a text: lossless BPE, and words as in fairseq."""

import gzip
import json
import lzma
import math
import random
import re
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from t2r.data import tokenize_corpus, vocabulary
from t2r.data.chat import Part
from t2r.data.vocabulary import SPECIALS, train_tokenizer, word_tokenizer
from t2r.errors import T2RError
from t2r.evaluation import encode, perplexity

TEXT = """ = Valkyria = \n \n The game began development in 2010 , and the <unk> of the game is the same . \n
 It was also the subject of a Ō manga , the first of its <unk> . \n \n = = Gameplay = = \n"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("T2R_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path):
    (path := tmp_path / "text.tokens").write_text(TEXT, encoding="utf-8")
    return str(path)


def fairseq_dictionary(text):
    """Sort words as fairseq's `Dictionary` does: by count, then alphabetically."""
    counts = Counter(word for line in text.split("\n") for word in line.split() if word not in SPECIALS)
    return [*SPECIALS, *(word for word, _ in Counter(dict(sorted(counts.items()))).most_common())]


def fairseq_ids(text, dictionary):
    """Encode a file as fairseq's `encode_line` does: the words of each line, followed by EOS."""
    index = {word: i for i, word in enumerate(dictionary)}
    lines = text.removesuffix("\n").split("\n")
    return [index.get(word, 3) for line in lines for word in [*line.split(), "</s>"]]


def test_long_words_are_cut_before_a_bpe_is_trained():
    """Training time is quadratic in the length of a word. A word of 3 MB took hours."""
    text = "a short line\n" + "x" * 1000 + " " * 1000 + "Ō" * 300 + " end"
    pieces = list(vocabulary.without_long_runs(iter([text, "more"])))
    assert "".join(pieces) == text + "more"
    assert all(len(run) <= 256 for piece in pieces for run in re.findall(r"\S+|\s+", piece))
    assert len(pieces) == 3 + 3 + 1 + 1 + 1


# --- Words ----------------------------------------------------------------------------------------------------


def test_words_are_as_in_fairseq(file, tmp_path):
    tokenizer = train_tokenizer(file, "word", progress=False)
    dictionary = fairseq_dictionary(TEXT)
    assert tokenizer.get_vocab() == {word: i for i, word in enumerate(dictionary)}
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == ["<s>", "<pad>", "</s>", "<unk>"]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 1, 3)
    ids = fairseq_ids(TEXT, dictionary)
    assert tokenizer(TEXT).input_ids == ids
    assert len(ids) == len(TEXT.split()) + TEXT.count("\n")
    corpus = tokenize_corpus(file, tokenizer, progress=False)
    assert corpus.tokens.tolist() == ids  # no second EOS after the last line
    (tmp_path / "cut").write_text(TEXT.rstrip("\n"))
    assert tokenize_corpus(str(tmp_path / "cut"), tokenizer, progress=False).tokens.tolist() == ids


def test_words_decode_line_by_line(file):
    tokenizer = train_tokenizer(file, "word", progress=False)
    ids = tokenizer(TEXT + " never seen </s> x").input_ids
    text = tokenizer.decode(ids)
    tidy = "\n".join(" ".join(line.split()) for line in TEXT.split("\n"))
    assert text == tidy + "<unk> <unk>\n<unk>"
    assert tokenizer(text).input_ids == ids
    for part in (ids[:1], ids[3:5], [2], [2, 2, 5], []):
        assert tokenizer(tokenizer.decode(part)).input_ids == part


def test_a_smaller_vocabulary_keeps_the_frequent_words(file):
    tokenizer = train_tokenizer(file, "word", 10, progress=False)
    assert len(tokenizer) == 10
    assert set(tokenizer.get_vocab()) == set(fairseq_dictionary(TEXT)[:10])
    assert 3 in tokenizer("Valkyria").input_ids


def test_splitting_long_text_does_not_change_its_tokens(tmp_path):
    rng = random.Random(0)
    words = [f"w{i}" for i in range(300)]
    lines = [" ".join(rng.choices(words, k=rng.randrange(40))) for _ in range(3000)]
    (path := tmp_path / "long.txt").write_text(text := "".join(f" {line} \n" for line in lines))
    tokenizer = train_tokenizer(str(path), "word", progress=False)
    assert len(text) > 2 * (1 << 16)
    corpus = tokenize_corpus(str(path), tokenizer, progress=False)
    assert corpus.tokens.tolist() == fairseq_ids(text, fairseq_dictionary(text))


def test_perplexity_of_words(file):
    """Offsets refer to the text, so its words are counted correctly. Newlines are scored too."""
    tokenizer = train_tokenizer(file, "word", progress=False)
    text = encode(tokenizer, TEXT)
    assert [text.between(i, i + 1).strip(" ") for i in range(6)] == ["=", "Valkyria", "=", "\n", "\n", "The"]
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=16))
    scored = perplexity(model, text, window=16, stride=8, tail=True)
    words = len(text.between(8, len(text.token_ids)).split())
    assert words < scored.tokens == len(text.token_ids) - 8
    assert scored.word_perplexity == pytest.approx(math.exp(scored.nll.double().sum().item() / words))


def test_a_dictionary_with_a_word_twice_is_refused():
    with pytest.raises(T2RError, match="a duplicate word"):
        word_tokenizer(["a", "b", "a"])
    with pytest.raises(T2RError, match="a duplicate word, or a special token"):
        word_tokenizer(["a", "<unk>"])


# --- BPE ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "text.txt").write_text(TEXT * 3, encoding="utf-8")
    return train_tokenizer(str(folder / "text.txt"), "bpe", 300, cache_dir=folder / "cache", progress=False)


@given(st.text())
def test_bpe_gives_back_exactly_the_text(bpe, text):
    assert bpe.decode(bpe(text).input_ids) == text


def test_bpe_is_plain(bpe):
    assert len(bpe) == 300
    assert bpe.bos_token == bpe.eos_token == "<|endoftext|>"
    assert bpe.eos_token_id == 0
    game, spaced = (bpe.convert_ids_to_tokens(bpe(text).input_ids) for text in ("game", " game"))
    assert (spaced, game[0][0]) == (["Ġgame"], "g")  # no space is added before a text
    for text in (" , 's . n't !", "  two  \n\n spaces ", "Ō 好 🎉<|endoftext|>"):
        assert bpe.decode(bpe(text).input_ids) == text
    assert bpe("a<|endoftext|>").input_ids[-1] == 0


# --- Both -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "size"), [("bpe", 300), ("word", None)])
def test_the_same_text_makes_the_same_tokenizer(tmp_path, monkeypatch, kind, size):
    """The tokenizer does not depend on file formats and splits, on saving and loading, or on the cache."""
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(TEXT.encode()))
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    half = TEXT.index("\n", 60) + 1
    (tmp_path / "half-1").write_text(TEXT[:half], encoding="utf-8")
    (tmp_path / "half-2").write_text(TEXT[half:], encoding="utf-8")
    names = ["a.txt", "a.txt.gz", "b.txt.xz", "c.jsonl", "half-*"]
    made = [train_tokenizer(str(tmp_path / name), kind, size, progress=False) for name in names]
    assert len({tokenizer.backend_tokenizer.to_str() for tokenizer in made}) == 1
    made[0].save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert loaded(TEXT).input_ids == made[0](TEXT).input_ids
    assert loaded.decode(loaded(TEXT).input_ids) == made[0].decode(made[0](TEXT).input_ids)
    assert loaded.eos_token_id == made[0].eos_token_id

    monkeypatch.setattr(vocabulary, "read_all", None)  # the text must not be read again
    again = train_tokenizer(str(tmp_path / "a.txt"), kind, size, progress=False)
    assert again.get_vocab() == made[0].get_vocab()
    (tmp_path / "a.txt").write_text("something else")
    with pytest.raises(TypeError):
        train_tokenizer(str(tmp_path / "a.txt"), kind, size, progress=False)


def test_text_is_read_in_whole_lines(monkeypatch):
    parts = [Part("a b", ends=False), Part("c\nd", ends=False), Part(" e"), Part("f")]
    assert list(vocabulary.whole_lines(iter(parts))) == ["a bc\n", "d e", "f"]
    monkeypatch.setattr(vocabulary, "LONGEST", 4)
    parts = [Part(x, ends=False) for x in ("ab cd", "ef", "xxxx", "x\n")] + [Part("")]
    assert list(vocabulary.whole_lines(iter(parts))) == ["ab", " cdef", "xxxxx\n"]


@pytest.mark.parametrize(
    ("kind", "size", "words"),
    [
        ("char", 300, "no tokenizer of kind 'char'"),
        ("bpe", None, "requires a vocab_size"),
        ("bpe", 256, "requires at least 257"),
        ("word", 4, "requires at least 5"),
    ],
)
def test_invalid_options(file, kind, size, words):
    with pytest.raises(T2RError, match=words):
        train_tokenizer(file, kind, size, progress=False)


def test_invalid_texts(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(T2RError, match="no words"):
        train_tokenizer(str(tmp_path / "empty.txt"), "word", progress=False)
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    with pytest.raises(T2RError, match="no chat template"):
        train_tokenizer(str(tmp_path / "chat.jsonl"), "bpe", 300, progress=False)
    with pytest.raises(T2RError, match="there is no file"):
        train_tokenizer(str(tmp_path / "none.txt"), "bpe", 300, progress=False)
    assert not list((tmp_path / "cache").rglob("*.json"))


def test_a_tokenizer_that_another_process_made_meanwhile_is_used(tmp_path):
    made = []

    def make(folder):
        word_tokenizer(["a", "b"]).save_pretrained(folder)
        if not made:  # the other process finishes first
            made.append(vocabulary.cached_tokenizer(["words"], make_first, tmp_path))

    def make_first(folder):
        word_tokenizer(["a", "b"]).save_pretrained(folder)
        (folder / "first").touch()

    assert vocabulary.cached_tokenizer(["words"], make, tmp_path).get_vocab() == made[0].get_vocab()
    (folder,) = tmp_path.iterdir()
    assert (folder / "first").exists()
