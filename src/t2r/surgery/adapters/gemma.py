"""Gemma: Llama with a head size that is independent of the hidden size."""

from t2r.surgery.adapters.base import Family

FAMILY = Family("gemma", plain_projections=True)
