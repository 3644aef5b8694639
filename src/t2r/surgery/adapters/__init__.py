"""What must be known of a family of models to swap it: a file a family, a line each in `registry.py`."""

from t2r.surgery.adapters.base import Family, Shape, Site, change_class
from t2r.surgery.adapters.registry import FAMILIES, family, family_of, refusal

__all__ = [
    "FAMILIES",
    "Family",
    "Shape",
    "Site",
    "change_class",
    "family",
    "family_of",
    "refusal",
]
