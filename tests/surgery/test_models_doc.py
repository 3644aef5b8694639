"""docs/models.md says what the registry says."""

from pathlib import Path

from t2r.surgery.adapters.table import page

PATH = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_of_models_is_the_registry():
    assert PATH.read_text() == page(), "run: python -m t2r.surgery.adapters.table > docs/models.md"
