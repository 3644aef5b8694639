"""The number of CPU threads: found by timing steps, and set for one thread of Python."""

import threading

import torch

from t2r.threads import STEADY, TRIED, Tuner, candidates, fixed_by_user, own_threads


def test_candidates_are_halved():
    assert candidates(1) == [1]
    assert candidates(2) == [2, 1]
    assert candidates(12) == [12, 6, 3, 1]


def steps(tuner: Tuner, machine: dict[int, float], count: int) -> list[int]:
    """Run steps on a machine, given as the seconds of a step by number of threads. Return the numbers used."""
    used = []
    for _ in range(count):
        used.append(tuner.count)
        tuner.add(machine[tuner.count])
    return used


IDLE, BUSY = {4: 0.03, 2: 0.05, 1: 0.09}, {4: 0.7, 2: 0.4, 1: 0.1}


def test_the_fastest_number_is_found_by_the_steps_themselves():
    tuner = Tuner(4, seconds=0.5)
    tuner.try_all()
    # One thread is not tried, because two are much slower than four.
    assert steps(tuner, IDLE, 2 * TRIED) == [4] * TRIED + [2] * TRIED
    assert set(steps(tuner, IDLE, 3 * STEADY)) == {4}
    # A trial of slow steps ends after two of them.
    assert steps(tuner, BUSY, STEADY) == [4] * STEADY
    assert steps(tuner, BUSY, 4 + TRIED) == [4] * 2 + [2] * 2 + [1] * TRIED
    assert set(steps(tuner, BUSY, 3 * STEADY)) == {1}


def test_a_number_of_the_environment_is_kept(monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert not fixed_by_user()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert fixed_by_user()


def test_the_number_is_that_of_one_thread_of_python():
    """`torch.set_num_threads` would also set it for threads that start meanwhile."""
    before, seen = torch.get_num_threads(), []
    try:
        torch.set_num_threads(2)
        with own_threads(1):
            assert torch.get_num_threads() == 1
            other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            other.start()
            other.join()
        assert torch.get_num_threads() == 2
        assert seen == [2]
    finally:
        torch.set_num_threads(before)
