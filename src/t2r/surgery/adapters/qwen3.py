"""Qwen 3: queries and keys are normalized before they are rotated; the map sees them after both."""

from t2r.surgery.adapters.base import Family

FAMILY = Family("qwen3")
