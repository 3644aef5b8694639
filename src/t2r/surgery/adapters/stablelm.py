"""StableLM: Llama with layer norms, positions rotated into part of each head."""

from t2r.surgery.adapters.base import Family

FAMILY = Family("stablelm", plain_projections=True)
