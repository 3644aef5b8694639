"""Tuning of the number of threads of a training."""

import pytest
import torch

from t2r.threads import STEADY, TRIED
from t2r.training.loop.threads import Threads, can_choose, choose


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


IDLE, BUSY = {2: 0.55, 1: 0.74}, {2: 2.19, 1: 1.11}
"""Seconds of a step by number of threads, on two idle cores, and beside another process."""


@pytest.mark.parametrize(("machine", "best"), [(IDLE, 2), (BUSY, 1)])
def test_the_fastest_number_of_threads_is_chosen(machine, best, caplog):
    torch.set_num_threads(2)
    with caplog.at_level("INFO", "t2r"):
        assert choose(lambda: machine[torch.get_num_threads()]) == best == torch.get_num_threads()
    assert f"threads: {best} (a step takes {machine[2]:.2f} s with 2, {machine[1]:.2f} s with 1)" in caplog.text


def test_few_threads_are_not_tried_where_fewer_are_much_slower():
    torch.set_num_threads(8)
    tried = []
    assert choose(lambda: tried.append(torch.get_num_threads()) or 8.0 / torch.get_num_threads()) == 8
    assert tried == [8, 4]


def test_threads_are_tuned_only_for_a_single_process_on_a_cpu(monkeypatch):
    torch.set_num_threads(2)
    assert can_choose(torch.device("cpu"))
    assert not can_choose(torch.device("cuda"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not can_choose(torch.device("cpu"))
    monkeypatch.delenv("WORLD_SIZE")
    torch.set_num_threads(1)
    assert not can_choose(torch.device("cpu"))


def test_threads_are_tuned_again_when_steps_change():
    torch.set_num_threads(2)
    callback, used = Threads(2), []

    def steps(machine, count):
        for _ in range(count):
            used.append(torch.get_num_threads())
            callback.add(machine[used[-1]])

    steps(IDLE, 3 * STEADY)
    assert set(used) == {2}  # without a change nothing is tried
    steps(BUSY, STEADY + 2 * TRIED)
    assert torch.get_num_threads() == 1
    used.clear()
    steps(BUSY, 4 * STEADY)
    assert set(used) == {1}
    steps(IDLE, STEADY + 2 * TRIED)
    assert torch.get_num_threads() == 2
