"""What is said when there is not enough memory."""

import sys

import numpy as np
import pytest
import torch

from t2r import cli
from t2r.capacity import free_memory, human, refuse_beyond_memory, shortage
from t2r.errors import T2RError

GPU = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 1.25 GiB is "
    "free. Including non-PyTorch memory, this process has 1.00 GiB memory in use."
)


def test_errors_for_lack_of_memory_say_what_was_asked_and_what_there_is():
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(2**52)
    assert "16.0 PiB were asked for, and" in str(shortage(of_torch.value))
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(2**52)
    assert "were asked for, and" in str(shortage(of_numpy.value))
    with pytest.raises(RuntimeError) as overflow:
        torch.empty(2**40, 2**40)
    assert "more than there is was asked for" in str(shortage(overflow.value))
    assert "20 GiB were asked for, and the GPU has 139.72 GiB, of which 1.25 GiB are free" in str(
        shortage(torch.OutOfMemoryError(GPU))
    )
    assert "out of memory" in str(shortage(MemoryError()))
    assert shortage(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert shortage(ValueError("9 bytes")) is None


def test_a_command_that_runs_out_of_memory_is_one_line(monkeypatch, capsys):
    def run(*_: object, **__: object) -> None:
        torch.empty(2**52)

    monkeypatch.setattr(cli, "app", run)
    monkeypatch.setattr(sys, "argv", ["t2r", "info"])
    monkeypatch.delenv("T2R_DEBUG", raising=False)
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("t2r: out of memory: 16.0 PiB were asked for, and ")


def test_work_beyond_memory_is_refused():
    cpu = torch.device("cpu")
    refuse_beyond_memory(1, cpu, "a row needs")
    with pytest.raises(T2RError, match=r"2 rows need at least 1\.0 EiB of memory, and .* are free on cpu"):
        refuse_beyond_memory(2**60, cpu, "2 rows need")
    assert free_memory(cpu) > 2**20
    assert human(2**70) == "1024 EiB"
