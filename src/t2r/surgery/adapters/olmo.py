"""OLMo: Llama with layer norms without weights, and optional clipping of queries, keys and values."""

from t2r.surgery.adapters.base import Family

FAMILY = Family("olmo")
