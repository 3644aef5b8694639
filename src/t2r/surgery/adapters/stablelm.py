"""StableLM: Llama with layer norms and rotary positions in part of each head."""

from t2r.surgery.adapters.base import Family

FAMILY = Family("stablelm", plain_projections=True)
