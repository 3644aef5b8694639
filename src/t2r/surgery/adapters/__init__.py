"""Adapters of model families. Each is a row of `plain.py` or a module here, and an entry in `names.py`."""

from t2r.surgery.adapters.base import Family, Shape, Site, change_class
from t2r.surgery.adapters.names import FAMILIES, refusal
from t2r.surgery.adapters.registry import family, family_of, repaired

__all__ = [
    "FAMILIES",
    "Family",
    "Shape",
    "Site",
    "change_class",
    "family",
    "family_of",
    "refusal",
    "repaired",
]
