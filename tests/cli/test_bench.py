"""t2r bench: whole models by name."""

import json

import pytest
import torch
from typer.testing import CliRunner

import t2r
from families import tiny
from t2r.cli import app
from t2r.errors import T2RError
from t2r.experiments.results import steps_table


def test_decode(tmp_path):
    teacher = tiny("llama", torch.float32)
    teacher.save_pretrained(tmp_path / "teacher")
    t2r.swap(teacher, feature_map="hedgehog").save_pretrained(tmp_path / "rnn")
    models = [str(tmp_path / "teacher"), str(tmp_path / "rnn")]
    quick = ["--length", "4", "--length", "8", "--steps", "1", "--repeats", "1", "--device", "cpu"]
    page = tmp_path / "speed.html"
    run = CliRunner().invoke(app, ["bench", "decode", *models, *quick, "--page", str(page)], catch_exceptions=False)
    assert run.exit_code == 0
    assert "engine" in run.stdout
    assert "<svg" in page.read_text()
    run = CliRunner().invoke(app, ["bench", "decode", *models, *quick, "--batch", "1", "--batch", "2", "--json"])
    reports = json.loads(run.stdout)
    assert [report["settings"]["batch"] for report in reports] == [1, 2]


def test_translate_and_memory(tmp_path):
    quick, page = ["--repeats", "1", "--device", "cpu"], tmp_path / "page.html"
    small = ["--shape", "tiny-mt", "--length", "4", "--batch", "1", "--page", str(page)]
    run = CliRunner().invoke(app, ["bench", "translate", *small, *quick, "--json"], catch_exceptions=False)
    points = json.loads(run.stdout)["points"]
    assert [point["model"] for point in points] == ["softmax", "ELU 64-64", "RFA 32-4", "T2R 32-4"]
    assert "Memory of attention" in page.read_text()
    small = ["--shape", "tiny-lm", "--context", "32", "--memory", "0.01", "--most", "2", "--steps", "1"]
    run = CliRunner().invoke(app, ["bench", "memory", *small, *quick], catch_exceptions=False)
    assert run.exit_code == 0
    assert "T2R 32: 1.0 times the batch of softmax" in run.stdout


def test_requests():
    small = ["--requests", "1", "--requests", "3", "--prompt", "5", "--new-tokens", "4", "--sampled", "2"]
    small += ["--repeats", "1", "--device", "cpu"]
    run = CliRunner().invoke(app, ["bench", "requests", "random:tiny-lm", *small, "--json"], catch_exceptions=False)
    rows = json.loads(run.stdout)["rows"]
    assert [row["requests"] for row in rows] == [1, 3]
    assert all(row["tokens_per_second"] > 0 and row["first_token"][0] > 0 for row in rows)
    run = CliRunner().invoke(app, ["bench", "requests", "random:tiny-lm", *small, "--rows", "2", "--step-tokens", "2"])
    assert "one of 2 sampled" in " ".join(run.stdout.split())
    run = CliRunner().invoke(app, ["bench", "requests", "random:tiny-mt", *small])
    assert "encoder-decoder" in str(run.exception)


def test_train(tmp_path):
    tiny("llama", torch.float32).save_pretrained(tmp_path / "teacher")
    small = ["--batch-tokens", "32", "--block-size", "16", "--repeats", "1", "--device", "cpu", "--feature-size", "8"]
    run = CliRunner().invoke(app, ["bench", "train", str(tmp_path / "teacher"), *small, "--json"])
    assert run.exit_code == 0, run.output
    report = json.loads(run.stdout)
    steps = ["softmax model, finetuned", "converted, transfer", "converted, distill", "converted, finetuned"]
    assert [row["step"] for row in report["rows"]] == steps
    assert all(row["milliseconds"] > 0 for row in report["rows"])
    run = CliRunner().invoke(app, ["bench", "train", str(tmp_path / "teacher"), "--batch-tokens", "100"])
    assert run.exit_code != 0


def test_train_with_the_windows_of_a_converted_model(tmp_path):
    model = tiny("llama", torch.float32)
    model.save_pretrained(tmp_path / "teacher")
    heads = model.config.num_key_value_heads
    windows = [[4] * heads for _ in range(model.config.num_hidden_layers)]
    t2r.swap(model, feature_size=2, grouped=True, plan={"windows": windows, "sinks": 1}).save_pretrained(
        tmp_path / "out"
    )
    small = ["--batch-tokens", "32", "--block-size", "16", "--repeats", "1", "--device", "cpu", "--json"]
    teacher, like = str(tmp_path / "teacher"), str(tmp_path / "out")
    run = CliRunner().invoke(app, ["bench", "train", teacher, "--like", like, *small])
    assert run.exit_code == 0, run.output
    report = json.loads(run.stdout)
    assert report["settings"]["recipe"] == "memory-lm"
    assert [row["step"] for row in report["rows"]][1:3] == ["converted, transfer", "converted, distill"]
    run = CliRunner().invoke(app, ["bench", "train", teacher, "--like", teacher, *small])
    assert "is not a converted model" in str(run.exception)
    t2r.swap(tiny("llama", torch.float32), feature_size=2).save_pretrained(tmp_path / "other")
    run = CliRunner().invoke(app, ["bench", "train", "random:tiny-mt", "--like", str(tmp_path / "other"), *small])
    assert json.loads(run.stdout)["settings"]["recipe"] == "distill-mt"  # the kind is that of the model


def test_train_with_random_weights(caplog):
    small = ["--batch-tokens", "32", "--block-size", "16", "--repeats", "1", "--device", "cpu", "--recipe", "paper-lm"]
    run = CliRunner().invoke(app, ["bench", "train", "random:tiny-lm", *small, "--feature-size", "8", "--json"])
    assert run.exit_code == 0, run.output
    report = json.loads(run.stdout)
    assert [row["step"] for row in report["rows"]] == ["softmax model, finetuned", "converted, finetune"]
    assert steps_table(report).startswith("| steps of 2 × 16 tokens | ms | tokens/s | against softmax |")
    long = ["--batch-tokens", "2048", "--block-size", "2048", *small[4:]]  # more than the 1,024 positions of the shape
    with caplog.at_level("INFO"):
        run = CliRunner().invoke(app, ["bench", "train", "random:tiny-lm", *long, "--feature-size", "8"])
    assert run.exit_code == 0, run.output
    assert "fewer than 2048 positions" in caplog.text


@pytest.mark.parametrize("recipe", [None, "paper-mt"])
def test_train_encoder_decoders_on_pairs(recipe):
    small = ["--batch-tokens", "32", "--block-size", "8", "--repeats", "1", "--device", "cpu", "--json"]
    run = CliRunner().invoke(
        app, ["bench", "train", "random:tiny-mt", *small, *(["--recipe", recipe] if recipe else [])]
    )
    assert run.exit_code == 0, run.output
    report = json.loads(run.stdout)
    assert report["settings"]["recipe"] == (recipe or "distill-mt")
    stages = ["finetune"] if recipe else ["transfer", "distill", "finetuned"]
    assert [row["step"] for row in report["rows"]][1:] == [f"converted, {stage}" for stage in stages]
    assert all(row["milliseconds"] > 0 for row in report["rows"])


def test_train_refuses_pairs_beyond_the_positions():
    long = ["--batch-tokens", "2048", "--block-size", "2048", "--device", "cpu"]
    run = CliRunner().invoke(app, ["bench", "train", "random:tiny-mt", *long])
    assert isinstance(run.exception, T2RError)
    assert "block_size=2048 is beyond the 128 positions of the model" in str(run.exception)
