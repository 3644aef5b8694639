"""Llama, and what is built like it (SmolLM, TinyLlama, Vicuna): rotary positions, grouped-query heads."""

from t2r.surgery.adapters.base import Family

FAMILY = Family("llama", plain_projections=True)
