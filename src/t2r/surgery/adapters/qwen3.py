"""Qwen 3: queries and keys are normalized and then rotated, before the feature map."""

from t2r.surgery.adapters.base import Family

FAMILY = Family("qwen3")
