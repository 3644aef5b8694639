"""The figures of README.md and of the pages in docs are those of the published records."""

import re

import budgets
import publish
from repository import ROOT

DOCS = ROOT / "docs"


def content(path):
    """Return an SVG file without the version of matplotlib that drew it."""
    return re.sub(r"Matplotlib v[\w.]+", "Matplotlib", path.read_text(encoding="utf-8"))


def test_the_figures_match_their_records_and_the_table_of_memory_budgets(tmp_path):
    drawn = {path.name: content(path) for path in publish.draw_all(tmp_path)}
    shown = {path.name: content(path) for path in DOCS.glob("*.svg")}
    assert drawn == shown, "run: python experiments/publish.py"


def test_a_record_of_memory_budgets_has_a_table():
    def row(name, kl, recalled, **more):
        recall = [{"distance": 256, "accuracy": recalled}]
        return {"model": name, "perplexity": 20.0, "kl": kl, "kept_bytes": 2**20, "recall": recall, "window": 64} | more

    teacher = row("a-model", None, 1.0, kept_bytes=2**22)
    others = [
        row("a-model", 0.3, 0.25, variant="window 9 + 4 sinks", ratio=1.5),
        row("trained-2", 0.1, 0.5, ratio=1.01),
    ]
    steps = [{"name": "plans", "result": {}}, *({"name": f"budget-{i}", "result": [teacher, *others]} for i in "21")]
    steps.append({"name": "alone-2", "result": [teacher, row("state-2", 0.2, 0.125, ratio=1.2)]})
    lines = budgets.table({"steps": steps}).splitlines()
    assert len(lines) == 2 + 1 + 3 + 2
    assert lines[2] == "| the model itself, 64 tokens | 4.00 MiB | 20.00 |  | 100 % |"
    assert lines[3] == "| **a window and a state for each head, trained** | 1.00 MiB | 20.00 (+1.0 %) | 0.100 | 50 % |"
    assert lines[5] == "| a state for each head, trained | 1.00 MiB | 20.00 (+20.0 %) | 0.200 | 12 % |"
