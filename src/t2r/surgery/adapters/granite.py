"""Granite: Llama with multipliers, including one for the attention scores."""

from t2r.surgery.adapters.base import Family

FAMILY = Family("granite", plain_projections=True)
