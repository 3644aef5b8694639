"""OLMo: Llama with norms that have no weights, and projections that may be clipped."""

from t2r.surgery.adapters.base import Family

FAMILY = Family("olmo")
