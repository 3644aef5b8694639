"""Granite: Llama with multipliers of its own, the one of the attention scores among them."""

from t2r.surgery.adapters.base import Family

FAMILY = Family("granite", plain_projections=True)
