"""Conversions by two processes that share one model (FSDP 2, gloo, on a CPU), compared with those by one process."""

import ast
import json
import logging
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import t2r
from converting import SHORT, make_model, make_tokenizer, make_world, run, weights
from processes import same_threads
from t2r import compat
from t2r.budgets.costs import Costs
from t2r.errors import T2RError
from t2r.ops.stored import EIGHT
from t2r.pipelines.preparation import make_plan
from t2r.training.loop import processes
from t2r.training.loop.checkpoints import COMPLETE
from t2r.training.recipes.recipe import Recipe
from t2r.training.sessions.run_stage import agreed_checkpoint

SIZE = 2
KEPT = {"softmax_layers": "auto:1", "merged": True, "overrides": (*SHORT, "distill.task_weight=1")}
"""Gradients of cross entropy are not nearly zero, and are clipped, unlike those of a KL divergence of a few steps."""
DONE = "distill.checkpoints"

# A process of each rank makes the conversions one after the other, since starting processes takes seconds. At the first
# step after a checkpoint in a given folder, rank 1 kills itself.
CALLS = """
import ast, os, pathlib, signal, sys
import torch
from transformers.trainer_callback import DefaultFlowCallback
from transformers.utils import logging
from t2r import cli
from t2r.pipelines.convert import convert

calls, killed = ast.literal_eval(sys.argv[1])

def kill(*args, **options):
    if os.environ["RANK"] == "1" and list(pathlib.Path(killed).glob("checkpoint-*/complete")):
        os.kill(os.getpid(), signal.SIGKILL)

if killed is not None:
    DefaultFlowCallback.on_step_begin = kill
def app(*args, **options):
    for source, out, how in calls:
        convert(source, out, **how)
        found = [torch.rand(3).tolist(), logging.get_verbosity()]
        pathlib.Path(f"{out}.left-{os.environ['RANK']}").write_text(repr(found))
    return 0

cli.app = app
logging.set_verbosity_error()
cli.main()
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = make_world(tmp_path_factory.mktemp("world"))
    model = make_model("gpt2")  # tied embeddings; without dropout, for which each process draws its own numbers
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        setattr(model.config, name, 0.0)
    model.save_pretrained(folder / "gpt2")
    return folder


def options(world, **more):
    """Return the options of a conversion that is measured."""
    given = {"train": str(world / "train.txt"), "valid": str(world / "valid.txt"), "device": "cpu", "progress": False}
    return given | {"overrides": SHORT} | more


def launch(world, calls, killed=None):
    """Convert in two processes that share the models. Each call is a source, an output folder and options."""
    calls = [(str(source), str(out), options(world, fsdp_size=SIZE, **how)) for source, out, how in calls]
    given = repr((calls, None if killed is None else str(killed)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(SIZE)]
    script = world / "calls.py"
    script.write_text(CALLS)
    environment = same_threads(T2R_CACHE=str(world / "cache"), OMP_NUM_THREADS="1")
    return subprocess.run([*command, str(script), given], env=environment, capture_output=True, text=True, timeout=280)


def memory():
    """Return a budget of bytes with windows of several sizes."""
    costs = Costs.of(make_model("llama"), 64, nbits=EIGHT)
    return int(costs.least + 0.7 * (costs.whole - costs.least))


@pytest.fixture(scope="module")
def killed(world):
    """The output of a conversion whose second process was killed after a checkpoint."""
    done = launch(world, [(world / "llama", world / "cut", {"save_steps": 2})], world / "cut.run" / DONE)
    shutil.copytree(world / "cut.run", world / "again.run")
    return done


@pytest.fixture(scope="module")
def sharded(world, killed):
    """Several conversions in one launch."""
    calls = [
        (world / "llama", world / "again", {}),
        (world / "gpt2", world / "kept", KEPT | {"gradient_checkpointing": True}),
        (world / "again", world / "more", {"bf16": True, "restart": True, "save_steps": 3}),
        (world / "llama", world / "windows", {"memory": memory()}),
    ]
    done = launch(world, calls)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(autouse=True)
def _own_cache(world, monkeypatch):
    monkeypatch.setenv("T2R_CACHE", str(world / "cache"))


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def left(out):
    """Return what each process left after a conversion: its next random numbers, and the verbosity of libraries."""
    return [ast.literal_eval(Path(f"{out}.left-{rank}").read_text()) for rank in range(SIZE)]


def assert_close(one, other, atol=1e-5):
    """Compare models after steps of 1e-3 each.

    Sums of gradients are computed in another order, and Adam divides by their size: where it is near zero, rounding
    errors are largest. They are below a hundredth of a step."""
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        torch.testing.assert_close(x, theirs[name], rtol=1e-4, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def assert_results(ours, theirs):
    for stage, log in ours["log"].items():
        for one, two in zip(log, theirs["log"][stage], strict=True):
            assert two["loss"] == pytest.approx(one["loss"], rel=1e-3, abs=1e-6)
        assert theirs["stages"][stage]["perplexity"] == pytest.approx(ours["stages"][stage]["perplexity"], rel=1e-4)
    assert theirs["teacher"]["perplexity"] == pytest.approx(ours["teacher"]["perplexity"], rel=1e-5)


def test_if_one_process_ends_all_do_with_one_line(world, killed):
    assert killed.returncode != 0
    # Either a connection broke, or torchrun terminated the other process before it needed the connection.
    lines = [line for line in killed.stderr.splitlines() if "the same command resumes this run" in line]
    assert len(lines) == 1, killed.stderr
    assert "another process" in lines[0]
    assert str(-signal.SIGKILL) in killed.stderr  # torchrun tells which one
    assert not (world / "cut").exists()
    assert not (world / "cut.run" / "start").exists()


def test_two_processes_make_the_model_of_one(world, sharded):
    """Transfer, distillation and evaluation, resumed by two processes from the checkpoint of two."""
    one = run(world, world / "one", "llama", **options(world))
    two = results_of(world / "again")
    assert_results(one, two)
    assert_close(world / "one", world / "again")
    assert not (world / "again.run").exists()
    for name in ("config.json", "recipe.yaml"):
        assert (world / "one" / name).read_text() == (world / "again" / name).read_text()
    loaded = t2r.load(world / "again")
    assert loaded.generate(torch.tensor([[5, 6]]), max_new_tokens=3).shape == (1, 5)


def test_processes_draw_other_random_numbers(world, sharded):
    """Rows of a batch have their own dropout and noise, also if they are in several processes."""
    (first, _), (second, _) = left(world / "kept")
    assert first != second


def test_libraries_print_no_more_in_other_processes_than_in_the_first(world, sharded):
    assert [verbosity for _, verbosity in left(world / "again")] == [logging.ERROR] * SIZE


def test_one_process_resumes_the_checkpoint_of_two(world, killed):
    results = run(world, world / "cut", "llama", **options(world))
    straight = run(world, world / "straight", "llama", **options(world))
    assert_results(straight, results)
    assert_close(world / "straight", world / "cut")


def test_the_scan_keeps_the_same_layer(world, sharded):
    """The most sensitive layer, in a model with layers of other names, and the merged result.

    Its embeddings are tied, and its vocabulary of 97 is not a multiple of the processes: transformers alone divides
    embeddings and head separately then, and one of them keeps its first values."""
    one = run(world, world / "kept-by-one", "gpt2", **options(world, **KEPT))
    two = results_of(world / "kept")
    assert_results(one, two)
    assert [layer for layer, _ in two["sensitivity"]] == [layer for layer, _ in one["sensitivity"]]
    for (_, ours), (_, theirs) in zip(one["sensitivity"], two["sensitivity"], strict=True):
        assert theirs == pytest.approx(ours, abs=1e-5)
    assert_close(world / "kept-by-one", world / "kept")


def test_a_memory_budget_is_planned_by_one_process_for_all(world, sharded):
    two = results_of(world / "windows")
    one = run(world, world / "windows-by-one", "llama", **options(world, memory=memory()))
    assert two["planned"] == one["planned"]
    assert len({size for row in two["planned"]["plan"]["windows"] for size in row}) > 1
    assert_results(one, two)
    # One number of 3,104 of the head has a gradient of nearly zero, and differs by a fiftieth of a step.
    assert_close(world / "windows-by-one", world / "windows", atol=1e-4)


def test_a_conversion_is_continued(world, sharded):
    results = results_of(world / "more")
    assert list(results["stages"]) == ["distill"]
    again = results_of(world / "again")
    assert results["before"]["perplexity"] == pytest.approx(again["stages"]["distill"]["perplexity"], rel=1e-4)
    assert results["teacher"]["perplexity"] == pytest.approx(again["teacher"]["perplexity"], rel=1e-5)


def test_a_plan_is_made_by_the_main_process_also_without_sharding(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(processes, "is_main", lambda: False)
    monkeypatch.setattr(processes, "agreed", lambda value: "the plan of the main process" if value is None else value)
    asked = SimpleNamespace(plan=Recipe("short", ()), given=SimpleNamespace(progress=False), divided=False)
    budget = SimpleNamespace(plan=lambda *args, **options: "another plan")
    task = SimpleNamespace(read=lambda: None)
    assert make_plan(budget, asked, None, None, task, {}) == "the plan of the main process"


def test_a_checkpoint_that_only_the_main_process_sees_is_refused(tmp_path, monkeypatch):
    """Machines that share no folder: the first one would resume, and wait for the others, which begin again."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(processes, "is_main", lambda: False)
    monkeypatch.setattr(processes, "everywhere", lambda holds: holds)
    monkeypatch.setattr(processes, "agreed", lambda value: value or tmp_path / "checkpoint-2")
    with pytest.raises(T2RError, match=r"not all processes see .*checkpoint-2, which the first one resumes"):
        agreed_checkpoint(tmp_path)
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / COMPLETE).write_text("damaged here, but only the main process reads it")
    assert agreed_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


