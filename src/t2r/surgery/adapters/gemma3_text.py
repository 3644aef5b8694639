"""Gemma 3, the text models: most layers look through a window, queries and keys are normalized."""

from t2r.surgery.adapters.base import Family

FAMILY = Family("gemma3_text")
