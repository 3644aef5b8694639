"""Adapters of model families. Each family has a module here and an entry in `registry.py`."""

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
