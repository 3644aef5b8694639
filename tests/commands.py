"""Running commands in this process, and a tokenizer for tiny models."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from t2r import cli

TEXT = "the old man and the sea went out with a boat to catch fish but he came home with none . " * 40


def words(size: int = 97) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    many = " ".join(f"w{i}" for i in range(size - 24)) if size > 97 else ""
    core.train_from_iterator([TEXT * 9, many], trainers.WordLevelTrainer(special_tokens=["<pad>", "</s>", "<unk>"]))
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def runner(monkeypatch: Any, capsys: Any) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs a command and returns its exit code, standard output and standard error."""

    def run(*arguments: object, stdin: str | bytes = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["t2r", *map(str, arguments)])
        raw = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return exit.value.code or 0, *capsys.readouterr()

    return run


def is_one_line(stderr: str) -> bool:
    """Return whether an error is one line of t2r, except for notes."""
    lines = [line for line in stderr.splitlines() if not line.startswith("t2r: note: ")]
    return len(lines) == 1 and lines[0].startswith("t2r: ")
