"""Qwen 2 and 2.5: Llama with biases in the query, key and value projections."""

from t2r.surgery.adapters.base import Family

FAMILY = Family("qwen2", plain_projections=True)
