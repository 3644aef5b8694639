"""States of documents on the command line, in separate processes."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import t2r
from families import tiny
from t2r.cli import app
from t2r.generation.state import PIECE, read_document

TEXT = "the old man and the sea went out with a boat to catch fish but he came home with none"
WORDS = TEXT.split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a swapped tiny Llama with a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    core = Tokenizer(models.WordLevel(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.train_from_iterator([WORDS], trainers.WordLevelTrainer(special_tokens=["<pad>", "<s>", "</s>", "<unk>"]))
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(path)
    t2r.swap(tiny("llama", torch.float64), feature_size=8, init="identity").save_pretrained(path)
    return path


def run(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_document_is_read_once_and_continued_twice(folder, tmp_path):
    document, question = " ".join(WORDS * 30), "the old man"
    (tmp_path / "book.txt").write_text(document)
    state = tmp_path / "book.state"
    assert "read 600 tokens" in run("generate", folder, "--file", tmp_path / "book.txt", "--save-state", state)
    options = ("--max-new-tokens", 6, "--json")
    answers = [json.loads(run("generate", folder, question, "--load-state", state, *options)) for _ in range(2)]
    assert answers[0]["text"] == answers[1]["text"]
    whole = json.loads(run("generate", folder, f"{document} {question}", *options))
    assert answers[0]["text"] == whole["text"]
    facts = json.loads(run("inspect", state, "--json"))
    assert facts["tokens"] == 600
    assert facts["sequences"] == 1


def test_reading_on_from_a_state(folder, tmp_path):
    first, both = tmp_path / "1.state", tmp_path / "2.state"
    run("generate", folder, "the old man", "--save-state", first)
    run("generate", folder, "and the sea", "--load-state", first, "--save-state", both)
    whole = tmp_path / "whole.state"
    run("generate", folder, "the old man and the sea", "--save-state", whole)
    model = t2r.T2RForCausalLM.from_pretrained(folder)
    a, b = model.load_state(both), model.load_state(whole)
    assert torch.allclose(a.layers[0].state.s, b.layers[0].state.s)


def test_pieces_make_no_difference(folder, monkeypatch):
    from transformers import AutoTokenizer

    model, tokenizer = t2r.T2RForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    text = " ".join(WORDS)
    whole = read_document(model, tokenizer, text)
    monkeypatch.setattr("t2r.generation.state.PIECE", 5)
    pieces = read_document(model, tokenizer, text)
    assert PIECE > 5
    assert torch.allclose(whole.layers[2].state.s, pieces.layers[2].state.s, atol=1e-10)


def test_models_without_a_state(folder, tmp_path):
    base = tmp_path / "base"
    tiny("llama", torch.float32).save_pretrained(base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).write_bytes((folder / name).read_bytes())
    result = CliRunner().invoke(app, ["generate", str(base), "the sea", "--save-state", str(tmp_path / "x")])
    assert "only a swapped model has a state" in str(result.exception)
    assert not (tmp_path / "x").exists()
