"""Phi 1, 1.5 and 2: attention beside the feed-forward, positions rotated into part of each head."""

from t2r.surgery.adapters.base import Family

FAMILY = Family("phi", plain_projections=True)
