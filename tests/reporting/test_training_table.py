"""The table of training memory. `tests/training/planning/test_memory.py` compares its formulas with a real model."""

from pathlib import Path

from t2r.reporting.training_table import CLUSTER, SIZES, page, sharded_bytes, training_bytes


def test_the_page_has_a_current_table():
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    assert all(f"| {size.name} |" in text for size in SIZES)
    assert text == page(text), "run: python -m t2r.reporting.training_table docs/training.md"
    assert page(text.replace("Mistral-7B", "another")) == text


def test_the_page_about_clusters_has_a_current_table():
    text = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")
    assert all(f"| {size.name} | {processes} |" in text for size, processes in CLUSTER)
    assert text == page(text), "run: python -m t2r.reporting.training_table docs/cluster.md"


def test_processes_divide_weights_but_not_what_they_gather():
    for size, _ in CLUSTER:
        one = training_bytes(size, "all", 4096, checkpointing=True)
        assert sharded_bytes(size, 4096, 1) == one
        many = [sharded_bytes(size, 4096, count) for count in (2, 8, 64)]
        assert many == sorted(many, reverse=True)
        assert many[-1] > size.tables * 10
