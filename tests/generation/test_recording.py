"""A recording replays the tensor operations of a function and nothing else."""

import copy
import threading

import numpy as np
import pytest
import torch

from t2r.generation.engine.recording import CannotRecord, Recording


def recorded(function, inputs, outputs):
    with torch.inference_mode():
        recording = Recording(function, inputs, outputs)

    def replay():
        with torch.inference_mode():
            recording()

    return recording, replay


def test_a_recurrence_is_replayed_in_place():
    weight, x = torch.randn(4, 4), torch.zeros(2, 4)
    states = [torch.zeros(2, 4), torch.zeros(2, 4)]
    outputs = [torch.zeros(2, 1), torch.zeros(2, 1)]
    calls = []

    def step(state, out):
        calls.append(1)
        y = torch.nn.functional.linear(x[:, None], weight, weight[0]).flatten(1)  # views of new tensors
        half = torch.nn.functional.silu(y.view(2, 2, 2).transpose(1, 2).reshape(2, 4))
        state.mul_(weight.sigmoid().mean(0)).add_(half)
        unused = torch.zeros_like(state).add_(1).exp()
        best, _ = torch.cat([state, torch.ones_like(state)], 1).max(1, keepdim=True)
        assert unused is not None
        out.copy_(best)

    recording, replay = recorded(lambda: step(states[1], outputs[1]), [x], [states[1], outputs[1]])
    states[1].zero_()
    for _ in range(4):
        x.copy_(torch.randn(2, 4))
        step(states[0], outputs[0])
        replay()
        assert torch.equal(states[0], states[1])
        assert torch.equal(outputs[0], outputs[1])
    assert len(calls) == 5  # no Python in a replay
    names = [str(getattr(run, "func", run)) for run in recording.calls]
    assert not [name for name in names if "sigmoid" in name], "what depends on weights alone is computed once"
    assert not [name for name in names if "exp" in name], "unused operations are omitted"


X, COUNTS, MASK = torch.ones(3), torch.tensor([1, 2, 1]), torch.tensor([True, False, True])
ON_A_DEVICE = torch.ones(2, device="meta")
READS = {
    "bool": lambda: X.sum() > 3 and None,
    "item": lambda: X[0].item(),
    "float": lambda: float(X[0]),
    "index": lambda: range(COUNTS[0]),
    "slice": lambda: X[: COUNTS[0]],
    "max": lambda: max(X),
    "in": lambda: 1 in X,
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "nonzero": lambda: MASK.nonzero(),
    "where": lambda: torch.where(MASK),
    "masked": lambda: X[MASK],
    "masked_select": lambda: X.masked_select(MASK),
    "unique": lambda: COUNTS.unique(),
    "bincount": lambda: COUNTS.bincount(),
    "repeat": lambda: X.repeat_interleave(COUNTS),
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.detach().numpy(),
    "array": lambda: np.asarray(X),
    "dlpack": lambda: np.from_dlpack(X),
    "address": lambda: X.data_ptr(),
    "copy": lambda: copy.deepcopy(X),
    "tensor": lambda: torch.tensor(X),
    "tensor of tensors": lambda: torch.tensor([X[0], X[1]]),
    "as_tensor": lambda: torch.as_tensor([X[0], X[1]]),
    "new_tensor": lambda: X.new_tensor([X[0]]),
}
DOES_NOT_READ = {
    "index": lambda: X[COUNTS],
    "masked assignment": lambda: X.clone().masked_fill_(MASK, 0).index_put_((MASK,), torch.zeros(())),
    "where": lambda: torch.where(MASK, X, 0),
    "repeat": lambda: X.repeat_interleave(2),
    "repeat to a size": lambda: X.repeat_interleave(COUNTS, output_size=4),
    "length": lambda: len(X) + X.shape[0],
    "tensor of numbers": lambda: torch.tensor([1.0, 2.0, 3.0]) + torch.as_tensor(X),
    "top": lambda: X.topk(2),
    "address on a device": lambda: ON_A_DEVICE.data_ptr(),
}


