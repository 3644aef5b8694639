"""`t2r merge` and `t2r evaluate`, through the real command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import t2r
from families import tiny
from t2r.cli import app
from t2r.evaluation import tables

TEXT = "the old man and the sea went out with a boat to catch fish but he came home with none . " * 40


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny GPT-2 and Llama, before and after a swap, each with a tokenizer, and a text."""
    root = tmp_path_factory.mktemp("models")
    core = Tokenizer(models.WordLevel(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.train_from_iterator([TEXT], trainers.WordLevelTrainer(special_tokens=["<pad>", "<s>", "</s>", "<unk>"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    for name in ("gpt2", "llama"):
        tiny(name, torch.float32).save_pretrained(root / name)
        t2r.swap(tiny(name, torch.float32), feature_size=6).save_pretrained(root / f"{name}-rnn")
        for folder in (root / name, root / f"{name}-rnn"):
            tokenizer.save_pretrained(folder)
    (root / "text.txt").write_text(TEXT)
    return root


def test_merge_saves_a_folder_that_answers_the_same(folders, tmp_path):
    result = run("merge", folders / "gpt2-rnn", tmp_path / "merged")
    assert result.exit_code == 0, result.output
    assert "multiplications per token before" in result.stdout
    before = AutoModelForCausalLM.from_pretrained(folders / "gpt2-rnn")
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.arange(3, 20)[None]
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(before.generate(ids, **options), after.generate(ids, **options))
    assert (tmp_path / "merged" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("source", "says"),
    [("llama-rnn", "rotated by position"), ("gpt2", "is not a t2r model"), ("nowhere/at/all", "no folder")],
)
def test_merge_refuses_and_leaves_nothing_behind(folders, tmp_path, source, says):
    result = run("merge", folders / source, tmp_path / "merged")
    assert result.exit_code != 0
    assert says in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_merge_keeps_its_source(folders):
    result = run("merge", folders / "gpt2-rnn", folders / "gpt2-rnn")
    assert "cannot be undone" in str(result.exception)


def test_merge_does_not_delete_its_source(folders, tmp_path):
    """A checkpoint in the folder of a model that is overwritten."""
    shutil.copytree(folders / "gpt2-rnn", tmp_path / "run")
    shutil.copytree(folders / "gpt2-rnn", tmp_path / "run" / "checkpoint-5")
    result = run("merge", tmp_path / "run" / "checkpoint-5", tmp_path / "run", "--overwrite")
    assert "would replace the model in" in str(result.exception)
    assert (tmp_path / "run" / "checkpoint-5" / "model.safetensors").exists()


def test_files_for_images_are_kept(folders, tmp_path):
    shutil.copytree(folders / "gpt2", tmp_path / "base")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / "base" / name).write_text("{}")
    assert run("swap", tmp_path / "base", tmp_path / "rnn", "--feature-size", 6).exit_code == 0
    assert run("merge", tmp_path / "rnn", tmp_path / "merged").exit_code == 0
    assert run("average", tmp_path / "rnn", tmp_path / "rnn", tmp_path / "mean").exit_code == 0
    for folder in ("rnn", "merged", "mean"):
        assert (tmp_path / folder / "preprocessor_config.json").read_text() == "{}"
        assert (tmp_path / folder / "processor_config.json").read_text() == "{}"


def test_evaluate_compares_models_with_the_first(folders):
    arguments = (
        "--text",
        folders / "text.txt",
        "--window",
        32,
        "--stride",
        16,
        "--limit",
        6,
        "--no-generation",
        "--json",
    )
    result = run("evaluate", folders / "llama", folders / "llama-rnn", *arguments)
    assert result.exit_code == 0, result.output
    teacher, student = json.loads(result.stdout)
    assert teacher["tokens"] == student["tokens"] == 96
    assert student["kl"] > 0
    assert student["perplexity"] != teacher["perplexity"]


def test_evaluate_prints_a_table(folders):
    arguments = ("--text", folders / "text.txt", "--window", 32, "--stride", 16, "--limit", 4, "--no-generation")
    result = run("evaluate", folders / "gpt2", *arguments)
    assert result.exit_code == 0, result.output
    assert "gpt2" in result.stdout


def test_a_missing_model_is_not_reported_as_a_missing_tokenizer(folders, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no network requests
    result = run("evaluate", "no-such-model", "--text", folders / "text.txt")
    assert "no-such-model is not a local folder" in str(result.exception)


def test_evaluate_needs_something_to_measure(folders):
    assert "nothing to measure: give --text FILE, --task NAME" in str(run("evaluate", folders / "gpt2").exception)


def test_evaluate_runs_the_task_that_ships(folders, monkeypatch, tmp_path):
    pytest.importorskip("lm_eval", reason="needs the lm-eval extra")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(Path(__file__).parents[2])  # the task's file path is relative to the repository root
    command = ("evaluate", folders / "llama", folders / "llama-rnn", "--limit", 8)
    task = ("--task", "next_words", "--task-folder", "examples/tasks")
    result = run(*command, *task)
    assert result.exit_code == 0, result.output
    assert "next_words: acc" in result.stdout
    text = ("--text", folders / "text.txt", "--window", 32, "--stride", 16, "--no-generation")
    both = json.loads(run(*command, *task, *text, "--json").stdout)
    assert all(row["perplexity"] > 1 and 0 <= row["tasks"]["next_words"]["acc,none"] <= 1 for row in both)


@pytest.mark.parametrize("indexed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quick", "indexed"])
def test_an_unknown_task_is_refused_before_the_text_is_measured(folders, monkeypatch, indexed):
    """The tasks of lm-eval are searched too. Reading their thousands of files takes ten seconds."""
    tasks = pytest.importorskip("lm_eval.tasks", reason="needs the lm-eval extra")
    searched = []

    class Manager(tasks.TaskManager):
        def __init__(self, include_path, include_defaults):
            searched.append(include_defaults)
            super().__init__(include_path=include_path, include_defaults=include_defaults and indexed)

    monkeypatch.setattr(tasks, "TaskManager", Manager)
    command = ("evaluate", folders / "gpt2", "--text", "no-such-file.txt", "--task", "no_such_task")
    assert "no task no_such_task" in str(run(*command).exception)
    assert searched == [False, True]


def test_a_task_without_its_data_is_one_line(folders, monkeypatch, tmp_path):
    pytest.importorskip("lm_eval", reason="needs the lm-eval extra")
    command = ("evaluate", folders / "gpt2", "--task", "next_words", "--task-folder")
    assert "there is no folder" in str(run(*command, tmp_path / "nowhere").exception)
    tasks = Path(__file__).parents[2] / "examples" / "tasks"
    monkeypatch.chdir(tmp_path)  # from here the task's file is not found
    assert "the data of next_words cannot be read" in str(run(*command, tasks).exception)


def test_tasks_are_one_row_per_metric():
    metrics = {"alias": "cloze", "acc,none": 0.25, "acc_stderr,none": 0.05, "f1,none": 0.5, "f1_stderr,none": "N/A"}
    (table,) = tables([{"model": "a", "tasks": {"cloze": metrics}}, {"model": "b", "tasks": {"cloze": metrics}}])
    assert [list(column.cells) for column in table.columns] == [
        ["cloze: acc", "cloze: f1"],
        *[["0.250 ± 0.050", "0.500"]] * 2,
    ]
