"""Analysis of attention: distances to the teacher's weights, entropy, features, states, and perplexity by position."""

from t2r.analysis.analyze import analyze
from t2r.analysis.findings import plots, tables

__all__ = ["analyze", "plots", "tables"]
