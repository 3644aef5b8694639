"""Signals during a stage: a checkpoint of the last whole step is saved, and the stage is resumed exactly there."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

from converting import BLOCK, SHORT, assert_same, make_world, run
from processes import same_threads
from t2r.training.loop import interruption
from t2r.training.loop.checkpoints import last_checkpoint
from t2r.training.steps.learner import Learner
from t2r.training.steps.muon import Muon

STEPS = (*SHORT, "distill.steps=8", "distill.dropout=true", f"device_tokens={2 * BLOCK}")  # two passes per step


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("T2R_CACHE", str(tmp_path / "cache"))


def send_at(monkeypatch, owner, name, call, *signals, stage="distill"):
    """Send signals to this process in the middle of the nth call of a method."""
    real, calls = getattr(owner, name), []

    def watched(self, *args, **options):
        made = real(self, *args, **options)
        if getattr(getattr(self, "stage", None), "name", stage) == stage:
            calls.append(1)
            if len(calls) == call:
                for number in signals:
                    os.kill(os.getpid(), number)
        return made

    monkeypatch.setattr(owner, name, watched)


def cut(world, out, monkeypatch, *where, error=KeyboardInterrupt, overrides=STEPS):
    with monkeypatch.context() as patch:
        send_at(patch, *where)
        with pytest.raises(error) as raised:
            run(world, out, overrides=overrides)
    return raised.value


@pytest.mark.parametrize(
    ("number", "error", "call", "step"),
    [
        (signal.SIGINT, KeyboardInterrupt, 6, 2),  # in the second forward pass of the third step
        (signal.SIGINT, KeyboardInterrupt, 7, 3),  # in the first forward pass of the fourth
        (signal.SIGTERM, SystemExit, 6, 2),
    ],
)
def test_a_step_is_left_and_its_stage_resumed_exactly(world, tmp_path, monkeypatch, caplog, number, error, call, step):
    handlers = [signal.getsignal(each) for each in interruption.SIGNALS]
    out = tmp_path / "cut"
    raised = cut(world, out, monkeypatch, Learner, "forward", call, number, error=error)
    assert not isinstance(raised, SystemExit) or raised.code == 143
    assert last_checkpoint(tmp_path / "cut.run" / "distill.checkpoints").name == f"checkpoint-{step}"
    assert f"interrupted: step {step} of distill is saved" in caplog.text
    assert "the same command resumes this run" in caplog.text
    assert [signal.getsignal(each) for each in interruption.SIGNALS] == handlers
    torch.manual_seed(99)
    caplog.set_level("INFO", "t2r")
    run(world, out, overrides=STEPS)
    assert f"resuming from step {step} of distill" in caplog.text
    run(world, tmp_path / "straight", overrides=STEPS)
    assert_same(out, tmp_path / "straight")


def test_an_update_is_not_left(world, tmp_path, monkeypatch):
    """A signal during the optimizer step waits for its end."""
    overrides = (*STEPS, "distill.optimizer=muon")
    cut(world, tmp_path / "cut", monkeypatch, Muon, "step", 4, signal.SIGINT, overrides=overrides)
    assert last_checkpoint(tmp_path / "cut.run" / "distill.checkpoints").name == "checkpoint-4"
    run(world, tmp_path / "cut", overrides=overrides)
    run(world, tmp_path / "straight", overrides=overrides)
    assert_same(tmp_path / "cut", tmp_path / "straight")


def test_a_signal_in_the_last_step_waits_for_the_end_of_the_stage(world, tmp_path, monkeypatch):
    """Its weights are saved as those of a finished stage."""
    cut(world, tmp_path / "cut", monkeypatch, torch.optim.lr_scheduler.LambdaLR, "step", 4 + 1 + 8 + 1, signal.SIGINT)
    assert (tmp_path / "cut.run" / "distill.safetensors").exists()
    run(world, tmp_path / "cut", overrides=STEPS)
    run(world, tmp_path / "straight", overrides=STEPS)
    assert_same(tmp_path / "cut", tmp_path / "straight")


def test_a_second_signal_stops_at_once(world, tmp_path, monkeypatch, caplog):
    def again(self, *args, **options):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("t2r.training.loop.trainer.save_file", again)  # while the checkpoint is written
    cut(world, tmp_path / "cut", monkeypatch, Learner, "forward", 6, signal.SIGINT)
    assert last_checkpoint(tmp_path / "cut.run" / "distill.checkpoints") is None
    assert "is saved" not in caplog.text


def test_before_the_first_step_there_is_nothing_to_save(world, tmp_path, monkeypatch, caplog):
    cut(world, tmp_path / "cut", monkeypatch, Learner, "forward", 1, signal.SIGINT)
    assert last_checkpoint(tmp_path / "cut.run" / "distill.checkpoints") is None
    assert "is saved" not in caplog.text
    assert "the same command resumes this run" in caplog.text


def test_on_a_gpu_a_forward_pass_is_not_left():
    """A capture must not be left: the signal waits for the end of the pass."""
    stop = interruption.Interruption(anywhere=False)
    stop.on_step_begin(None, None, None)
    stop.receive(signal.SIGINT, None)
    with pytest.raises(interruption.Interrupted):
        stop.on_substep_end(None, None, None)
    before = torch.get_rng_state()
    nn.functional.dropout(torch.ones(9))
    stop.rewind()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_command_saves_a_checkpoint_and_exits(world, tmp_path):
    """Ctrl-C in a real process: exit code 130, and no traceback."""
    options = ["--train", str(world / "train.txt"), "--device", "cpu", "--steps", "100000", "--set", "warmup_steps=0"]
    options += ["--block-size", str(BLOCK), "--batch-tokens", str(BLOCK), "--recipe", "finetune-lm"]
    command = [sys.executable, "-m", "t2r", "convert", str(world / "gpt2"), str(tmp_path / "out"), *options]
    environment = same_threads(T2R_CACHE=str(tmp_path / "cache"))
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        said = []
        for line in process.stderr:
            said.append(line)
            if "stage finetune" in line:
                break
        process.send_signal(signal.SIGINT)
        said.append(process.stderr.read())
        assert process.wait(timeout=60) == 130, "".join(said)
    assert "Traceback" not in "".join(said)
    assert "the same command resumes" in said[-1]
