"""Tables fit the width of the terminal: numbers are never split, and models are shown by their names."""

import copy
import io
import json
import re

import pytest
import torch
from rich.console import Console
from rich.table import Table

from families import tiny
from t2r import evaluation, terminal
from t2r.analysis import findings as analyses
from t2r.bench import decoding, memory, ops, training
from t2r.experiments.record import recorded
from t2r.pages.sections import decoding_report
from t2r.reporting import environment, inspection, inspection_tables
from t2r.training.sessions.session import as_table

LONG = "/home/someone/experiments/2026/models"
MEASURED = {"first": 0, "last": 255, "perplexity": 12345.678}


def shown(parts, width=80):
    file = io.StringIO()
    console = Console(width=width, highlight=False, markup=False, emoji=False, file=file)
    for part in parts:
        if not isinstance(part, str):
            terminal.show(part, console)
    return file.getvalue()


def evaluated():
    results = copy.deepcopy(next(s for s in recorded("smollm2-pure")["steps"] if s["name"] == "controls")["result"])
    for result in results:
        result["model"] = f"{LONG}/{result['model']}"
        for part in result["measured"]:
            part["by_position"] = [MEASURED]
    return evaluation.tables(results)


def decoded():
    text = json.dumps(recorded("smollm2-decode-gpu")["steps"][0]["result"][0])
    return decoding.tables(decoding_report(json.loads(re.sub(r'"(smollm2|pure|kept)', rf'"{LONG}/\1', text))))


def batches():
    rows = [
        memory.Row(f"{LONG}/{name}", 123_456, True, 2**37, 12345.678, 9_876_543.0, 0.25, None)
        for name in ("smollm2", "smollm2, window of 390")
    ]
    return memory.tables(memory.Report(memory.MemorySettings(8192, 8, 3, "bfloat16", "cuda", 2**37, 2), rows))


def kernels():
    row = ops.Row(131_072, "triton", 1234.567, 1234.567, 1234.567, 12.34, 2**40, 2**40, 12345.678)
    settings = ops.OpsSettings(1, 8, 32, 128, "bfloat16", "cuda", ("triton",), True, 5, 2)
    return ops.tables(ops.Report(settings, [row], 2.0, 3e12))


def steps():
    row = training.Row("finetuning of the softmax model", 12345.6, 1_234_567.0, 2**37)
    settings = training.TrainingSettings("distill-lm", 16384, 512, "bfloat16", "cuda", True, 10, 2)
    return training.tables(training.Report(settings, [row]))


def analyzed():
    head = {"head": 31, "euclidean": 0.123}
    layer = {"layer": 31, "kind": "cross", "recurrent": True, "heads": [head], "half_life": {"median": 12345.6}}
    layer |= {"euclidean": 0.123, "jensen_shannon": 0.123, "entropy": 12.345, "teacher_entropy": 12.345}
    layer |= {"dead": 0.1234, "bounded": 0.1234}
    mean = {"euclidean": 0.1, "jensen_shannon": 0.1, "entropy": 1.0, "teacher_entropy": 1.0}
    result = {"model": f"{LONG}/rnn", "text": f"{LONG}/valid.txt", "samples": 16, "mean": mean, "layers": [layer]}
    return analyses.tables(result | {"by_distance": [], "notes": []})


def converted():
    header = ("model", "perplexity", "against the teacher", "KL to the teacher", "recall after 256 tokens")
    return [
        as_table(header, [("swapped, not trained, of a long name", "123456.78", "+123456.7%", "12.3456", "12.5 %")])
    ]


@pytest.mark.parametrize(
    "tables",
    [
        evaluated, decoded, batches, kernels, steps, analyzed, converted,
        lambda: environment.tables(environment.describe()),
        lambda: inspection_tables.tables(inspection.inspect_model(tiny("marian", torch.float32))),
    ],
)  # fmt: skip
def test_every_table_is_readable_at_80_columns(tables):
    parts = tables()
    text = shown(parts)
    assert max(map(len, text.splitlines())) <= 80
    for table in (part for part in parts if not isinstance(part, str)):
        first = max((i for i, column in enumerate(table.columns) if column.justify == "left"), default=0) + 1
        for column in table.columns[first:]:
            for cell in column.cells:
                assert f" {cell} " in text
    assert LONG not in text


def test_a_table_that_fits_is_one():
    table = Table("model", "a", title="t")
    table.add_row("x", "1")
    assert shown([table]).count("━━━┓") == 1


def test_columns_that_do_not_fit_are_in_another_table():
    table = Table(title="title")
    table.add_column("row", justify="left")
    for i in range(6):
        table.add_column(f"column {i}", justify="right")
    table.add_row("one", *(f"{i}" * 20 for i in range(6)))
    text = shown([table], 60)
    assert text.count("title") == 1
    assert text.count("one") == 3
    assert all(f"{i}" * 20 in text for i in range(6))


def test_folders_of_one_name_are_told_apart():
    rows = [memory.Row(f"{LONG}/{name}/rnn", 1, False, 1, None, None, None, None) for name in ("a", "b")]
    text = shown(memory.tables(memory.Report(memory.MemorySettings(1, 1, 1, "float32", "cpu", 1, 1), rows)))
    assert "a/rnn" in text
    assert "b/rnn" in text
