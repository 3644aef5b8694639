"""Benchmarks of linear attention: correctness of the measurements, not speed."""

import json
from dataclasses import asdict

import pytest
import torch
from rich.console import Console

from t2r.bench import fla, ops
from t2r.experiments.results import ops_table


def test_peak_bytes():
    x = torch.ones(1 << 18)

    def three_at_once_of_five() -> None:
        a = x + 1
        b = a + 1
        del a
        c = b + 1
        d = c + 1
        del b, c, d
        x.exp()

    peak = ops._peak_bytes(three_at_once_of_five, x.device)
    assert peak == pytest.approx(3 * x.nbytes, rel=1e-3)  # scalars take a few bytes too


def test_a_small_run(monkeypatch):
    monkeypatch.setattr(ops, "GROWTH", (64, 128))
    report = ops.run([32, 64], heads=2, feature_size=4, head_dim=8, repeats=1)
    assert [row.length for row in report.rows] == [32, 64]
    for row in report.rows:
        assert min(row.softmax_forward, row.linear_forward, row.linear_training) > 0
        assert row.memory_multiple > 1  # the output and three gradients alone are this large
    json.dumps(asdict(report))
    with Console(quiet=True) as console:
        console.print(*ops.tables(report))
    assert report.growth is None  # of lengths that were not asked for
    assert not any("tokens as at" in note for note in ops.tables(report)[1:])


def test_the_growth_is_measured_with_the_default_lengths(monkeypatch):
    monkeypatch.setattr(ops, "LENGTHS", (32,))
    monkeypatch.setattr(ops, "GROWTH", (64, 256))
    report = ops.run(heads=2, feature_size=4, head_dim=8, repeats=1)
    assert report.growth > 0
    assert f"take {report.growth:.1f} times as long at 256 tokens as at 64 (linear growth: 4;" in ops.tables(report)[2]


def test_backends_side_by_side_with_decay(monkeypatch):
    monkeypatch.setattr(ops, "GROWTH", (32, 64))
    report = ops.run([32], heads=2, feature_size=4, head_dim=8, repeats=1, backend="chunked, quadratic", decay=True)
    assert [row.backend for row in report.rows] == ["chunked", "quadratic"]
    element = 4 * 2 * 32  # float32, heads, tokens
    assert report.rows[0].forward_bytes == element * (4 + 4 + 8 + 8)
    assert report.rows[0].training_bytes == element * 3 * (4 + 4 + 8 + 8)
    assert report.bandwidth is None


def test_the_device_is_chosen():
    report = ops.run([16], heads=1, feature_size=4, head_dim=4, repeats=1, decay=True, device="auto")
    assert report.settings.device in ("cpu", "cuda")


def test_a_backend_without_a_backward_pass(monkeypatch):
    real = ops._linear
    monkeypatch.setattr(ops, "_linear", lambda inputs, decay, name: (real(inputs, decay, "chunked")[0], None))
    report = ops.run([32], heads=2, feature_size=4, head_dim=8, repeats=1, backend="other")
    assert report.rows[0].linear_forward > 0
    assert report.rows[0].linear_training is None
    table, *notes = ops.tables(report)
    assert list(table.columns[-1].cells) == ["-"]
    assert any(fla.UNTRAINED in note for note in notes)
    assert ops_table(json.loads(json.dumps(asdict(report)))).rstrip().endswith("| - | - |")


@pytest.mark.parametrize(
    ("version", "major", "faulty"), [("3.3.1", 9, False), ("3.6.0", 9, True), ("3.7.1", 9, False), ("3.6.0", 8, False)]
)
def test_where_fla_is_compiled_wrongly(version, major, faulty, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    assert fla.faulty(torch.device("cuda")) is faulty


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("decay", [False, True])
def test_flash_linear_attention_beside_ours(decay, monkeypatch):
    pytest.importorskip("fla.ops")
    monkeypatch.setattr(ops, "GROWTH", (128, 256))
    report = ops.run([128], dtype="bfloat16", device="cuda", backend="triton,fla", decay=decay, repeats=2)
    assert [row.backend for row in report.rows] == ["triton", "fla"]
    inputs = ops._inputs(128, report.settings)
    rates = ops._decay(report.settings)
    ours, theirs = (ops._linear(inputs, rates, name)[0]() for name in ("triton", "fla"))
    if not decay:  # the gated form is not normalized
        torch.testing.assert_close(theirs.transpose(1, 2), ours, atol=1e-2, rtol=1e-2)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_device_times_are_of_captured_graphs(monkeypatch):
    monkeypatch.setattr(ops, "GROWTH", (128, 256))
    report = ops.run([128], dtype="bfloat16", device="cuda", backend="auto,chunked", decay=True, repeats=2)
    assert all(row.softmax_training > 0 for row in report.rows)
    assert report.bandwidth > 1e11
    with Console(quiet=True) as console:
        console.print(*ops.tables(report))
