"""The table of training memory. `tests/training/planning/test_memory.py` compares its formulas with a real model."""

from pathlib import Path

from t2r.reporting.training_table import SIZES, page


def test_the_page_has_a_current_table():
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    assert all(f"| {size.name} |" in text for size in SIZES)
    assert text == page(text), "run: python -m t2r.reporting.training_table docs/training.md"
    assert page(text.replace("Mistral-7B", "another")) == text
