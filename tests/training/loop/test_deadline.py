"""The clocks of a stage: its deadline, and when its checkpoints are due, in one process and in several."""

from types import SimpleNamespace

import pytest

from t2r.training.loop import processes, trainer
from t2r.training.loop.deadline import AGREE, Deadline, next_agreement


class Time:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Time()
    monkeypatch.setattr("time.monotonic", made.monotonic)
    return made


@pytest.fixture
def exchanges(monkeypatch):
    """Two processes with the same clock. Lists the values that they exchanged."""
    made = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(processes, "agreed", lambda value: made.append(value) or value)
    return made


def run_to_the_end(deadline, clock, seconds, most=5000):
    """Make steps of `seconds` until the deadline. Returns the planned steps after each of them."""
    state, control = SimpleNamespace(global_step=0), SimpleNamespace(should_training_stop=False)
    deadline.on_train_begin(None, state, control)
    reached = []
    while not control.should_training_stop and len(reached) < most:
        clock.now += seconds
        state.global_step += 1
        reached.append(deadline.planned_step(state.global_step))
        deadline.on_step_end(None, state, control)
    return reached


def test_slow_steps_of_several_processes_end_in_time(clock, exchanges):
    """If the clocks were synchronized in every tenth step only, five planned steps of a minute would become ten, nine
    of which have the learning rate of the first."""
    assert run_to_the_end(Deadline(300.0, 5), clock, 60.0) == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_fast_steps_of_several_processes_are_rarely_interrupted(clock, exchanges):
    assert len(run_to_the_end(Deadline(30.0, 3000), clock, 0.01)) == pytest.approx(3000, abs=AGREE)
    assert len(exchanges) == pytest.approx(300, abs=2)


def test_steps_until_clocks_are_synchronized():
    assert [next_agreement(each) for each in (0.0, 0.01, 0.1, 0.3, 1.0, 60.0)] == [AGREE, AGREE, AGREE, 3, 1, 1]


def test_slow_steps_of_several_processes_are_saved_in_time(clock, exchanges):
    saves = trainer.Clock()
    state, saved = SimpleNamespace(global_step=0), []
    saves.on_train_begin(None, state, None)
    for state.global_step in range(1, 10):
        clock.now += 60.0
        control = SimpleNamespace(should_save=False)
        saves.on_step_end(None, state, control)
        if control.should_save:
            saved.append(state.global_step)
            saves.on_save(None, state, control)
    assert saved == [3, 6, 9]
