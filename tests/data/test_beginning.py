"""Texts of a tokenizer that begins every text with BOS begin with it wherever a model reads them."""

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from families import tiny
from t2r.budgets.planning import Planner
from t2r.data import Blocks
from t2r.data.beginning import bos_of
from t2r.data.corpus import CorpusWriter, TokenCorpus
from t2r.evaluation import encode, perplexity, recall
from t2r.evaluation.generation import recall_questions, repeated_sentences
from t2r.evaluation.perplexity import begun
from t2r.generation.teacher import excerpts
from t2r.tasks import LanguageModeling
from texts import EOS, train, words

BOS = "<|user|>"


def beginning(bos_token=BOS):
    """Return a tokenizer that begins every text with this token."""
    made = train(eos_token=EOS, bos_token=bos_token, unk_token="<unk>")
    marks = [(BOS, made.convert_tokens_to_ids(BOS))]
    made.backend_tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=marks)
    return made


@pytest.fixture(scope="module")
def tokenizer():
    return beginning()


@pytest.fixture
def corpus(tmp_path):
    with CorpusWriter(tmp_path / "corpus", np.dtype(np.uint16)) as writer:
        for first in range(100, 400, 30):
            writer.add(list(range(first, first + 29)), True)
            writer.end_document(99, True)
        writer.commit({})
    return TokenCorpus(tmp_path / "corpus")


def test_which_tokenizers_begin_texts(tokenizer):
    assert bos_of(tokenizer) == tokenizer.bos_token_id == tokenizer("x").input_ids[0]
    assert bos_of(train(eos_token=EOS)) is None
    assert bos_of(train(eos_token=EOS, bos_token=BOS)) is None  # it has one, and does not use it
    assert bos_of(beginning(bos_token=EOS)) is None  # what it begins texts with has another meaning


def test_blocks_begin(corpus):
    plain, own = Blocks(corpus, 16), Blocks(corpus, 16, bos=7)
    for without, item in zip(plain, own, strict=True):
        assert item["input_ids"][0] == 7
        assert item["input_ids"][1:].equal(without["input_ids"][1:])
        assert item["labels"][1:].equal(without["labels"][1:])


def test_documents_begin(corpus):
    plain, own = Blocks(corpus, 64, documents=True), Blocks(corpus, 64, documents=True, bos=7)
    for without, item in zip(plain, own, strict=True):
        first = item["position_ids"] == 0
        assert first.sum() == 3  # that of the block, and two in it
        assert (item["input_ids"][first] == 7).all()
        assert item["input_ids"][~first].equal(without["input_ids"][~first])
        assert item["labels"].equal(without["labels"])  # no first token is predicted


def test_training_reads_the_token(tmp_path, tokenizer):
    (tmp_path / "text.txt").write_text(words(2000), encoding="utf-8")
    task = LanguageModeling(tokenizer, str(tmp_path / "text.txt"), hold_out=True, progress=False)
    task.read()
    dataset = task.dataset(32)
    assert all(item["input_ids"][0] == tokenizer.bos_token_id for item in dataset)
    assert task.describe()["bos"] == tokenizer.bos_token_id
    task.span = 32
    task.hold()
    assert task.text is not None
    assert task.text.bos == tokenizer.bos_token_id


def test_windows_begin(tokenizer):
    model = tiny("llama", torch.float32)
    ids = torch.arange(3, 51)
    text = encode(tokenizer, words(80))
    text.token_ids[:] = text.token_ids % 40  # the vocabulary of the tiny model is smaller
    found = perplexity(model, text, window=16, stride=8, limit=3, batch_size=2)
    for i in range(3):
        window = text.token_ids[8 * i : 8 * i + 16].clone()
        assert not window[0].equal(torch.tensor(text.bos))
        window[0] = text.bos
        with torch.no_grad():
            logits = model(input_ids=window[None]).logits[0, 7:-1].log_softmax(-1)
        expected = -logits.gather(1, window[8:, None])[:, 0]
        torch.testing.assert_close(found.nll[8 * i : 8 * i + 8], expected, atol=1e-5, rtol=1e-5)
    assert begun(ids[None], 1)[0, :2].tolist() == [1, 4]
    assert ids[0] == 3  # unchanged


def test_questions_begin(tokenizer, monkeypatch):
    bos, text = tokenizer.bos_token_id, words(4000)
    filler = encode(tokenizer, text).token_ids.tolist()
    ids, _ = recall_questions(tokenizer, filler, 300, 3, choices=2)
    assert (ids[:, 0] == bos).all()
    assert (ids[:, 1:] != bos).all()
    ids, _ = repeated_sentences(tokenizer, filler, 600, 2)
    assert (ids[:, 0] == bos).all()
    assert (ids[:, 1:] != bos).all()
    seen = []

    def answers(model, contexts, trials, variant):
        seen.extend(contexts)
        return torch.zeros(len(contexts), max(len(trial.answer) for trial in trials), len(tokenizer))

    monkeypatch.setattr("t2r.evaluation.generation._answers", answers)
    recall(tiny("llama", torch.float32), tokenizer, text, distances=[8], trials=2, choices=2)
    assert [row[0] for row in seen] == [bos, bos]


def test_the_text_of_a_plan_has_the_token_at_beginnings_only(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("T2R_CACHE", str(tmp_path))
    blocks = torch.arange(3, 35).reshape(2, 16)
    planner = Planner(tiny("llama", torch.float32), tokenizer, begun(blocks, tokenizer.bos_token_id), progress=False)
    assert planner.text == [*range(4, 19), *range(20, 35)]


def test_excerpts_begin(corpus):
    assert (excerpts(corpus, 3, 8, 7)[:, 0] == 7).all()
    torch.manual_seed(0)
    plain = excerpts(corpus, 3, 8)
    torch.manual_seed(0)
    assert excerpts(corpus, 3, 8, 7)[:, 1:].equal(plain[:, 1:])
