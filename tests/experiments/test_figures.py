"""The figures of README.md and of the pages in docs are those of the shipped records."""

import re

from repository import ROOT
from t2r.experiments import charts, figures

DOCS = ROOT / "docs"


def content(path):
    """Return an SVG file without the version of matplotlib that drew it."""
    return re.sub(r"Matplotlib v[\w.]+", "Matplotlib", path.read_text(encoding="utf-8"))


def test_the_figure_of_the_readme_matches_its_record(tmp_path):
    figures.draw(str(tmp_path / "decoding.svg"))
    drawn, shown = content(tmp_path / "decoding.svg"), content(DOCS / "decoding.svg")
    assert drawn == shown, "run: python -m t2r.experiments.figures docs/decoding.svg"


def test_the_figures_of_the_pages_match_their_records(tmp_path):
    drawn = {path.name: content(path) for path in charts.draw_all(tmp_path)}
    shown = {path.name: content(path) for path in DOCS.glob("*.svg") if path.name != "decoding.svg"}
    assert drawn == shown, "run: python -m t2r.experiments.charts docs"
