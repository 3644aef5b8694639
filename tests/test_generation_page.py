"""The examples of docs/generation.md run, in the order of the page."""

from __future__ import annotations

import io
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import t2r
from families import VOCABULARY, tiny
from t2r import cli
from t2r.cli.chat import COMMANDS

PAGE = (Path(__file__).parent.parent / "docs" / "generation.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SHELL = re.findall(r"^    (t2r generate .*)$", PAGE, re.MULTILINE)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the model and the texts that the page names."""
    backend = Tokenizer(models.WordLevel({chr(33 + i): i for i in range(VOCABULARY)}, unk_token="!"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    words = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="!", clean_up_tokenization_spaces=False)
    words.chat_template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}|{% endfor %}assistant:"
    words.save_pretrained(tmp_path / "rnn")
    model = tiny("llama", torch.float32, layers=1)
    t2r.swap(model, feature_size=4, init="identity").save_pretrained(tmp_path / "rnn")
    for name in ("book.txt", "volume2.txt"):
        (tmp_path / name).write_text("it was a dark night")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_python_examples(folder):
    names: dict[str, object] = {"print": lambda *args: None}
    for code in PYTHON:
        exec(compile(code, "docs/generation.md", "exec"), names)
    assert names["first"].finished
    assert torch.equal(names["ids"], names["model"].continue_from(names["state"], names["new"], max_new_tokens=8))
    assert (names["several"].rows, names["one"].rows, names["both"].rows) == (3, 1, 2)


def test_the_commands(folder, monkeypatch, capsys):
    assert len(SHELL) == 9
    for line in SHELL:
        command, _, file = line.partition(" < ")
        given = io.StringIO((folder / file).read_text()) if file else Terminal("hello\n")
        monkeypatch.setattr(sys, "argv", [*shlex.split(command), "--max-new-tokens", "2"])
        monkeypatch.setattr(sys, "stdin", given)
        with pytest.raises(SystemExit) as exit:
            cli.main()
        out, err = capsys.readouterr()
        assert not exit.value.code, (line, err)
        assert out.startswith("read ") if file else out.strip(), line
    assert len(t2r.load("rnn").load_state("chat.state").chat["messages"]) == 4


def test_the_table_has_every_command_of_a_chat():
    assert re.findall(r"^\| `(/[^`]+)`", PAGE, re.MULTILINE) == list(COMMANDS)
