"""t2r bench serve: a load over HTTP; correctness of what is measured, not speed."""

import asyncio
import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from serving_models import listening, served, teacher, tokenizer
from t2r import T2RError
from t2r.bench import serving
from t2r.bench.client import Client, Refused
from t2r.cli import app
from t2r.experiments.results import serving_tables
from t2r.serving.served import ServedModel

SMALL = ["--users", "1", "--users", "3", "--prompt", "5", "--prompt", "20", "--new-tokens", "4", "--gap", "1"]
SMALL += ["--after", "30", "--after", "400", "--repeats", "1"]


@pytest.fixture(scope="module")
def server():
    with listening(served(), ServedModel("llama", teacher(), tokenizer()), max_length=300) as found:
        yield found


def test_both_models_are_measured(server):
    address, service = server
    run = CliRunner().invoke(app, ["bench", "serve", "--url", address, *SMALL, "--json"], catch_exceptions=False)
    report = json.loads(run.stdout)
    assert [(row["model"], row["users"]) for row in report["rows"]] == [
        ("rnn", 1),
        ("llama", 1),
        ("rnn", 3),
        ("llama", 3),
    ]
    for row in report["rows"]:
        assert row["tokens_per_second"] > 0
        assert 0 < row["first_token"][0] <= row["first_token"][1]
        assert 0 < row["between_tokens"][0] <= row["between_tokens"][1]
    one, grown = (row["bytes_per_user"] for row in report["rows"] if row["model"] == "llama" and row["users"] in (1, 3))
    assert grown - one == 15 * 768  # the longest prompts are of 5 and of 20 tokens
    # A turn after N tokens reads what a turn reads, and the state of the RNN is what it was at first.
    turns = {(turn["model"], turn["tokens"]): turn for turn in report["turns"]}
    assert set(turns) == {("rnn", 0), ("llama", 0), ("rnn", 30), ("llama", 30)}
    for name in ("rnn", "llama"):
        assert turns[name, 0]["reading"] is None
        assert turns[name, 30]["reading"] > 0
        assert turns[name, 30]["read"] == 1 + len(f"u~{serving.LINE}|a~")
    assert turns["rnn", 0]["state_bytes"] == turns["rnn", 30]["state_bytes"] < turns["llama", 30]["state_bytes"]
    assert [note.partition(":")[0] for note in report["notes"]] == ["rnn", "llama"]
    assert all("no turn after 400 tokens" in note for note in report["notes"])
    assert not service.running
    users, conversation = serving_tables(report)  # of a record
    assert [table.count("\n") for table in (users, conversation)] == [6, 6]
    assert "| 30 tokens | llama |" in conversation


def test_the_tables_can_be_shown(server):
    report = serving.run(server[0], [2], prompts=[5], new_tokens=3, after=[10], gap=0.0, repeats=1)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(*serving.tables(report))
    text = console.export_text()
    assert "prompts of 5 tokens, 3 new ones" in text
    assert "A turn of a conversation" in text


def test_what_is_wrong_is_one_line(server, tmp_path):
    address, _ = server
    for url, says in (
        ("127.0.0.1:8000", "is not the URL of a server"),
        ("http://127.0.0.1:99999", "is not a URL"),
        ("http://127.0.0.1:1", "no server answers at http://127.0.0.1:1"),
    ):
        with pytest.raises(T2RError, match=says):
            serving.run(url)
    with pytest.raises(T2RError, match="users must be at least 1; got 0"):
        serving.run(address, [0])
    with pytest.raises(T2RError, match="--url"):
        CliRunner().invoke(app, ["bench", "serve"], catch_exceptions=False)
    with pytest.raises(T2RError, match="omit them with --url"):
        CliRunner().invoke(app, ["bench", "serve", "--url", address, "--rows", "3"], catch_exceptions=False)

    async def ask():
        await Client(address).ask("/v1/completions", {"prompt": "a", "nonsense": 1})

    with pytest.raises(Refused, match="the field 'nonsense' is not supported"):
        asyncio.run(ask())


def test_a_key_is_sent():
    with listening(served(), key="secret") as (address, _):
        with pytest.raises(T2RError, match="a valid key is required"):
            serving.run(address, [1])
        report = serving.run(address, [1], key="secret", prompts=[3], new_tokens=2, after=[], repeats=1)
        assert [turn.tokens for turn in report.turns] == [0]


def test_a_server_that_does_not_start_says_why():
    with (
        pytest.raises(T2RError, match=r"the server did not start: .*--nonsense"),
        serving.started("any", ["--nonsense"]),
    ):
        pass


@pytest.mark.slow
def test_a_server_of_its_own_is_started_and_ended(tmp_path):
    """The process says where it listens, and what is wrong with the model."""
    served().model.save_pretrained(tmp_path / "rnn")
    tokenizer().save_pretrained(tmp_path / "rnn")
    small = ["--users", "1", "--prompt", "5", "--new-tokens", "2", "--after", "8", "--repeats", "1", "--device", "cpu"]
    run = CliRunner().invoke(app, ["bench", "serve", str(tmp_path / "rnn"), *small, "--json"], catch_exceptions=False)
    assert [turn["tokens"] for turn in json.loads(run.stdout)["turns"]] == [0, 8]
    with pytest.raises(T2RError, match=r"the server did not start: .*nowhere"):
        CliRunner().invoke(app, ["bench", "serve", str(tmp_path / "nowhere"), *small], catch_exceptions=False)
