"""Qwen 2 and 2.5: Llama with biases on queries, keys and values."""

from t2r.surgery.adapters.base import Family

FAMILY = Family("qwen2", plain_projections=True)
