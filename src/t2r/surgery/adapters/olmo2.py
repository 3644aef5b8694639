"""OLMo 2: normalized queries and keys, and normalization after each layer."""

from t2r.surgery.adapters.base import Family

FAMILY = Family("olmo2")
