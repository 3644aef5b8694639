"""docs/models.md matches the registry."""

from pathlib import Path

from t2r.surgery.adapters.table import page

PATH = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_of_models_matches_the_registry():
    assert PATH.read_text() == page(), "run: python -m t2r.surgery.adapters.table > docs/models.md"
