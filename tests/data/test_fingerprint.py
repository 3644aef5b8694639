"""Fingerprints of tokenizers, by which caches of tokens are named."""

import json

import pytest
from transformers import ByT5Tokenizer, FSMTTokenizer

from t2r.data.fingerprint import of_tokenizer

WORDS = {word: i for i, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", "a", "b", "ab</w>", "b</w>", "a</w>"])}
OTHER = {word: len(WORDS) - 1 - i for i, word in enumerate(WORDS)}


@pytest.fixture
def make(tmp_path):
    pytest.importorskip("sacremoses")

    def make(name, source=WORDS, target=WORDS, merges="a b</w>"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "vocab-src.json").write_text(json.dumps(source))
        (folder / "vocab-tgt.json").write_text(json.dumps(target))
        (folder / "merges.txt").write_text(f"{merges}\n")
        (folder / "tokenizer_config.json").write_text(json.dumps({"langs": ["en", "de"]}))
        return FSMTTokenizer.from_pretrained(folder)

    return make


def test_every_vocabulary_file_of_a_slow_tokenizer_counts(make):
    one, same = make("one"), make("same")
    others = [make("source", source=OTHER), make("target", target=OTHER), make("merges", merges="x y")]
    assert one("ab").input_ids != others[-1]("ab").input_ids
    assert of_tokenizer(one) == of_tokenizer(same)
    assert len({of_tokenizer(tokenizer) for tokenizer in (one, *others)}) == 4


def test_a_slow_tokenizer_whose_files_are_gone(make, tmp_path):
    tokenizer = make("one")
    before = of_tokenizer(tokenizer)
    for file in (tmp_path / "one").iterdir():
        file.unlink()
    assert of_tokenizer(tokenizer) == before


def test_a_tokenizer_without_vocabulary_files():
    assert of_tokenizer(ByT5Tokenizer()) == of_tokenizer(ByT5Tokenizer()) != of_tokenizer(ByT5Tokenizer(extra_ids=3))