@pytest.mark.slow
def test_two_processes_agree_on_a_time_budget(world):
    done = launch(world, [(world / "llama", world / "timed", {"minutes": 0.5})])
    assert done.returncode == 0, done.stderr
    results = results_of(world / "timed")
    assert all(steps >= 1 for steps in results["steps"].values())


# --- What is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"overrides": (*SHORT, "distill.train=lora")}, "LoRA, which distill trains"),
        ({"overrides": (*SHORT, "distill.average=2")}, "an average of weights, which distill has"),
        ({"overrides": (*SHORT, "optimizer=muon")}, "muon of transfer and distill"),
        ({"compiled": True}, "compile: leave it out"),
        ({"train": "teacher"}, "text by the teacher: generate it first"),
    ],
)
def test_what_cannot_be_combined_is_refused_at_once(world, tmp_path, monkeypatch, given, message):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(T2RError, match=message):
        run(world, tmp_path / "out", "llama", fsdp_size=SIZE, **given)
    assert not list(tmp_path.iterdir())


def test_the_number_of_processes_is_that_of_the_launcher(world, tmp_path):
    with pytest.raises(T2RError, match="fsdp_size is 2, but the number of processes is 1: start 2 of them"):
        run(world, tmp_path / "out", "llama", fsdp_size=SIZE)


def test_a_model_is_given_by_name(tmp_path, monkeypatch, world):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(T2RError, match="given as an object: give its folder"):
        run(world, tmp_path / "out", make_model("llama"), tokenizer=make_tokenizer(), fsdp_size=SIZE)


def test_the_fsdp_of_accelerate_is_refused(world, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(T2RError, match="accelerate's FSDP is not supported: start with torchrun and give fsdp_size"):
        run(world, tmp_path / "out", "llama")


def test_an_older_transformers_is_told_in_one_line(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(compat, "DISTRIBUTES", ("no_such_method",))
        with pytest.raises(T2RError, match="fsdp_size requires a newer transformers than"):
            compat.distributed_config(2)
    assert compat.distributed_config(2).fsdp_size == 2
