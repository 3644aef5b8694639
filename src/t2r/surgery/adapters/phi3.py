"""Phi 3 and 3.5 mini: Llama with fused projections and a sliding window."""

from t2r.surgery.adapters.base import Family

FAMILY = Family("phi3")
