"""Gemma 3 text models: sliding windows in most layers, normalized queries and keys."""

from t2r.surgery.adapters.base import Family

FAMILY = Family("gemma3_text")