@pytest.mark.filterwarnings("ignore")  # torch advises against some of these calls
@pytest.mark.parametrize("name", READS)
def test_functions_that_read_values_cannot_be_recorded(name):
    with pytest.raises(CannotRecord, match="value"):
        recorded(READS[name], [X, COUNTS], [X])
    READS[name]()  # and nothing is left behind


@pytest.mark.parametrize("name", DOES_NOT_READ)
def test_functions_that_read_no_values_can_be_recorded(name):
    recorded(DOES_NOT_READ[name], [X], [X])


def test_random_numbers_cannot_be_recorded():
    x = torch.ones(2)
    with pytest.raises(CannotRecord, match="random"):
        recorded(lambda: x.add_(torch.rand(2)), [x], [x])


def test_buffers_that_are_refilled_each_time():
    x, out = torch.zeros(3), torch.zeros(3)

    def step():
        total = torch.zeros(3)
        total += x
        total[1:] *= 2
        out.copy_(total)

    _, replay = recorded(step, [x], [out])
    for _ in range(3):
        x += 1
        replay()
        assert torch.equal(out, x * torch.tensor([1.0, 2, 2]))


def test_small_operations_run_in_one_thread_and_large_ones_in_all():
    """The number of threads is restored, also after an error."""
    small, large, out = torch.rand(4), torch.rand(1 << 16), torch.zeros(())
    seen = []

    def function():
        out.copy_(small.softmax(-1).sum(-1) + large.exp().sum(-1))

    recording = Recording(function, [small, large], [out])
    names = {id(run): (not is_many) for run, is_many in zip(recording.calls, recording.large, strict=True)}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        recording()
        assert torch.get_num_threads() == 3
        torch.testing.assert_close(out, small.softmax(-1).sum() + large.exp().sum())
        for run in recording.plans[3]:
            run()
            if id(run) in names:
                seen.append((names[id(run)], torch.get_num_threads()))
        assert set(seen) == {(True, 1), (False, 3)}
        torch.set_num_threads(3)
        recording.plans[3].append(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            recording()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_the_number_of_threads_is_that_of_the_fastest_replays(monkeypatch):
    """Replays are timed by a clock of the test, on which two threads are slower than one."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    large, out, seen, clock = torch.rand(1 << 16), torch.zeros(()), [], [0.0]
    monkeypatch.setattr("t2r.generation.engine.recording.time.perf_counter", lambda: clock[0])
    recording = Recording(lambda: out.copy_(large.exp().sum(-1)), [large], [out], tuned=True)

    def watch():
        seen.append(torch.get_num_threads())
        clock[0] += 0.01 * torch.get_num_threads()

    recording.calls.append(watch)
    recording.large.append(True)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for _ in range(12):
            recording()
            assert torch.get_num_threads() == 2
        assert seen == [2] * 4 + [1] * 8
        torch.set_num_threads(1)
        recording()
        assert seen[12:] == [1]
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        assert not Recording(lambda: out.copy_(large.exp().sum(-1)), [large], [out], tuned=True).tuned
    finally:
        torch.set_num_threads(before)


def test_a_thread_that_starts_during_a_replay_has_all_threads():
    small, large, out, seen = torch.rand(4), torch.rand(1 << 16), torch.zeros(()), []
    recording = Recording(lambda: out.copy_(small.sum(-1) + large.exp().sum(-1)), [small, large], [out])

    def start():
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()

    recording.calls.append(start)
    recording.large.append(False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        recording()
        assert seen == [3]
    finally:
        torch.set_num_threads(before)


def test_random_numbers_of_other_threads_do_not_matter():
    x, y = torch.ones(2), torch.zeros(2)

    def function():
        thread = threading.Thread(target=torch.rand, args=(3,))
        thread.start()
        thread.join()
        y.copy_(2 * x)

    recording = Recording(function, [x], [y])
    x += 1
    recording()
    assert y.tolist() == [4, 4]
    for draws in (lambda: y.copy_(torch.rand(2)), y.uniform_, lambda: y.copy_(torch.dropout(x, 0.5, True))):
        with pytest.raises(CannotRecord, match="random numbers"):
            Recording(draws, [x], [y])
