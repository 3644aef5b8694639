"""Pages of results: `report` makes one self-contained HTML file of a conversion, an experiment, a benchmark, an
evaluation or an analysis."""

from t2r.pages.report import report

__all__ = ["report"]
