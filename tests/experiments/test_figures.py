"""The figures of README.md and of the pages in docs are those of the published records."""

import re

import publish
from repository import ROOT

DOCS = ROOT / "docs"


def content(path):
    """Return an SVG file without the version of matplotlib that drew it."""
    return re.sub(r"Matplotlib v[\w.]+", "Matplotlib", path.read_text(encoding="utf-8"))


def test_the_figure_of_the_readme_matches_its_record(tmp_path):
    publish.draw_decoding(tmp_path / "decoding.svg")
    drawn, shown = content(tmp_path / "decoding.svg"), content(DOCS / "decoding.svg")
    assert drawn == shown, "run: python experiments/publish.py"


def test_the_figures_of_the_pages_match_their_records(tmp_path):
    drawn = {path.name: content(path) for path in publish.draw_all(tmp_path)}
    shown = {path.name: content(path) for path in DOCS.glob("*.svg") if path.name != "decoding.svg"}
    assert drawn == shown, "run: python experiments/publish.py"
