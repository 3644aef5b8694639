"""The chat of `t2r generate` in a terminal, and its states."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import t2r
from families import VOCABULARY, tiny
from processes import CTRL_C, InTerminal, same_threads
from t2r import cli

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FEW = ("--max-new-tokens", "5")
DOCUMENT = "it(was)a/dark-night"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A swapped model, `rnn`, one with a softmax layer, `hybrid`, and their teacher, whose answers have no end."""
    root = tmp_path_factory.mktemp("models")
    # Chinese characters are streamed one by one, others with the next space.
    characters = [*"!abcdefghijklmnopqrstuvwxyz<>()/-?", *map(chr, range(0x4E00, 0x4E3F))]
    assert len(characters) == VOCABULARY
    backend = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="!"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    words = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="!", clean_up_tokenization_spaces=False)
    words.chat_template = TEMPLATE
    for name, options in (("teacher", None), ("rnn", {}), ("hybrid", {"softmax_layers": [0]})):
        model = tiny("llama", torch.float64, layers=2)
        model.generation_config.eos_token_id, model.config.eos_token_id = None, None
        if options is not None:
            model = t2r.swap(model, feature_size=8, init="identity", **options)
        model.save_pretrained(root / name)
        words.save_pretrained(root / name)
    return root


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command in this process, with these lines typed or piped, and return its exit code, stdout and stderr."""

    def run(*arguments: object, typed: str | None = None, piped: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["t2r", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(piped) if typed is None else Terminal(typed))
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return exit.value.code or 0, *capsys.readouterr()

    return run


def answers(stdout: str) -> list[str]:
    """Return the answers of a chat, without the prompts."""
    return [answer for line in stdout.splitlines() if (answer := line.replace("> ", ""))]


def test_the_banner_names_the_model_and_its_memory(run, folders, tmp_path):
    _, _, said = run("generate", folders / "rnn", *FEW, typed="")
    assert "rnn, on cpu in float64: an RNN, with a state of " in said
    assert "for any length.\nCtrl-C stops an answer, Ctrl-D ends the chat, /help lists commands.\n" in said
    _, _, said = run("generate", folders / "hybrid", *FEW, typed="")
    assert "an RNN with 1 softmax layer of 2, with a state of" in said
    _, _, said = run("generate", folders / "teacher", *FEW, typed="")
    token = 2 * 2 * 2 * 8 * 8  # keys and values, layers, heads, size, bytes
    assert f"teacher, on cpu in float64: a transformer, with a state of {token} B for each token.\n" in said
    assert run("generate", folders / "rnn", *FEW, "--quiet", typed="")[2] == ""


def test_a_document_is_read_once_and_asked_twice(run, folders, tmp_path):
    book = tmp_path / "book.state"
    code, stdout, _ = run("generate", folders / "rnn", "--chat", "--save-state", book, piped=DOCUMENT)
    assert (code, stdout.partition(";")[0]) == (0, f"read {len('<user>') + len(DOCUMENT) + 2} tokens")
    whole = [
        run("generate", folders / "rnn", "--chat", f"{DOCUMENT}\n\n{line}", *FEW)[1].strip()
        for line in ("who?", "why?")
    ]
    asked = [run("generate", folders / "rnn", "--chat", line, *FEW, "--load-state", book) for line in ("who?", "why?")]
    assert [stdout.strip() for _, stdout, _ in asked] == whole
    _, stdout, said = run("generate", folders / "rnn", *FEW, "--load-state", book, typed="who?\n/reset\nwhy?\n")
    assert answers(stdout) == whole
    assert f"Continues from {book}, after {len('<user>') + len(DOCUMENT) + 2} tokens.\n" in said


def test_a_chat_is_saved_after_every_answer_and_resumed(run, folders, tmp_path):
    state, words = tmp_path / "chat.state", ("generate", folders / "rnn", "--chat", *FEW)
    _, stdout, _ = run(*words, typed="hello\nmore\nlast\n")
    whole = answers(stdout)
    _, stdout, said = run(*words, "--save-state", state, typed="hello\n")
    assert answers(stdout) == whole[:1]
    assert f"Saves the conversation in {state} after every answer.\n" in said
    how = ("--load-state", state, "--save-state", state)
    _, stdout, said = run(*words, *how, typed="more\n")
    assert answers(stdout) == whole[1:2]
    assert "tokens and 2 messages.\n" in said
    assert run(*words[:3], *FEW, "last", "--load-state", state)[1].strip() == whole[2]
    assert answers(run(*words, *how, typed="last\n")[1]) == whole[2:]
    assert run("inspect", state)[1].splitlines()[-1].split() == ["messages", "6"]


def test_commands(run, folders, tmp_path):
    typed = f"hello\n/save {tmp_path / 'chat state'}\n/reset\nhello\n/help\n/home/of/what?\n"
    _, stdout, said = run("generate", folders / "rnn", *FEW, typed=typed)
    first, again, other = answers(stdout)
    assert first == again != other
    assert f"saved in {tmp_path / 'chat state'}\n" in said
    assert "/save FILE  save the conversation" in said
    assert t2r.load(str(folders / "rnn")).load_state(tmp_path / "chat state").chat["messages"][1]["content"] == first


def test_a_turn_that_fails_does_not_end_the_chat(run, folders, tmp_path):
    words = ("generate", folders / "rnn", *FEW)
    lines = (f"/save {tmp_path / 'a'}", "hello", f"/save {tmp_path}", f"/save {folders / 'rnn/config.json'}", "more")
    code, stdout, said = run(*words, typed="".join(f"{line}\n" for line in lines))
    assert code == 0
    assert len(answers(stdout)) == 2
    assert "t2r: nothing was said yet" in said
    assert f"t2r: {tmp_path} is a folder" in said
    assert "config.json exists and is not a state" in said


def test_states_are_for_swapped_models(run, folders, tmp_path):
    for how in (("--save-state", tmp_path / "x"), ("--load-state", tmp_path / "x")):
        code, _, said = run("generate", folders / "teacher", "--chat", *how, typed="hello\n")
        assert (code, said.count("\n")) == (2, 1)
        assert "only a swapped model has a state" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="requires a pseudo-terminal")
def test_ctrl_c_stops_an_answer_and_ends_the_chat_at_the_prompt(run, folders, tmp_path):
    state = tmp_path / "chat.state"
    words = ["generate", folders / "rnn", "--chat", "--max-new-tokens", 10**6, "--save-state", state]
    with InTerminal(sys.executable, "-m", "t2r", *map(str, words), environment=same_threads()) as terminal:
        terminal.wait_for("> ")
        assert "an RNN, with a state of" in terminal.text
        for number, line in enumerate(("hello", "more"), 1):
            terminal.type(f"{line}\n")
            terminal.wait_for(f"> {line}\n", more=20)  # characters of an answer of a million tokens
            terminal.type(CTRL_C)
            terminal.wait_for("\n> ", number + 1)
        terminal.type(CTRL_C)
        assert terminal.ended() == 0
        assert "Traceback" not in terminal.text
    model = t2r.load(str(folders / "rnn"))
    chat = model.load_state(state).chat
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant"] * 2
    assert all(len(message["content"]) >= 20 for message in chat["messages"][1::2])
    # What was generated is part of the conversation: it goes on as if it had been read at once.
    _, stdout, _ = run("generate", folders / "rnn", "--chat", "last", *FEW, "--load-state", state)
    _, whole, _ = run("generate", folders / "rnn", chat["text"] + "<user>last<assistant>", *FEW)
    assert stdout == whole
