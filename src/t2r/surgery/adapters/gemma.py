"""Gemma: Llama with wide heads, whose size the model's does not fix."""

from t2r.surgery.adapters.base import Family

FAMILY = Family("gemma", plain_projections=True)
