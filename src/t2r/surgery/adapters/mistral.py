"""Mistral: Llama with a sliding window. Recurrent layers have no window and process the whole sequence."""

from t2r.surgery.adapters.base import Family

FAMILY = Family("mistral", plain_projections=True)
