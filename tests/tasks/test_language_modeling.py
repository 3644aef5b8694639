"""Language modeling: text that is held out to be measured, and what scores say."""

import math
import pickle

import numpy as np
import pytest
import torch

from converting import BLOCK, SHORT, make_model, make_tokenizer, make_world, run, words
from t2r.data.blocks import Blocks
from t2r.data.corpus import Beginning, JoinedCorpus
from t2r.tasks import LanguageModeling
from t2r.tasks.language_modeling import held_tokens


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = make_world(tmp_path_factory.mktemp("world"))
    (folder / "long.txt").write_text("\n".join(words(100, seed=seed) for seed in range(90)))
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("T2R_CACHE", str(tmp_path / "cache"))


def task(world, *train, **options):
    made = LanguageModeling(make_tokenizer(), [str(world / name) for name in train], progress=False, **options)
    made.check(make_model("gpt2"), [BLOCK])
    made.read()
    return made


@pytest.mark.parametrize(
    ("tokens", "held", "by_the_teacher"),
    [
        (600, 0, 0),  # one window would be too much of it
        (2000, 0, 3 * 64),  # four windows would be
        (4 * 64 * 10, 4 * 64, 4 * 64),
        (64_000, 1280, 1280),
        (10**7, 32 * 64, 32 * 64),
    ],
)
def test_how_much_is_held_out(tokens, held, by_the_teacher):
    assert held_tokens(tokens, 64) == held
    assert held_tokens(tokens, 64, least=1) == by_the_teacher


def test_the_end_of_the_first_text_is_held_out(world, caplog):
    """What is trained on are the same blocks, without the last ones."""
    whole, some = task(world, "long.txt", "train.txt"), task(world, "long.txt", "train.txt", hold_out=True)
    first, other = (str(world / name) for name in ("long.txt", "train.txt"))
    corpus, kept = whole.corpora[first], some.corpora[first]
    held = held_tokens(len(corpus), 64)
    assert held == some.held == len(some.text.token_ids) == len(corpus) - len(kept) > 200
    assert torch.equal(some.text.token_ids, torch.from_numpy(corpus.read(len(kept), len(corpus))))
    assert some.text.ends is not None  # of the decoded text: metrics per word and byte
    assert some.corpora[other].key == whole.corpora[other].key
    assert kept.key != corpus.key
    blocks, fewer = Blocks(corpus, BLOCK), Blocks(kept, BLOCK)
    assert len(fewer) == len(kept) // BLOCK < len(blocks)
    assert all(torch.equal(blocks[i]["input_ids"], fewer[i]["input_ids"]) for i in range(len(fewer)))
    assert "long.txt are held out and measured" in some.told_data()
    assert task(world, "long.txt", valid=str(world / "valid.txt"), hold_out=True).held == 0
    assert task(world, "train.txt", hold_out=True).text is None  # too short


def test_the_beginning_of_a_corpus(world):
    whole = task(world, "long.txt").corpora[str(world / "long.txt")]
    kept = Beginning(whole.folder, 1000)
    again = pickle.loads(pickle.dumps(kept))
    assert len(again) == 1000
    assert again.key == kept.key == f"{whole.key}:1000"
    for name in ("read", "scored", "positions"):
        assert np.array_equal(getattr(kept, name)(900, 1000), getattr(whole, name)(900, 1000))
    assert JoinedCorpus([kept]).key == kept.key


def test_a_conversion_without_a_text_to_measure(world, tmp_path, caplog):
    caplog.set_level("INFO", "t2r")
    results = run(world, tmp_path / "out", train=str(world / "long.txt"))
    assert "no text to measure on was given: the last" in caplog.text
    assert results["teacher"]["windows"] > 3
    assert results["teacher"]["perplexity"] < 200
    assert results["mixture"][0]["tokens"] + results["teacher"]["window"] * 4 < len((world / "long.txt").read_text())
    assert "long.txt are held out and measured" in (tmp_path / "out" / "README.md").read_text()


def test_text_by_the_teacher_is_held_out(world, tmp_path, caplog):
    caplog.set_level("INFO", "t2r")
    tokens = 128 * 64  # random tokens become fewer when they are decoded and encoded
    results = run(world, tmp_path / "out", train="teacher", teacher_tokens=tokens, overrides=(*SHORT, "block_size=64"))
    assert "of the text by the teacher are held out" in caplog.text
    assert "plan: 4 evaluations on 7 windows of 64 tokens" in caplog.text  # of text that is not written yet
    assert 4 <= results["teacher"]["windows"] <= 7
    assert results["stages"]["distill"]["kl"] > 0


def score(perplexity):
    return {"perplexity": perplexity}


def test_a_student_far_from_its_teacher():
    assert LanguageModeling.gap(score(20.0), score(24.9)) is None
    assert LanguageModeling.gap(score(20.0), score(30.0)) == "its perplexity is 30.00 instead of 20.00 (+50%)"
    assert LanguageModeling.gap(score(20.0), score(None)) == "its perplexity is not finite"
    assert LanguageModeling.gap(score(20.0), score(math.inf)) == "its perplexity is not finite"
    assert LanguageModeling.gap(score(None), score(30.0)) is None


def test_a_teacher_that_does_not_know_the_text():
    assert LanguageModeling.doubt(score(199.0)) is None
    assert LanguageModeling.doubt(score(311.4)) == "its perplexity is 311 per token"
    assert LanguageModeling.doubt(score(None)) == "its perplexity is not finite per token"
