"""Mistral: Llama with a sliding window. A recurrent layer has no window: it remembers from the beginning."""

from t2r.surgery.adapters.base import Family

FAMILY = Family("mistral", plain_projections=True)
