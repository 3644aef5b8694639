"""Phi 1, 1.5 and 2: attention parallel to the feed-forward, rotary positions in part of each head."""

from t2r.surgery.adapters.base import Family

FAMILY = Family("phi", plain_projections=True)
