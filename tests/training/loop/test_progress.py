"""What is told of a stage while it trains."""

import logging
from types import SimpleNamespace

import pytest

from t2r.training.loop import progress
from t2r.training.loop.deadline import Deadline
from t2r.training.loop.progress import Bar, Notes


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now.seconds)
    return now


def state(step, first=True):
    return SimpleNamespace(global_step=step, max_steps=400, is_world_process_zero=first)


def test_a_line_a_minute_without_a_bar(clock, caplog):
    notes = Notes("distill")
    notes.on_train_begin(None, state(100), None)  # a resumed stage
    with caplog.at_level(logging.INFO):
        for step in range(110, 230, 10):
            clock.seconds += 10
            notes.on_log(None, state(step), None, {"loss": 2.3456789, "kl": 0.123456, "task": 2.0, "tokens": 9})
            notes.on_log(None, state(step), None, {"train_runtime": 1.0})
    assert caplog.messages == [
        "distill: step 160 of 400, loss 2.346, KL 0.1235, cross entropy 2, about 4.0 minutes left",
        "distill: step 220 of 400, loss 2.346, KL 0.1235, cross entropy 2, about 3.0 minutes left",
    ]


def test_the_time_left_of_a_budget(clock, caplog):
    deadline = Deadline(300.0, 50)
    notes = Notes("transfer", deadline)
    notes.on_train_begin(None, state(0), None)
    clock.seconds += 61
    deadline.elapsed = 250.0
    with caplog.at_level(logging.INFO):
        notes.on_log(None, state(1200), None, {"loss": 1.0})
        clock.seconds += 61
        notes.on_log(None, state(1300, first=False), None, {"loss": 1.0})  # of several processes one tells
    assert caplog.messages == ["transfer: step 1,200, loss 1, about 50 seconds left"]


def test_a_bar_names_its_stage(capsys):
    bar = Bar("distill")
    bar.on_train_begin(None, state(0), None)
    bar.on_train_end(None, state(0), None)
    assert "distill:" in capsys.readouterr().err
