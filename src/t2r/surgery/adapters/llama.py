"""Llama and models with its architecture (SmolLM, TinyLlama, Vicuna): rotary positions, grouped-query attention."""

from t2r.surgery.adapters.base import Family

FAMILY = Family("llama", plain_projections=True)
