"""Translation from the command line: convert, evaluate, generate."""

import json

import pytest
from typer.testing import CliRunner

import t2r
from t2r.cli import app
from t2r.errors import T2RError
from translating import make_model, make_tokenizer, write_pairs


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    make_model().save_pretrained(folder / "teacher")
    t2r.swap(make_model(), feature_size=4, recurrent="both").save_pretrained(folder / "rnn")
    for name in ("teacher", "rnn"):
        make_tokenizer().save_pretrained(folder / name)
    write_pairs(folder, "train", 30)
    write_pairs(folder, "test", 5, seed=2)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("T2R_CACHE", str(tmp_path / "cache"))


def run(*words, stdin=None):
    done = CliRunner().invoke(app, list(map(str, words)), input=stdin)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_convert_and_evaluate(world, tmp_path):
    out = tmp_path / "out"
    given = [
        "--src",
        world / "train.src",
        "--tgt",
        world / "train.tgt",
        "--tgt",
        "teacher",
        "--src",
        world / "test.src",
    ]
    valid = ["--valid-src", world / "test.src", "--valid-tgt", world / "test.tgt", "--limit", 3]
    short = ["--steps", 2, "--block-size", 64, "--batch-tokens", 64, "--device", "cpu"]
    results = json.loads(run("convert", world / "teacher", out, *given, *valid, *short, "--json").stdout)
    assert results["stages"]["distill"]["lines"] == 3
    assert [entry["target"] for entry in results["mixture"]] == [str(world / "train.tgt"), "teacher"]
    pair = ["--src", world / "test.src", "--ref", world / "test.tgt", "--device", "cpu", "--beams", 2]
    measured = run("evaluate", world / "teacher", out, *pair, "--outputs", tmp_path / "texts")
    assert "BLEU" in measured.stdout
    assert "nrefs:1" in measured.stdout
    assert "against the first" in measured.stdout
    assert "state or cache, cross" in measured.stdout
    assert len((tmp_path / "texts" / "2-out.txt").read_text().splitlines()) == 5
    first, second = json.loads(run("evaluate", world / "teacher", out, *pair, "--json").stdout)
    assert first["bleu"] > 5  # it has learned a little
    assert first["copied"]["numbers"]["total"] == 0
    assert first["kept_tokens"] is not None
    assert second["kept_tokens"] is not None  # of the source
    assert second["causal_bytes"] > 0
    assert sum(part["lines"] for part in first["by_length"]) == 5
    assert "tok:moses-en" in first["tokenized_bleu_signature"]
    assert "paired bootstrap" in measured.stdout


def test_lines_stay_in_their_places(world):
    lines = ["w3 w4", "", "w5", "w6 w7 w8 w9 w10", "  ", "w11 w12"]
    for name in ("teacher", "rnn"):
        options = ["--num-beams", 2, "--max-new-tokens", 20, "--batch-size", 2, "--device", "cpu"]
        together = run("generate", world / name, *options, stdin="\n".join(lines) + "\n").stdout.split("\n")[:-1]
        alone = [run("generate", world / name, line, *options).stdout.strip() if line.strip() else "" for line in lines]
        assert together == alone
        assert [i for i, text in enumerate(together) if not text] == [1, 4]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("convert {w}/teacher {o} --train {w}/train.src", "give it parallel text"),
        ("convert {w}/teacher {o} --src {w}/train.src", "1 file of sources and 0 of targets"),
        ("convert {w}/teacher {o} --src {w}/train.src --tgt {w}/test.tgt", "ends after line 5, and"),
        ("evaluate {w}/teacher --src {w}/test.src", "--src and --ref"),
        ("evaluate {w}/teacher --src {w}/test.src --ref {w}/train.tgt", "ends after line 5, and"),
        ("evaluate {w}/teacher --src {w}/test.src --ref {w}/test.tgt --text {w}/test.src", "measured alone"),
    ],
)
def test_mistakes(world, tmp_path, command, words):
    with pytest.raises(T2RError) as error:
        run(*command.format(w=world, o=tmp_path / "out").split())
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("outputs", "words"), [("{w}/test.src", "is not a folder"), ("{w}/test.src/texts", "Not a directory")]
)
def test_where_translations_cannot_be_saved_is_known_first(world, monkeypatch, outputs, words):
    monkeypatch.setattr("t2r.evaluation.translation.translate", lambda *_, **__: pytest.fail("translated"))
    command = "evaluate {w}/teacher --src {w}/test.src --ref {w}/test.tgt --outputs " + outputs
    with pytest.raises(T2RError, match=words):
        run(*command.format(w=world).split())


def test_translations_that_cannot_be_saved(world, tmp_path):
    (tmp_path / "texts" / "1-teacher.txt").mkdir(parents=True)
    command = "evaluate {w}/teacher --src {w}/test.src --ref {w}/test.tgt --limit 1 --beams 1 --outputs {o}/texts"
    with pytest.raises(T2RError, match="cannot be written: Is a directory"):
        run(*command.format(w=world, o=tmp_path).split())
